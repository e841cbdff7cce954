"""The frozen carriers that cross rooms: what one stage writes and the next one reads.

:class:`NewSequence` -> ``Sequence`` (scheduler) -> :class:`StepPlan` -> ``StepContext``
(runtime) -> :class:`StepResult` -> :class:`TokenUpdate` -> :class:`RequestOutput`. Each is written
by one stage and never changed after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, overload

if TYPE_CHECKING:
    from array import array

    import numpy as np
    import numpy.typing as npt

    from engine_core.configs import PoolingParams, SamplingParams
    from engine_core.errors import ErrorCode
    from engine_core.inputs import ProcessedPrompt


_T_co = TypeVar("_T_co", covariant=True)


class NewSequence(NamedTuple):
    """One sequence to generate, in tokens. Written by the text half of the engine.

    A named tuple, as it goes from process to process.

    Attributes:
        sequence_id: unique among the unfinished sequences.
        prompt: what the family's input processor returned.
        sampling: the sequence's own parameters: ``n`` is 1 and the seed is set.
        arrival_time: ``time.monotonic`` seconds.
        priority: lower runs first; sequences of equal priority run in the order of their arrival.
        number: by which its frontend knows it, in [0, 2**40); none is used twice.
        pooling: what vector or score it gives in place of tokens; None for tokens.
        patient: whether it may begin to decode with others that came with it.
    """

    sequence_id: str
    prompt: ProcessedPrompt
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    number: int = 0
    pooling: PoolingParams | None = None
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of a sequence to a row of the persistent batch. Written by the scheduler.

    Attributes:
        sequence_id: whose row it is.
        row: index into the persistent batch, in ``[0, max_num_seqs)``.
        token_ids: every token known at admission: the prompt, and after a preemption also
            the tokens generated before it. 64-bit numbers, which numpy takes as they are.
        prompt_len: length of the prompt alone; differs from ``len(token_ids)`` after a preemption.
        sampling: the request's sampling parameters, with its own seed.
        prompt: what the family's input processor returned (row state, token state).
        pooling: as in :class:`NewSequence`.
    """

    sequence_id: str
    row: int
    token_ids: array[int]
    prompt_len: int
    sampling: SamplingParams
    prompt: ProcessedPrompt
    pooling: PoolingParams | None = None


class PlanRow(NamedTuple):
    """One sequence's part of a step. Written by the scheduler.

    A named tuple, as there is one for each row of each step: making a frozen dataclass takes twice
    as long.

    Attributes:
        sequence_id: whose tokens they are.
        row: its row of the persistent batch.
        start: linear position of the first token computed.
        num_tokens: how many tokens are computed: 1 is a decode step, more a prefill chunk. If the
            token at ``start`` was not known to the host when the plan was made, the runner takes
            it from its own state, where the step in flight leaves it.
        new_blocks: for each cache group, blocks appended to the row's block table before the step.
        sample: whether the last token's logits choose a next token.
    """

    sequence_id: str
    row: int
    start: int
    num_tokens: int
    new_blocks: tuple[tuple[int, ...], ...]
    sample: bool


class MediaUse(NamedTuple):
    """One item of a prompt that a chunk touches. Written by the scheduler.

    Attributes:
        place: of the chunk among the plan's rows.
        item: index of the item among those of the sequence's prompt.
        slot: where its embeddings are kept, from the step that computes them until they are freed.
    """

    place: int
    item: int
    slot: int


class MediaWork(NamedTuple):
    """Embeddings of an item that a step computes. Written by the scheduler.

    Attributes:
        row: of the persistent batch, whose prompt has the item.
        item: its index there.
        slot: as in :class:`MediaUse`.
        begin: how many of them were computed by the steps before.
        end: how many are after this one. The item's chunks come when all are.
        size: how many it has.
    """

    row: int
    item: int
    slot: int
    begin: int
    end: int
    size: int


