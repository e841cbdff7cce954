"""Each protection of the scheduler and the cache, taken away: the fake runner must notice.

Every scenario passes with the protection and fails without it, so none of them can be lost
without a test that says so.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappush
from typing import Any

import pytest
from paged_fake_runner import EOS, ContractError, FakeRunner, Job, Workload, reference
from scheduling import cache

import engine_core.scheduler.scheduler as scheduler_module
from engine_core.cache import BlockKey, BlockPool, PrefixCache
from engine_core.configs import SamplingParams, SchedulerConfig
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence

MODEL_LEN = 40


def job(tokens: abc.Sequence[int], max_tokens: int = 6, **fields: Any) -> Job:
    prompt = ProcessedPrompt(
        tuple(tokens), atomic_spans=fields.pop("spans", ()), cache_salts=fields.pop("salts", ())
    )
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return replace(Job(prompt, sampling), **fields)


def workload(
    jobs: abc.Sequence[Job],
    *,
    depth: int = 0,
    block_size: int | abc.Sequence[int] = 2,
    num_blocks: int = 64,
    windows: abc.Sequence[int | None] = (None,),
    **limits: int,
) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=limits.get("max_num_seqs", 4),
        max_num_batched_tokens=limits.get("max_num_batched_tokens", 32),
        max_model_len=MODEL_LEN,
        max_repeat=limits.get("max_repeat", 1),
        num_swap_blocks=limits.get("num_swap_blocks", 0),
    )
    config_of_cache = cache(block_size=block_size, num_blocks=num_blocks, windows=windows)
    return Workload(
        Scheduler(config, config_of_cache), FakeRunner(config, config_of_cache), jobs, [depth]
    )


def job_that_stops_at_a_block_end(block_size: int) -> tuple[Job, list[int]]:
    """A job whose end-of-sequence token is the last of a full block, and all its tokens."""
    for first in range(1, 100):
        candidate = replace(job([first, 5, 7]), sampling=SamplingParams(max_tokens=20))
        outputs, reason, _ = reference(candidate, (None,), MODEL_LEN)
        tokens = [*candidate.prompt.token_ids, *outputs]
        if reason == "stop" and outputs[-1] == EOS and len(tokens) % block_size == 0:
            return candidate, tokens
    raise AssertionError("no prompt among a hundred stops where it should")


Scenario = Callable[[], Workload]
Mutation = Callable[[pytest.MonkeyPatch], None]


def abort_in_flight() -> Workload:
    """A request is aborted with steps in flight, and another one comes at once."""
    return workload(
        [job([1, 2, 3, 4, 5], 12, abort_at=5), job([6, 7, 8, 9, 1, 2, 3, 4, 5], 8, arrival=5)],
        depth=3,
        num_blocks=9,
        max_num_seqs=2,
    )


def abort_in_flight_with_free_blocks() -> Workload:
    """A request is aborted with steps in flight, and another one could have its row at once."""
    return workload([job([1, 2, 3], 12, abort_at=5), job([4, 5, 6], arrival=5)], depth=3)


def stop_then_same_prefix() -> Workload:
    """A request stops at the end of a block; a later prompt goes on from all its tokens."""
    first, tokens = job_that_stops_at_a_block_end(block_size=2)
    return workload([first, job([*tokens, 4, 4], arrival=30)])


def error_then_same_prefix() -> Workload:
    """A request ends with NaN in its blocks; a later one has the same prompt."""
    return workload([job([1, 2, 3, 4, 5], fail_at=4), job([1, 2, 3, 4, 5], arrival=10)])


def span_then_no_span() -> Workload:
    """The first block of a span is also the beginning of a prompt that has none."""
    return workload([job([1, 2, 3, 4, 5, 6], spans=((0, 4),)), job([1, 2, 3, 5, 5, 6], arrival=12)])


def hit_within_a_span() -> Workload:
    """All full blocks of a prompt are cached, and the last of them ends inside a span."""
    prompt = [1, 2, 3, 4, 5, 6]
    return workload(
        [job(prompt, spans=((3, 6),)), job(prompt, spans=((3, 6),), arrival=12)], block_size=4
    )


def span_across_the_budget() -> Workload:
    """A span begins in the first budget of tokens and ends in the second."""
    return workload(
        [job([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], spans=((4, 9),))], max_num_batched_tokens=6
    )


def salts_that_differ() -> Workload:
    """The same prompt under two adapters."""
    prompt = [1, 2, 3, 4, 5]
    return workload([job(prompt, salts=("a",)), job(prompt, salts=("b",), arrival=12)])


def whole_prompt_cached() -> Workload:
    """A prompt of full blocks comes twice: its last token must be computed all the same."""
    return workload([job([1, 2, 3, 4]), job([1, 2, 3, 4], arrival=12)])


def blocks_used_again() -> Workload:
    """More prompts than the pool can keep, and then the first again."""
    prompts = [[first, 2, 3, 4, 5, 6] for first in (1, 2, 3, 4, 1)]
    return workload(
        [job(prompt, arrival=12 * i) for i, prompt in enumerate(prompts)], num_blocks=10
    )


def shared_while_held() -> Workload:
    """A request takes over cached blocks that nobody holds, and needs free ones at once."""
    return workload(
        [
            job([1, 2, 3, 4, 5, 6], 4),
            job([1, 2, 3, 4, 5, 6, 7], 12, arrival=15),
            job([8, 8, 8, 8, 8], 6, arrival=16),
        ],
        num_blocks=10,
    )


def preempted_in_flight() -> Workload:
    """A request is preempted with steps in flight, and an older one leaves its blocks to it."""
    return workload([job([1, 2, 3, 4], 4), job([5, 5, 5, 5], 12)], depth=3, num_blocks=9)


def length_in_flight() -> Workload:
    """The last samples of a request are in flight when the next step is planned."""
    return workload([job([1, 2, 3], 4)], depth=3)


def repeats() -> Workload:
    """Decode steps are repeated over the ends of blocks."""
    return workload([job([1, 2, 3], 17), job([4, 5, 6, 7], 17)], depth=1, max_repeat=4)


def sliding_window() -> Workload:
    """Blocks leave the window while steps are in flight and a second request needs blocks."""
    return workload(
        [job([1, 2, 3, 4, 5], 20), job([6, 7, 8], 20, arrival=2)],
        depth=3,
        block_size=1,
        num_blocks=13,
        windows=(4,),
        max_num_batched_tokens=6,
    )


def window_over_a_hit() -> Workload:
    """The blocks within the window are cached, and were used again before it."""
    return workload(
        [job([1, 2, 3, 4, 5, 6, 7], 2), job([1, 2, 3, 4, 5, 6, 7], 2, arrival=12)],
        windows=(None, 4),
    )


def swapped() -> Workload:
    """Two requests outgrow the cache; the later one goes to host memory with steps in flight."""
    return workload(
        [job([1, 2, 3, 4], 12), job([5, 6, 7, 8], 12)],
        depth=3,
        num_blocks=17,
        windows=(None, 5),
        num_swap_blocks=20,
    )


def swapped_from_groups_of_several_sizes() -> Workload:
    """The same with blocks of one, two and four tokens, and two groups that keep all."""
    return workload(
        [job([1, 2, 3, 4], 12), job([5, 6, 7, 8], 12)],
        depth=3,
        block_size=(1, 2, 4),
        num_blocks=26,
        windows=(4, None, None),
        max_num_batched_tokens=4,
        num_swap_blocks=30,
    )


def abort_in_flight_with_groups() -> Workload:
    """A request is aborted with steps in flight; what it held of one group goes to another."""
    return workload(
        [job([1, 2, 3, 4, 5], 12, abort_at=5), job([6, 7, 8, 9, 1, 2, 3, 4, 5], 8, arrival=5)],
        depth=3,
        block_size=(4, 1),
        num_blocks=22,
        windows=(None, 4),
        max_num_seqs=2,
    )


def windows_of_two_groups() -> Workload:
    """Two groups give blocks back at once, with steps in flight, and a third takes them."""
    return workload(
        [job([1, 2, 3, 4, 5], 20), job([6, 7, 8], 20, arrival=2)],
        depth=3,
        block_size=1,
        num_blocks=45,
        windows=(None, 4, 4),
        max_num_batched_tokens=6,
    )


def prefix_within_a_larger_block() -> Workload:
    """Two prompts agree in half of a block of the second group; the first needs no other."""
    return workload(
        [job([1, 2, 3, 4, 5, 6, 7, 8, 8]), job([1, 2, 3, 4, 5, 6, 9, 9, 8], arrival=16)],
        block_size=(2, 4),
        windows=(1, None),
    )


def two_groups_with_one_prompt() -> Workload:
    """A prompt comes again, to two groups whose token chains and block sizes are the same."""
    prompt = [1, 2, 3, 4, 5]
    return workload([job(prompt), job(prompt, arrival=12)], windows=(None, 3))


def know_larger_blocks_by_their_first_key(patch: pytest.MonkeyPatch) -> None:
    find, register = PrefixCache._find, PrefixCache.register

    def first_of_each(self: PrefixCache, keys: abc.Sequence[BlockKey]) -> list[BlockKey]:
        step = self._keys_per_block
        return [keys[index // step * step] for index in range(len(keys))]

    patch.setattr(
        PrefixCache, "_find", lambda self, keys, index: find(self, first_of_each(self, keys), index)
    )
    patch.setattr(
        PrefixCache,
        "register",
        lambda self, block, keys, index: register(self, block, first_of_each(self, keys), index),
    )


def share_keys_between_groups(patch: pytest.MonkeyPatch) -> None:
    find, register = BlockPool.find, BlockPool.register
    patch.setattr(BlockPool, "find", lambda self, key: find(self, key[1]))
    patch.setattr(BlockPool, "register", lambda self, block, key: register(self, block, key[1]))
    patch.setattr(Scheduler, "check", lambda self: None)


def release_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    detach = Scheduler._detach

    def mutant(self: Scheduler, request: Sequence) -> None:
        if request.row is not None:
            for table in request.block_tables:
                self.pool.release(reversed(table))
            request.block_tables = [[] for _ in self.groups]
        detach(self, request)

    patch.setattr(Scheduler, "_detach", mutant)


def release_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    detach = Scheduler._detach

    def mutant(self: Scheduler, request: Sequence) -> None:
        row = request.row
        detach(self, request)
        if row is not None and row not in self._free_rows:
            heappush(self._free_rows, row)

    patch.setattr(Scheduler, "_detach", mutant)
    patch.setattr(Scheduler, "check", lambda self: None)


def register_uncomputed_blocks(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler._finish

    def mutant(self: Scheduler, request: Sequence, *args: Any) -> None:
        if request.row is not None:
            full = len(request.token_ids) // self._key_size
            self._register(request, min(full, len(request.block_tables[0])))
        finish(self, request, *args)

    patch.setattr(Scheduler, "_finish", mutant)


def hash_without(name: str) -> Mutation:
    def mutation(patch: pytest.MonkeyPatch) -> None:
        extend = scheduler_module.extend_block_keys
        patch.setattr(
            scheduler_module,
            "extend_block_keys",
            lambda *args, **fields: extend(*args, **{**fields, name: ()}),
        )

    return mutation


def hit_ends_in_span(patch: pytest.MonkeyPatch) -> None:
    longest = scheduler_module.longest_cached_prefix
    patch.setattr(
        scheduler_module,
        "longest_cached_prefix",
        lambda groups, keys, most, spans: longest(groups, keys, most),
    )


def chunk_ends_in_span(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_module, "cut_before_span", lambda end, spans: end)


def hit_takes_every_token(patch: pytest.MonkeyPatch) -> None:
    longest = scheduler_module.longest_cached_prefix
    patch.setattr(
        scheduler_module,
        "longest_cached_prefix",
        lambda groups, keys, most, spans: longest(groups, keys, most + 1, spans),
    )


def keep_keys_of_reused_blocks(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def mutant(self: BlockPool, count: int) -> list[int]:
        index = dict(self._index)
        blocks = allocate(self, count)
        self._index.update(index)
        return blocks

    acquire = BlockPool.acquire

    def acquire_blank(self: BlockPool, block: int) -> None:
        if block in self._blank:
            self._blank.remove(block)
            self._free[block] = None
        acquire(self, block)

    patch.setattr(BlockPool, "allocate", mutant)
    patch.setattr(BlockPool, "acquire", acquire_blank)
    patch.setattr(BlockPool, "check", lambda self: None)


def share_without_a_reference(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def mutant(self: BlockPool, blocks: Iterable[int], **how: Any) -> None:
        release(self, [block for block in blocks if self.refs(block) > 0], **how)

    patch.setattr(BlockPool, "acquire", lambda self, block: None)
    patch.setattr(BlockPool, "release", mutant)
    patch.setattr(Scheduler, "check", lambda self: None)


def admit_with_steps_in_flight(patch: pytest.MonkeyPatch) -> None:
    preempt, admit = Scheduler._preempt, Scheduler._admit

    def preempt_mutant(self: Scheduler, request: Sequence) -> None:
        preempt(self, request)
        request.last_step = -1

    def admit_mutant(self: Scheduler, request: Sequence, draft: Any) -> int:
        request.num_pending = 0
        return admit(self, request, draft)

    patch.setattr(Scheduler, "_preempt", preempt_mutant)
    patch.setattr(Scheduler, "_admit", admit_mutant)


def forget_samples_in_flight(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def mutant(self: Scheduler, request: Sequence) -> None:
        request.limit += self.config.max_repeat
        add(self, request)

    patch.setattr(Scheduler, "add", mutant)


def repeat_beyond_the_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_allocate_ahead", lambda self, draft: draft.repeat)
    patch.setattr(Scheduler, "check", lambda self: None)


def drop_one_block_more(patch: pytest.MonkeyPatch) -> None:
    first = PrefixCache.first_needed_block

    def mutant(self: PrefixCache, position: int) -> int:
        return first(self, position + self._block_size)

    patch.setattr(PrefixCache, "first_needed_block", mutant)


def drop_what_steps_in_flight_see(patch: pytest.MonkeyPatch) -> None:
    drop = Scheduler._drop_unseen

    def mutant(self: Scheduler, request: Sequence) -> None:
        computed = request.num_computed
        request.num_computed = request.num_scheduled
        drop(self, request)
        request.num_computed = computed

    patch.setattr(Scheduler, "_drop_unseen", mutant)


def copy_what_is_computed(patch: pytest.MonkeyPatch) -> None:
    save = Scheduler._save

    def mutant(self: Scheduler, request: Sequence) -> None:
        scheduled = request.num_scheduled
        save(self, request)
        if request.num_swapped:
            request.num_swapped = scheduled + 1

    patch.setattr(Scheduler, "_save", mutant)
    patch.setattr(Scheduler, "check", lambda self: None)


def come_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    swap_in = Scheduler._swap_in

    def mutant(self: Scheduler, request: Sequence, draft: Any, cached: int) -> None:
        for slots in request.swap_slots:
            slots.reverse()
        swap_in(self, request, draft, cached)

    patch.setattr(Scheduler, "_swap_in", mutant)


def forget_the_copies_out(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler) -> Any:
        plan = schedule(self)
        return None if plan is None else replace(plan, swap_out=())

    patch.setattr(Scheduler, "schedule", mutant)


def leave_out_the_last_copy_in(patch: pytest.MonkeyPatch) -> None:
    swap_in = Scheduler._swap_in

    def mutant(self: Scheduler, request: Sequence, draft: Any, cached: int) -> None:
        swap_in(self, request, draft, cached)
        draft.swap_in.pop()

    patch.setattr(Scheduler, "_swap_in", mutant)


def copies_out_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """A runner that does not keep the order which the plan promises."""
    submit = FakeRunner.submit
    late: dict[int, Any] = {}

    def mutant(self: FakeRunner, plan: Any) -> None:
        now = late.pop(id(self), ())
        late[id(self)] = plan.swap_out
        submit(self, replace(plan, swap_out=now))

    patch.setattr(FakeRunner, "submit", mutant)


PROTECTIONS: dict[str, tuple[Scenario, Mutation]] = {
    "blocks wait for steps in flight": (abort_in_flight, release_blocks_at_once),
    "rows wait for steps in flight": (abort_in_flight_with_free_blocks, release_rows_at_once),
    "only computed tokens are hashed, stop": (stop_then_same_prefix, register_uncomputed_blocks),
    "only computed tokens are hashed, error": (error_then_same_prefix, register_uncomputed_blocks),
    "spans are hashed whole": (span_then_no_span, hash_without("spans")),
    "salts are hashed": (salts_that_differ, hash_without("salts")),
    "hits end before spans": (hit_within_a_span, hit_ends_in_span),
    "chunks end before spans": (span_across_the_budget, chunk_ends_in_span),
    "hits leave a token": (whole_prompt_cached, hit_takes_every_token),
    "reused blocks lose their key": (blocks_used_again, keep_keys_of_reused_blocks),
    "shared blocks are held": (shared_while_held, share_without_a_reference),
    "preempted requests drain first": (preempted_in_flight, admit_with_steps_in_flight),
    "samples in flight count": (length_in_flight, forget_samples_in_flight),
    "blocks cover repeats": (repeats, repeat_beyond_the_blocks),
    "windows are whole": (sliding_window, drop_one_block_more),
    "windows of hits are whole": (window_over_a_hit, drop_one_block_more),
    "what is in flight is copied": (swapped, copy_what_is_computed),
    "copies come back in order": (swapped, come_back_in_another_order),
    "copies of several sizes come back in order": (
        swapped_from_groups_of_several_sizes,
        come_back_in_another_order,
    ),
    "blocks of all groups wait for steps in flight": (
        abort_in_flight_with_groups,
        release_blocks_at_once,
    ),
    "windows of all groups are whole": (windows_of_two_groups, drop_one_block_more),
    "steps in flight keep the windows of all groups": (
        windows_of_two_groups,
        drop_what_steps_in_flight_see,
    ),
    "larger blocks are known by their last key": (
        prefix_within_a_larger_block,
        know_larger_blocks_by_their_first_key,
    ),
    "a group finds its own blocks only": (two_groups_with_one_prompt, share_keys_between_groups),
    "every block is copied out": (swapped, forget_the_copies_out),
    "every block is copied in": (swapped, leave_out_the_last_copy_in),
    "copies come before blocks are used anew": (swapped, copies_out_after_the_step),
    "steps in flight keep their window": (sliding_window, drop_what_steps_in_flight_see),
}


def run_and_verify(run: Workload) -> None:
    run.run()
    run.verify()


@pytest.mark.parametrize("name", PROTECTIONS)
def test_scenario_passes_with_the_protection(name: str) -> None:
    scenario, _ = PROTECTIONS[name]
    run_and_verify(scenario())


@pytest.mark.parametrize("name", PROTECTIONS)
def test_scenario_fails_without_the_protection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, mutation = PROTECTIONS[name]
    run = scenario()
    mutation(monkeypatch)
    with pytest.raises(ContractError):
        run_and_verify(run)
