"""Random workloads: each request gives what it gives alone, and no block is ever misused."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from paged_fake_runner import FakeRunner, Job, Workload
from random_examples import examples
from scheduling import cache

from engine_core.configs import SamplingParams, SchedulerConfig
from engine_core.inputs import MediaItem, ProcessedPrompt
from engine_core.scheduler import Scheduler

BUDGETS = st.tuples(st.integers(1, 16), st.integers(1, 24))


@st.composite
def spans(draw: st.DrawFn, prompt_len: int, longest: int) -> tuple[tuple[int, int], ...]:
    found = []
    start = 0
    for _ in range(draw(st.integers(0, 3))):
        start += draw(st.integers(0, 4))
        end = min(prompt_len, start + draw(st.integers(1, longest)))
        if start >= end:
            break
        found.append((start, end))
        start = end
    return tuple(found)


@st.composite
def media(draw: st.DrawFn, prompt_len: int, longest: int) -> tuple[MediaItem, ...]:
    """Items of few contents, so that prompts share some."""
    return tuple(
        MediaItem("image", f"{draw(st.sampled_from('pq'))}{end - start}".encode(), (start, end))
        for start, end in draw(spans(prompt_len, longest))
    )


@st.composite
def jobs(
    draw: st.DrawFn,
    config: SchedulerConfig,
    scarce: bool,
    priorities: Sequence[int],
    pictures: bool,
) -> Job:
    # Few different beginnings, so that prompts share prefixes.
    longest = config.max_model_len // 2 if scarce else config.max_model_len - 1
    prompt_len = draw(st.integers(1, longest))
    first = draw(st.integers(1, 2))
    tokens = [(first + i * i) % 7 + 1 for i in range(prompt_len)]
    if draw(st.booleans()):
        tokens[draw(st.integers(0, prompt_len - 1))] = 9
    atomic = draw(st.just(()) | spans(prompt_len, config.max_num_batched_tokens))
    items = media(prompt_len, config.encoder_cache_tokens)
    shown = draw(items if pictures else st.just(()) | items)
    touched = (
        sum(item.num_embeddings for item in shown if item.span[0] < end and start < item.span[1])
        for start, end in atomic
    )
    prompt = ProcessedPrompt(
        token_ids=tuple(tokens),
        # What is refused is tested elsewhere.
        atomic_spans=() if max(touched, default=0) > config.encoder_cache_tokens else atomic,
        cache_salts=draw(st.sampled_from([(), (), ("adapter",)])),
        media=shown,
    )
    max_tokens = draw(st.none() | st.integers(1, 14))
    cut_at = draw(st.none() | st.none() | st.integers(1, 5))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens or 4, config.max_model_len - prompt_len))),
        ignore_eos=scarce or draw(st.booleans()),
        stop=() if cut_at is None else ("x",),
        stop_token_ids=() if scarce else draw(st.sampled_from([(), (3,), (0, 4)])),
        logprobs=draw(st.sampled_from([None, None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    return Job(
        prompt,
        sampling,
        arrival=draw(st.integers(0, 4 if scarce else 12)),
        abort_at=draw(st.none() | st.none() | st.integers(0, 25)),
        cut_at=cut_at,
        fail_at=draw(st.none() | st.none() | st.none() | st.integers(0, config.max_model_len)),
        priority=draw(st.sampled_from(priorities)),
        patient=draw(st.booleans()),
    )


@st.composite
def workloads(draw: st.DrawFn, scarce: bool, pictures: bool = False) -> Workload:
    """Workloads; if ``scarce``, of long outputs and with blocks for little more than one.

    With ``pictures`` items are computed within the budget beside sequences that decode.
    """
    max_num_seqs = draw(st.integers(3 if scarce else 1, 5))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(1, 16)),
        max_model_len=draw(st.integers(12 if scarce else 2, 28)),
        max_repeat=draw(st.sampled_from([1, 1, 2, 3, 4])),
        num_swap_blocks=draw(st.sampled_from([0, 0, 3, 8, 100])),
        encoder_cache_tokens=draw(st.integers(1, 20)),
    )
    priorities = draw(st.sampled_from([(0,), (0, 1), (-2, 0, 7)]))
    each = jobs(config, scarce, priorities, pictures)
    work = draw(st.lists(each, min_size=4 if scarce or pictures else 1, max_size=8))
    block_size = draw(st.integers(1, 3 if scarce else 8))
    longest = max(
        min(config.max_model_len, len(j.prompt.token_ids) + (j.sampling.max_tokens or 10**6))
        for j in work
    )
    windows = draw(
        st.sampled_from([(None,), (None, 3), (5,), (2, 7), (None, 1), (None, None), (None, 4, 4)])
    )
    sizes = [block_size * draw(st.sampled_from([1, 1, 1, 2, 4])) for _ in windows]
    one = cache(block_size=sizes, windows=windows)
    enough = one.max_blocks(max(1, longest - 1), config.max_num_batched_tokens)
    cache_config = one.replace(
        num_blocks=1 + enough + draw(st.integers(0, 6)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )
    runner = FakeRunner(config, cache_config, stops_on_device=draw(st.booleans()))
    scheduler = Scheduler(config, cache_config)
    if pictures:
        cost = draw(st.sampled_from([0.25, 1.0, 3.0, None]))
        scheduler.media_cost = lambda size, begin, end: (
            None if cost is None else (end - begin) * cost * (1 + size / 8)
        )
        scheduler.media_in_parts = draw(st.booleans())
        scheduler.prompt_sizes = draw(st.sampled_from([(), (2, 5, 16, 64), (3, 8)]))
        some_parts = [
            {},
            {("image", 12): 1},
            {("image", 12): 3},
            {("image", 2): 4, ("image", 7): 2},
        ]
        runner.media_parts = draw(st.sampled_from(some_parts))
    # As few rows are planned one by one unless they are told not to be.
    scheduler.lockstep_from = draw(st.sampled_from([1, 2, 3, 96]))
    # A server's budgets follow from what steps took, and from step to step it decides anew whether
    # to plan one behind that in flight.
    some = st.lists(BUDGETS, min_size=1, max_size=4)
    budgets = draw(some if pictures else st.just([None]) | some)
    depths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    checks = draw(st.sampled_from([[True], [False], [False, False, True]]))
    return Workload(scheduler, runner, work, depths, budgets, checks)


def run_and_verify(workload: Workload) -> None:
    outcomes = workload.run()
    workload.verify()
    if any(outcome.request.num_preemptions for outcome in outcomes):
        event("preemption")
    if workload.scheduler.num_swaps:
        event("swap")
    if any(outcome.request.num_cached_tokens for outcome in outcomes):
        event("prefix hit")
    if workload.scheduler.encoder_cache.hits:
        event("embeddings shared")
    if workload.runner.num_parts > workload.runner.num_encoded:
        event("embeddings in parts")
    if workload.runner.max_repeat_seen > 1:
        event("repeat")


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans().flatmap(lambda scarce: workloads(scarce=scarce, pictures=True)))
def test_every_request_gives_what_it_gives_alone_with_pictures_beside(workload: Workload) -> None:
    run_and_verify(workload)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(scarce=False))
def test_every_request_gives_what_it_gives_alone(workload: Workload) -> None:
    run_and_verify(workload)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(scarce=True))
def test_every_request_gives_what_it_gives_alone_when_blocks_are_scarce(
    workload: Workload,
) -> None:
    run_and_verify(workload)
