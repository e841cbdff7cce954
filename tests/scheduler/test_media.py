"""Embeddings of pictures, videos and sounds: when they are computed, kept and dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_fake_runner import FakeRunner, Job, Workload
from random_examples import examples
from scheduling import answer, cache, planned, scheduler

from engine_core.configs import SamplingParams, SchedulerConfig
from engine_core.errors import RequestError
from engine_core.inputs import MediaItem, ProcessedPrompt, media_digest
from engine_core.scheduler import Scheduler, Sequence
from engine_core.steps import MediaWork


def picture(start: int, end: int, digest: bytes = b"p") -> MediaItem:
    return MediaItem("image", digest + bytes([end - start]), (start, end))


def job(
    length: int, *media: MediaItem, salts: tuple[str, ...] = (), arrival: int = 0, priority: int = 0
) -> Job:
    prompt = ProcessedPrompt((1,) * length, cache_salts=salts, media=media)
    return Job(prompt, SamplingParams(max_tokens=2, ignore_eos=True), arrival, priority=priority)


def workload(*jobs: Job, room: int = 16, step: int = 8, blocks: int = 40) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=step,
        max_model_len=32,
        encoder_cache_tokens=room,
    )
    cache_config = cache(num_blocks=blocks, block_size=4)
    return Workload(Scheduler(config, cache_config), FakeRunner(config, cache_config), jobs, [1])


def encoded(given: Workload) -> int:
    """How many items were computed, after a run in which each request is what it is alone."""
    given.run()
    given.verify()
    return given.runner.num_encoded


def test_an_item_is_computed_once_for_all_its_chunks_and_all_who_show_it() -> None:
    """Chunks of 8 tokens end inside of it; the prompts begin differently."""
    shown = picture(3, 15)
    other = ProcessedPrompt((2,) * 20, media=(picture(5, 17),))
    jobs = [job(20, shown), Job(other, SamplingParams(max_tokens=2, ignore_eos=True))]
    run = workload(*jobs)
    assert encoded(run) == 1
    assert (run.scheduler.encoder_cache.queries, run.scheduler.encoder_cache.hits) == (2, 1)


def test_salts_keep_items_apart() -> None:
    assert encoded(workload(job(20, picture(3, 15), salts=("a",)), job(20, picture(3, 15)))) == 2


def test_blocks_of_other_pictures_are_not_taken_from_the_prefix_cache() -> None:
    """All placeholders are the same token: a picture is told by its blocks, as its place is."""
    shown = picture(2, 14), picture(2, 14, b"q"), picture(3, 15), picture(2, 14)
    given = workload(*(job(20, each, arrival=30 * n) for n, each in enumerate(shown)), room=24)
    assert encoded(given) == 2
    cached = [outcome.request.num_cached_tokens for outcome in given.outcomes]
    assert cached == [0, 0, 0, 16]


def test_what_nobody_holds_goes_for_what_is_needed_the_oldest_first() -> None:
    first, second, third = (picture(1, 9, bytes([n])) for n in range(3))
    shown = (first, second, first, third, first, second)
    # With other tokens each, so that the prefix cache has none of their blocks.
    jobs = [
        Job(ProcessedPrompt((2 + n,) * 12, media=(each,)), SamplingParams(max_tokens=2), 30 * n)
        for n, each in enumerate(shown)
    ]
    # The third takes the place of the second, which was not used since.
    assert encoded(workload(*jobs, room=16)) == 4


def test_a_chunk_ends_before_an_item_that_there_is_no_room_for_yet() -> None:
    jobs = [job(28, picture(2, 12)), job(28, picture(6, 16, b"q"))]
    given = workload(*jobs, room=10)
    assert encoded(given) == 2


def test_an_item_whose_span_is_computed_leaves_its_room_to_others() -> None:
    sched = scheduler(encoder_cache_tokens=10, max_num_batched_tokens=16)
    for name, digest in (("a", b"p"), ("b", b"q")):
        prompt = ProcessedPrompt((1,) * 14, media=(picture(2, 12, digest),))
        sched.add(
            Sequence(name, prompt, SamplingParams(max_tokens=9), arrival_time=0.0, max_model_len=64)
        )
    plans = [planned(sched)]
    # Both have tokens before their pictures, and only one has room for its picture.
    assert [(row.sequence_id, row.num_tokens) for row in plans[0].rows] == [("a", 14), ("b", 2)]
    answer(sched, plans[0])
    plans.append(planned(sched))
    assert [(row.sequence_id, row.num_tokens) for row in plans[1].rows] == [("a", 1), ("b", 12)]
    (use,) = plans[1].media
    assert (use.place, use.item) == (1, 0)
    assert plans[1].media_work == (MediaWork(plans[1].rows[1].row, 0, use.slot, 0, 10, 10),)
    assert plans[1].freed_media == (plans[0].media[0].slot,)


@pytest.mark.parametrize("in_parts", [True, False])
def test_beside_a_sequence_that_decodes_an_item_is_computed_within_the_budget(
    in_parts: bool,
) -> None:
    """Twelve embeddings of two tokens each; the budget is of ten."""
    sched = scheduler(encoder_cache_tokens=16, max_num_batched_tokens=32)
    sched.prompt_budget = lambda rows, tokens, cached: 10
    sched.media_cost = lambda size, begin, end: 24 * (end - begin) / size
    sched.media_in_parts = in_parts
    prompts = ProcessedPrompt((1,) * 2), ProcessedPrompt((1,) * 17, media=(picture(4, 16),))
    for name, prompt in zip("ab", prompts, strict=True):
        sched.add(
            Sequence(
                name,
                prompt,
                SamplingParams(max_tokens=30, ignore_eos=True),
                arrival_time=0.0,
                max_model_len=64,
            )
        )
        answer(sched, planned(sched))
    work, chunks = [], []
    for _ in range(4):
        plan = planned(sched)
        answer(sched, plan)
        work += [(each.begin, each.end) for each in plan.media_work]
        chunks += [(row.start, row.num_tokens) for row in plan.rows if row.sequence_id == "b"]
    # What a part leaves of the budget goes to the chunk behind it.
    assert work == ([(0, 5), (5, 10), (10, 12)] if in_parts else [(0, 12)])
    assert chunks == ([(4, 6), (10, 7)] if in_parts else [(4, 10), (14, 3), (17, 1)])


def two(sched: Scheduler, tokens: int, shown: tuple[MediaItem, ...]) -> list[Sequence]:
    """One that decodes ``tokens`` tokens at most, and a prompt of 17 tokens with items."""
    sched.prompt_budget = lambda rows, tokens, cached: 10
    sched.media_cost = lambda size, begin, end: 24 * (end - begin) / size
    sched.media_in_parts = True
    return [
        Sequence(
            name,
            prompt,
            SamplingParams(max_tokens=count, ignore_eos=True),
            arrival_time=0.0,
            max_model_len=64,
        )
        for name, prompt, count in (
            ("a", ProcessedPrompt((1,) * 2), tokens),
            ("b", ProcessedPrompt((1,) * 17, media=shown), 30),
        )
    ]


@pytest.mark.parametrize(("cost", "parts"), [(24, 3), (8, 1)])
def test_an_item_at_the_very_beginning_is_computed_in_parts_too(cost: int, parts: int) -> None:
    """Unless a step's budget is enough for it: then a chunk comes with it, of what is left."""
    sched = scheduler(encoder_cache_tokens=16, max_num_batched_tokens=32)
    decoding, shows = two(sched, 30, (picture(0, 12),))
    sched.media_cost = lambda size, begin, end: cost * (end - begin) / size
    sched.add(decoding)
    answer(sched, planned(sched))
    sched.add(shows)
    work, chunks, admitted = [], [], []
    for _ in range(5):
        plan = planned(sched)
        answer(sched, plan)
        sched.check()
        admitted += [each.sequence_id for each in plan.admitted]
        work += [(each.begin, each.end) for each in plan.media_work]
        chunks += [(row.start, row.num_tokens) for row in plan.rows if row.sequence_id == "b"]
        assert "a" in [row.sequence_id for row in plan.rows]
    assert admitted == ["b"]
    if parts == 1:
        assert work == [(0, 12)]
        assert chunks[:3] == [(0, 2), (2, 10), (12, 5)]
    else:
        assert work == [(0, 5), (5, 10), (10, 12)]
        assert chunks == [(0, 6), (6, 10), (16, 1)]