class _Rows(Sequence[_T_co]):
    """Rows that are made from columns when somebody wants them one by one."""

    @overload
    def __getitem__(self, index: int) -> _T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T_co]: ...
    def __getitem__(self, index: int | slice) -> _T_co | Sequence[_T_co]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def __iter__(self) -> Iterator[_T_co]:
        return map(self._row, range(len(self)))

    def _row(self, index: int) -> _T_co:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class PlanRows(_Rows[PlanRow]):
    """A plan's rows, those that go on decoding as columns: the first ``len(sequence_ids)``.

    Each of these computes the token that it sampled last and samples one.

    Attributes:
        sequence_ids: whose they are.
        numbers: ``[N]`` int64, their rows of the persistent batch.
        starts: ``[N]`` int64, the positions that they compute.
        new_blocks: by index, for those that get blocks.
        others: the rows after them.
        num_groups: cache groups.
    """

    sequence_ids: list[str]
    numbers: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    new_blocks: dict[int, tuple[tuple[int, ...], ...]]
    others: tuple[PlanRow, ...]
    num_groups: int

    def __len__(self) -> int:
        return len(self.sequence_ids) + len(self.others)

    def __iter__(self) -> Iterator[PlanRow]:
        none = ((),) * self.num_groups
        columns = zip(self.sequence_ids, self.numbers.tolist(), self.starts.tolist(), strict=True)
        for index, (sequence_id, row, start) in enumerate(columns):
            blocks = self.new_blocks.get(index, none)
            yield PlanRow(sequence_id, row, start, 1, blocks, True)
        yield from self.others

    def _row(self, index: int) -> PlanRow:
        if index >= len(self.sequence_ids):
            return self.others[index - len(self.sequence_ids)]
        row, start = int(self.numbers[index]), int(self.starts[index])
        blocks = self.new_blocks.get(index, ((),) * self.num_groups)
        return PlanRow(self.sequence_ids[index], row, start, 1, blocks, True)


StepKind = Literal["decode", "prefill", "mixed"]

SwapPairs = tuple[tuple[int, int], ...]
"""``(block, slot)`` of each block of the cache that is copied to or from host memory."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, from the scheduler to the runner.

    Attributes:
        step_id: counts up by one per plan.
        rows: decode rows first (``num_tokens == 1``), the longest before the others, then prefill
            chunks.
        admitted: requests whose row begins with this step; applied before the rows run.
        repeat: how often the whole step is run; above 1 only if every row decodes and its blocks
            cover all repeats.
        swap_out: pairs of a block and the slot of host memory that it is copied to, in this order,
            after every earlier step and before anything of this one. The block may belong to a row
            of this step already.
        swap_in: the same in the other direction, after ``swap_out`` and before the rows run.
        freed_media: slots of embeddings that are dropped before anything else.
        media: items that the chunks of this step touch.
        media_work: embeddings that are computed before the rows run.
    """

    step_id: int
    rows: Sequence[PlanRow]
    admitted: tuple[Admission, ...] = ()
    repeat: int = 1
    swap_out: SwapPairs = ()
    swap_in: SwapPairs = ()
    freed_media: tuple[int, ...] = ()
    media: tuple[MediaUse, ...] = ()
    media_work: tuple[MediaWork, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by one run of the step."""
        others = self.others
        return len(self.rows) - len(others) + sum(row.num_tokens for row in others)

    @property
    def others(self) -> Sequence[PlanRow]:
        """Rows that are no columns of :class:`PlanRows`."""
        return self.rows.others if isinstance(self.rows, PlanRows) else self.rows

    @property
    def growing(self) -> Sequence[PlanRow]:
        """Rows that may have new blocks."""
        rows = self.rows
        if not isinstance(rows, PlanRows):
            return rows
        found = [*rows.new_blocks]
        columns = zip(
            [rows.sequence_ids[index] for index in found],
            rows.numbers[found].tolist(),
            rows.starts[found].tolist(),
            rows.new_blocks.values(),
            strict=True,
        )
        return [
            *(PlanRow(name, row, start, 1, blocks, True) for name, row, start, blocks in columns),
            *rows.others,
        ]

    @property
    def kind(self) -> StepKind:
        """Whether every row computes one token, none does, or some do."""
        # Rows that decode come first, so that two rows tell what all of them are.
        if self.rows[-1].num_tokens == 1:
            return "decode"
        return "mixed" if self.rows[0].num_tokens == 1 else "prefill"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's unmodified distribution.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most probable token of the vocabulary.
        decoded_token: what it adds to a text that has begun, such as " fox"; a special token's
            name; U+FFFD for a part of a character. None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]


class RowError(NamedTuple):
    """Why a sequence ends with the reason "error".

    Attributes:
        code: the kind of error.
        message: the same for people.
    """

    code: ErrorCode
    message: str

    def at(self, position: int) -> RowError:
        """The error with the linear position of the token that could not be chosen."""
        return self._replace(message=f"{self.message} at position {position}")


class RowResult(NamedTuple):
    """One row's result of a step. Written by the runner. A named tuple as :class:`PlanRow` is.

    Attributes:
        sequence_id: whose tokens they are.
        token_ids: the tokens sampled, in order; empty for a prefill chunk that samples none.
        logprobs: one mapping per sampled token, if the request asked for logprobs.
        prompt_logprobs: one mapping for each prompt token of the chunk that has a predecessor, if
            the request asked for prompt logprobs.
        error: the reason why the row has no usable result (NaN logits, say); the request ends with
            it.
        pooled: the vector or score of a row that samples and gives one: float32, as bytes.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: RowError | None = None
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows(_Rows[RowResult]):
    """Results that are a token each, or nothing for a row that does not sample.

    Attributes:
        plan: the rows of the plan.
        tokens: ``[N]`` int64; the N rows that sample may be fewer than the plan's.
        places: for each row of the plan, where its token is.
    """

    plan: Sequence[PlanRow]
    tokens: npt.NDArray[np.int64]
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.plan)

    def _row(self, index: int) -> RowResult:
        row = self.plan[index]
        tokens = (int(self.tokens[self.places[index]]),) if row.sample else ()
        return RowResult(row.sequence_id, tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, in the order of the plan's rows. Written by the runner.

    Attributes:
        step_id: as in :class:`StepPlan`.
        rows: one for each row of the plan.
        encode_seconds: those that its pictures, videos and sounds took on the device.
        media_parts: by kind and number of embeddings, in how many parts the model computes an item
            of which the step computed a part.
    """

    step_id: int
    rows: Sequence[RowResult]
    encode_seconds: float = 0.0
    media_parts: Mapping[tuple[str, int], int] = field(default_factory=dict)


class TokenUpdate(NamedTuple):
    """One sequence's new tokens from a step. Written by the scheduler.

    A named tuple, as there is one for each row of each step, and it goes from process to process.

    Attributes:
        sequence_id: as in :class:`NewSequence`.
        new_token_ids: the tokens accepted; the last is the stop token if one ended the sequence.
        logprobs: one mapping per token, or None.
        prompt_logprobs: one mapping for each prompt token but the first, all in one update; None in
            every other.
        finish_reason: None while it goes on; see :class:`CompletionOutput`.
        stop_reason: the stop token; None for end of sequence.
        error: what went wrong if the reason is "error".
        num_cached_tokens: prompt tokens taken from the prefix cache.
        num_preemptions: how often it lost its blocks until now.
        number: as in :class:`NewSequence`.
        pooled: as in :class:`RowResult`.
    """

    sequence_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RowError | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    number: int = 0
    pooled: bytes | None = None

    @property
    def finished(self) -> bool:
        """Whether the sequence ended with this step."""
        return self.finish_reason is not None


class TokenColumns(NamedTuple):
    """Updates of N sequences that go on, with one new token each and nothing else that is new.

    Attributes:
        numbers: ``[N]`` int64, as in :class:`NewSequence`.
        tokens: ``[N]`` int64.
        sequence_ids: of length N.
        num_cached_tokens: ``[N]`` int64; this and the last are as in the update before.
        num_preemptions: ``[N]`` int64.
    """

    numbers: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    sequence_ids: list[str]
    num_cached_tokens: npt.NDArray[np.int64]
    num_preemptions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenUpdates(_Rows[TokenUpdate]):
    """A step's updates. Written by the scheduler.

    Attributes:
        others: those that are no columns, which come last.
        columns: the first ones; None if there are none.
    """

    others: list[TokenUpdate]
    columns: TokenColumns | None = None

    @property
    def pairs(self) -> tuple[list[int], list[int]]:
        """The numbers and the tokens of the columns."""
        if self.columns is None:
            return [], []
        return self.columns.numbers.tolist(), self.columns.tokens.tolist()

    def __len__(self) -> int:
        return len(self.others) + (0 if self.columns is None else len(self.columns.tokens))

    def _row(self, index: int) -> TokenUpdate:
        count = len(self) - len(self.others)
        if self.columns is None or index >= count:
            return self.others[index - count]
        number, token, name, cached, preemptions = (each[index] for each in self.columns)
        return TokenUpdate(
            name,
            (int(token),),
            num_cached_tokens=int(cached),
            num_preemptions=int(preemptions),
            number=int(number),
        )


class EngineStats(NamedTuple):
    """Current load of an engine, and counts since its start. Written by its core.

    Attributes:
        running: sequences with a row of the batch.
        waiting: sequences without one, preempted ones included.
        kv_cache_usage: share of the cache's blocks that sequences hold, in [0, 1].
        added: sequences that it took.
        aborted: sequences ended by an abort; those ended by a stop string do not count.
        steps: steps submitted; each repeat on the device counts.
        prompt_tokens: tokens of the prompts that got a row.
        generated_tokens: tokens accepted after the prompts.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: those that were found there.
        num_preemptions: how often a sequence lost its blocks and got a row again.
        encoder_cache_queries: pictures, videos and sounds that chunks asked for.
        encoder_cache_hits: those whose embeddings were there.
        last_plan: id of the last plan whose results are in; -1 before the first.
        timings: histograms, as ``Timings.encode`` of ``engine.timings`` gives them.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    added: int = 0
    aborted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    last_plan: int = -1
    timings: bytes = b""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's ``n`` completions.

    Attributes:
        index: which of the ``n``.
        text: the text so far; empty without a tokenizer.
        token_ids: the tokens so far.
        cumulative_logprob: sum over the tokens, or None if logprobs were not asked for.
        logprobs: one mapping per token, or None.
        finish_reason: None while it runs; "stop" (end of sequence, a stop token or stop string),
            "length" (max_tokens or the model's length), "abort" or "error".
        stop_reason: the stop string or token id that ended it; None for end of sequence.
        error: what went wrong if finish_reason is "error".
        error_code: the same for programs.
        pooled: the vector or score that it gives in place of text: float32, as bytes.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Host clock (``time.monotonic`` seconds) and counts of a request.

    Attributes:
        arrival_time: when it was added, or came to the server.
        first_token_time: when its first token came, or None.
        finished_time: when its last completion ended, or None.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        num_preemptions: how often it had to be recomputed.
        media_tokens: by kind, prompt tokens that each picture, video or sound takes.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    media_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's output so far; the last one has ``finished`` true.

    Attributes:
        request_id: the id given, or one made by the engine.
        prompt: the prompt's text, or None if token ids were given.
        prompt_token_ids: its tokens.
        prompt_logprobs: None at index 0, then one mapping per prompt token; None if not asked for.
        outputs: the ``n`` completions.
        finished: whether all of them ended.
        metrics: times and counts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