def beside_pictures(
    parts: int, cost: float | None, *sizes: int, prompt_sizes: tuple[int, ...] = ()
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Beside one that decodes prompts show a picture each, in the middle.

    A step has time for 10 tokens of prompts. The model computes a picture in ``parts``, each of
    which takes as long as ``cost`` tokens.

    Returns:
        which embeddings each step computes, and how many tokens of prompts, as long as it decodes.
    """
    sched = scheduler(encoder_cache_tokens=99, max_num_batched_tokens=32, max_num_seqs=8)
    sched.prompt_budget = lambda rows, tokens, cached: 10
    sched.media_cost = lambda size, begin, end: (
        None if cost is None else cost * parts * (end - begin) / size
    )
    sched.media_in_parts = True
    sched.prompt_sizes = prompt_sizes
    shown = [
        ProcessedPrompt((1,) * 60, media=(picture(1, 1 + size, bytes([number])),))
        for number, size in enumerate(sizes)
    ]
    for number, prompt in enumerate((ProcessedPrompt((1,) * 2), *shown)):
        sampling = SamplingParams(max_tokens=1 if number else 60, ignore_eos=True)
        name = str(number)
        sched.add(Sequence(name, prompt, sampling, arrival_time=0.0, max_model_len=64))
        if number == 0:
            answer(sched, planned(sched), media_parts={("image", 12): parts})
    answer(sched, planned(sched))  # the tokens before the pictures
    work, tokens = [], []
    while sched.num_running > 1:
        plan = planned(sched)
        if "0" not in [row.sequence_id for row in plan.rows]:
            break
        answer(sched, plan)
        work.append([(each.begin, each.end) for each in plan.media_work])
        # A last token of a prompt by itself takes no more than one that a row decodes.
        chunks = [row for row in plan.rows if row.num_tokens > 1 or not row.sample]
        tokens.append(sum(row.num_tokens for row in chunks))
    return work, tokens


def test_a_step_has_whole_parts_of_a_picture_for_which_it_has_time() -> None:
    """Of 20 embeddings in 8 parts the first two are 5: three would take 12 tokens' time."""
    work, tokens = beside_pictures(8, 4, 20)
    assert work[:5] == [[(0, 5)], [(5, 10)], [(10, 15)], [(15, 20)], []]
    assert tokens[:4] == [0, 0, 0, 2]


def test_pictures_side_by_side_share_the_time_of_a_step() -> None:
    """Each leaves half of it to those behind, which have time for a part if all of it is left."""
    work, tokens = beside_pictures(4, 4, 20, 20)
    assert work[:3] == [[(n, n + 5)] * 2 for n in (0, 5, 10)]
    # The first has its last part and half of what is left, which then is too short for the second.
    assert (work[3:5], tokens[:5]) == ([[(15, 20)], [(15, 20)]], [0, 0, 0, 3, 6])
    # Half of the time is too short for a part, and the rest of it after one too.
    work, tokens = beside_pictures(4, 6, 20, 20)
    assert work[:4] == [[(n, n + 5)] for n in (0, 5, 10, 15)]
    assert tokens[:3] == [0, 0, 0]


def test_padding_beside_a_picture_has_its_time() -> None:
    """A chunk of 5 tokens takes as long as one of 8."""
    sizes = (2, 4, 8, 16, 32)
    work, tokens = beside_pictures(4, 4, 20, prompt_sizes=sizes)
    assert (work[:3], tokens[:3]) == ([[(0, 10)], [(10, 20)], []], [0, 2, 10])
    work, tokens = beside_pictures(4, 2.5, 20, 20, prompt_sizes=sizes)
    for parts, count in zip(work, tokens, strict=True):
        padded = min(size for size in (0, *sizes) if size >= count)
        assert not parts or padded + sum(end - begin for begin, end in parts) / 5 * 2.5 <= 10


def test_a_part_that_takes_longer_than_a_step_should_comes_alone() -> None:
    """And of several pictures each has its turn."""
    work, tokens = beside_pictures(4, 11, 20, 20)
    parts = [(n, n + 5) for n in (0, 5, 10, 15)]
    shown = [each for each in work if each]
    assert all(len(each) == 1 for each in shown)
    assert sorted(each for (each,) in shown) == sorted(parts * 2)
    assert [count for each, count in zip(work, tokens, strict=True) if each] == [0] * 8


def test_behind_parts_that_take_longer_than_steps_should_others_go_on() -> None:
    """A part takes as long as 22 tokens, of which 5 are its share while another prompt waits."""
    sched = scheduler(encoder_cache_tokens=16, max_num_batched_tokens=32, num_blocks=99)
    decoding, shows = two(sched, 50, (picture(1, 13),))
    sched.media_cost = lambda size, begin, end: 22 * 4 * (end - begin) / size
    sched.add(decoding)
    answer(sched, planned(sched), media_parts={("image", 12): 4})
    sched.add(shows)
    answer(sched, planned(sched))
    behind = ProcessedPrompt((2,) * 60)
    sampling = SamplingParams(max_tokens=1)
    sched.add(Sequence("c", behind, sampling, arrival_time=0.0, max_model_len=64))
    steps = []
    for _ in range(14):
        plan = planned(sched)
        answer(sched, plan)
        tokens = sum(row.num_tokens for row in plan.rows if row.sequence_id == "c")
        steps.append((len(plan.media_work), tokens))
        assert "a" in [row.sequence_id for row in plan.rows]
    # 17 are owed; while another waits it takes four steps to give them back.
    assert steps[:10] == [(1, 0), *[(0, 10)] * 4, (1, 0), (0, 10), (0, 10), (1, 0), (1, 0)]


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_part_took_too_long_is_made_good_by_steps_without_pictures(busy: bool) -> None:
    """Be they of others' prompts, or of none at all."""
    sched = scheduler(encoder_cache_tokens=99, max_num_batched_tokens=32, num_blocks=199)
    decoding, shows = two(sched, 60, (picture(1, 13),))
    sched.media_cost = lambda size, begin, end: 60 * 4 * (end - begin) / size
    sched.add(decoding)
    answer(sched, planned(sched), media_parts={("image", 12): 4})
    sched.add(shows)
    answer(sched, planned(sched))
    plan = planned(sched)
    answer(sched, plan)
    assert len(plan.media_work) == 1
    sched.abort("b")

    def add(name: str, media: tuple[MediaItem, ...] = ()) -> None:
        prompt = ProcessedPrompt((ord(name),) * 60, media=media)
        sampling = SamplingParams(max_tokens=1)
        sched.add(Sequence(name, prompt, sampling, arrival_time=0.0, max_model_len=64))

    if busy:
        add("c")
    for _ in range(6):  # 50 are owed, of 10 a step
        answer(sched, planned(sched))
    add("d", (picture(1, 13, b"q"),))
    add("e")
    work = []
    for _ in range(3):
        plan = planned(sched)
        answer(sched, plan)
        work.append(len(plan.media_work))
    assert 1 in work[:2]


def test_who_leaves_a_step_to_others_and_is_preempted_in_it_has_no_part_there() -> None:
    """It has tokens before its picture, for which an urgent prompt left no blocks."""
    sched = scheduler(encoder_cache_tokens=99, max_num_batched_tokens=32, num_blocks=19)
    budget = 10
    sched.prompt_budget = lambda rows, tokens, cached: budget
    sched.media_cost = lambda size, begin, end: 60.0
    sched.media_in_parts = True

    def add(name: str, length: int, *media: MediaItem, priority: int = 0) -> None:
        prompt = ProcessedPrompt((ord(name[0]),) * length, media=media)
        sampling = SamplingParams(max_tokens=1 if media else 9, ignore_eos=True)
        sched.add(
            Sequence(name, prompt, sampling, arrival_time=0.0, max_model_len=64, priority=priority)
        )

    add("a", 13)
    answer(sched, planned(sched))
    add("owes", 14, picture(1, 13))
    add("b", 40, picture(24, 36, b"q"))
    answer(sched, planned(sched))
    plan = planned(sched)
    answer(sched, plan)
    assert len(plan.media_work) == 1
    sched.abort("owes")
    budget = 32
    add("urgent", 32, priority=-1)
    answer(sched, planned(sched))
    add("c", 20)
    plan = planned(sched)
    assert sched.num_preemptions == 1
    assert [row.sequence_id for row in plan.rows] == ["urgent", "a"]
    assert not plan.media_work
    assert sched.encoder_cache.fits([("another", 99)])
    answer(sched, plan)


@pytest.mark.parametrize("cost", [11, 22])
def test_pictures_with_long_parts_are_done_in_the_order_in_which_they_came(cost: int) -> None:
    """Two new ones come every eighth step, and a picture has four parts."""
    sched = scheduler(encoder_cache_tokens=400, max_num_batched_tokens=32, max_num_seqs=16)
    decoding, _ = two(sched, 60, ())
    sched.media_cost = lambda size, begin, end: cost * 4 * (end - begin) / size
    sched.add(decoding)
    answer(sched, planned(sched), media_parts={("image", 12): 4})
    done = []
    for step in range(48):
        for number in (step // 4, step // 4 + 1) if step % 8 == 0 else ():
            shows = ProcessedPrompt((1,) * 22, media=(picture(1, 21, bytes([number])),))
            sampling = SamplingParams(max_tokens=1)
            sched.add(Sequence(str(number), shows, sampling, arrival_time=0.0, max_model_len=64))
        plan = planned(sched)
        assert "a" in [row.sequence_id for row in plan.rows]
        done += [int(each.sequence_id) for each in answer(sched, plan) if each.finish_reason]
    assert done[:4] == [0, 1, 2, 3]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.floats(0.3, 30), st.integers(1, 25), st.integers(1, 3))
def test_a_step_keeps_within_its_time_unless_it_has_one_part_alone(
    parts: int, cost: float, size: int, count: int
) -> None:
    ends = sorted({part * size // min(parts, size) for part in range(min(parts, size) + 1)})
    for work, tokens in zip(*beside_pictures(parts, cost, *[size] * count), strict=True):
        assert all(begin in ends and end in ends for begin, end in work)
        if tokens or [ends.index(end) - ends.index(begin) for begin, end in work] != [1]:
            taken = sum(cost * parts * (end - begin) / size for begin, end in work)
            assert tokens + taken <= 10 + 1e-9


def test_a_part_is_planned_whole_from_the_moment_that_the_model_says_how_many_there_are() -> None:
    """Its first of two is taken for the first of sixteen, and computed as a whole."""
    sched = scheduler(encoder_cache_tokens=48, max_num_batched_tokens=32, num_blocks=99)
    decoding, _ = two(sched, 50, ())
    sched.media_cost = lambda size, begin, end: 11
    sched.add(decoding)
    answer(sched, planned(sched))
    prompt = ProcessedPrompt((1,) * 40, media=(picture(1, 33),))
    sampling = SamplingParams(max_tokens=1)
    sched.add(Sequence("c", prompt, sampling, arrival_time=0.0, max_model_len=64))
    answer(sched, planned(sched))
    work = []
    for _ in range(2):
        plan = planned(sched)
        answer(sched, plan, media_parts={("image", 12): 2})
        work += [(each.begin, each.end) for each in plan.media_work]
    assert work == [(0, 2), (2, 32)]


def test_items_of_a_kind_have_numbers_of_parts_of_their_own() -> None:
    """As videos of InternVL, whose tower takes 32 frames at once: two come together, again."""
    parts = {16: 4, 24: 12}
    sched = scheduler(encoder_cache_tokens=99, max_num_batched_tokens=32, num_blocks=199)
    decoding, _ = two(sched, 60, ())
    sched.media_cost = lambda size, begin, end: 4 * parts[size] * (end - begin) / size
    sched.add(decoding)
    answer(sched, planned(sched))
    for again in range(3):
        for size in parts:
            shows = ProcessedPrompt((1,) * 30, media=(picture(1, 1 + size, bytes([again])),))
            sampling = SamplingParams(max_tokens=1)
            name = f"{again}.{size}"
            sched.add(Sequence(name, shows, sampling, arrival_time=0.0, max_model_len=64))
        while sched.num_running + sched.num_waiting > 1:
            plan = planned(sched)
            computed = {("image", work.size): parts[work.size] for work in plan.media_work}
            answer(sched, plan, media_parts=computed)
            if again:
                # Whole parts, as many as there is time for, of what both were known to have.
                ends = [(w.size, end) for w in plan.media_work for end in (w.begin, w.end)]
                assert all(end * parts[size] % size == 0 for size, end in ends)
                taken = sum(4 * parts[w.size] * (w.end - w.begin) / w.size for w in plan.media_work)
                assert taken <= 10


def test_of_what_nobody_knows_the_cost_a_step_has_one_part() -> None:
    work, tokens = beside_pictures(4, None, 20)
    assert work[:4] == [[(n, n + 5)] for n in (0, 5, 10, 15)]
    assert tokens[:5] == [0] * 4 + [10]


def test_nobody_is_admitted_by_a_plan_without_rows() -> None:
    """The sequence beside it has its last token in flight."""
    sched = scheduler(encoder_cache_tokens=16, max_num_batched_tokens=32)
    decoding, shows = two(sched, 2, (picture(0, 12),))
    sched.add(decoding)
    answer(sched, planned(sched))
    last = planned(sched)
    sched.add(shows)
    assert sched.schedule() is None
    sched.check()
    answer(sched, last)
    plan = planned(sched)
    assert [each.sequence_id for each in plan.admitted] == ["b"]
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 17)]
    answer(sched, plan)
    sched.check()


def test_who_preempts_all_that_decode_has_its_item_computed_at_once() -> None:
    """The step was planned with a budget beside the one that decoded."""
    sched = scheduler(encoder_cache_tokens=16, max_num_batched_tokens=32, max_num_seqs=1)
    sched.prompt_budget = lambda rows, tokens, cached: 5
    sched.media_cost = lambda size, begin, end: 1.0 * (end - begin)
    sched.media_in_parts = True
    shows = ProcessedPrompt((1,) * 17, media=(picture(0, 12),))
    for name, prompt, priority in (("a", ProcessedPrompt((1,) * 2), 1), ("b", shows, 0)):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        sequence = Sequence(
            name, prompt, sampling, arrival_time=0.0, max_model_len=64, priority=priority
        )
        sched.add(sequence)
        plan = planned(sched)
        answer(sched, plan)
    assert [each.sequence_id for each in plan.admitted] == ["b"]
    assert [(row.sequence_id, row.num_tokens) for row in plan.rows] == [("b", 17)]
    assert [(work.begin, work.end) for work in plan.media_work] == [(0, 12)]
    assert (sched.num_running, sched.num_waiting) == (1, 1)


def test_an_item_does_not_take_the_room_of_an_earlier_one_of_its_sequence() -> None:
    """Room for one of two pictures, and the first is shown twice with the second behind it."""
    sched = scheduler(encoder_cache_tokens=4, max_num_batched_tokens=32)
    sched.prompt_budget = lambda rows, tokens, cached: 5
    sched.media_cost = lambda size, begin, end: 0.25 * (end - begin)
    shown = (picture(1, 5), picture(5, 9), picture(9, 13, b"q"))
    prompts = ProcessedPrompt((1,) * 2), ProcessedPrompt((1,) * 14, media=shown)
    for name, prompt in zip("ab", prompts, strict=True):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        sched.add(Sequence(name, prompt, sampling, arrival_time=0.0, max_model_len=64))
        answer(sched, planned(sched))
    chunks = []
    for _ in range(4):
        plan = planned(sched)
        answer(sched, plan)
        chunks += [(row.start, row.num_tokens) for row in plan.rows if row.sequence_id == "b"]
    assert chunks == [(1, 4), (5, 4), (9, 4), (13, 1)]


def test_an_item_late_in_a_span_larger_than_the_budget_is_computed() -> None:
    sched = scheduler(encoder_cache_tokens=4, max_num_batched_tokens=32)
    sched.prompt_budget = lambda rows, tokens, cached: 5
    sched.media_cost = lambda size, begin, end: 0.25 * (end - begin)
    spanned = ProcessedPrompt((1,) * 14, atomic_spans=((1, 13),), media=(picture(9, 13),))
    for name, prompt in zip("ab", (ProcessedPrompt((1,) * 2), spanned), strict=True):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        sched.add(Sequence(name, prompt, sampling, arrival_time=0.0, max_model_len=64))
        answer(sched, planned(sched))
    plan = planned(sched)
    # The rest of the budget is less than the span, which is the first thing that is left.
    assert [(row.sequence_id, row.num_tokens) for row in plan.rows] == [("a", 1)]
    assert [(work.begin, work.end) for work in plan.media_work] == [(0, 4)]


def test_a_preempted_sequence_gives_its_items_back() -> None:
    jobs = [job(24, picture(2, 20)), job(24, picture(2, 20, b"q"), arrival=2, priority=-1)]
    given = workload(*jobs, room=18, blocks=9)
    assert encoded(given) >= 2
    assert given.outcomes[0].request.num_preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (ProcessedPrompt((1,) * 30, media=(picture(1, 18),)), "at tokens 1 to 18 have 17 emb"),
        (
            ProcessedPrompt(
                (1,) * 30, atomic_spans=((0, 30),), media=(picture(1, 10), picture(12, 21))
            ),
            "at tokens 0 to 30 have 18 embeddings, and encoder_cache_tokens are 16",
        ),
        (ProcessedPrompt((1,) * 30, media=(picture(4, 9), picture(8, 12))), "disjoint"),
        (ProcessedPrompt((1,) * 30, media=(picture(28, 31),)), "within the prompt of 30"),
        (ProcessedPrompt((1,) * 30, media=(picture(3, 3),)), "sorted"),
    ],
)
def test_items_that_cannot_be_held_or_are_out_of_order_are_refused(
    prompt: ProcessedPrompt, said: str
) -> None:
    given = workload(Job(prompt, SamplingParams(max_tokens=1)), step=30)
    with pytest.raises(RequestError, match=said):
        given.run()


def test_a_digest_tells_contents_types_and_shapes_apart() -> None:
    zeros = np.zeros((2, 3), dtype=np.uint8)
    contents = [zeros, zeros.T, zeros.astype(np.int8), zeros.tobytes(), "x", b"x", 1, 1.0, None]
    digests = [media_digest(content) for content in contents]
    digests += [media_digest(b"ab", b"c"), media_digest(b"a", b"bc"), media_digest()]
    assert len(set(digests)) == len(digests)
    assert media_digest(zeros, 1) == media_digest(zeros.copy(), 1)
    assert media_digest(zeros.T.copy()) == media_digest(zeros.T)
