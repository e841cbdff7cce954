"""One sequence in the scheduler."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from enum import Enum, auto

from engine_core.cache import BlockKey
from engine_core.configs import PoolingParams, SamplingParams
from engine_core.errors import RequestError
from engine_core.inputs import ProcessedPrompt, packed_token_ids
from engine_core.steps import RowError, TokenLogprobs


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One sequence: its tokens, and how far the scheduler and the runner are with it.

    The user of the scheduler makes it and reads it. After ``Scheduler.add`` only the scheduler
    writes it, and not at each step while it decodes among many others: it is sure to be up to date
    after its end and after ``Scheduler.check``. Positions count from 0 at the first prompt token.

    Args:
        sequence_id: unique among the unfinished sequences.
        prompt: tokens and what the family's input processor says about them.
        sampling: stop conditions and limits; the engine handles ``n``.
        eos_token_ids: tokens that end the sequence unless ``sampling.ignore_eos``.
        arrival_time: in seconds; the order of arrival is that of ``Scheduler.add``, not of this.
        max_model_len: tokens of the sequence, prompt and output together.
        priority: lower runs first; sequences of equal priority run in order of arrival.
        number: by which its frontend knows it.
        pooling: what it gives in place of tokens; it ends with its prompt then.
        patient: whether nobody sees its tokens before its end, and it came with few enough others
            for all to have a row, so that they may begin to decode together.

    Raises:
        RequestError: a token is no integer, or does not fit 64 bits.

    Attributes:
        rank: priority and order of arrival: the scheduler serves the lowest rank first.
        token_ids: prompt and accepted output; a stop token is part of it, what came after is not.
        prompt_len: tokens of the prompt.
        limit: tokens at which the sequence ends for its length.
        status: waiting (also after a preemption), running or finished.
        finish_reason: None, "stop", "length", "abort" or "error".
        stop_reason: the stop token, or what ``Scheduler.finish`` was given; None for end of
            sequence.
        error: what went wrong if the reason is "error".
        num_computed: positions whose keys and values completed steps have written.
        num_scheduled: positions that submitted steps write; those after ``num_computed`` are in
            flight.
        num_pending: samples of submitted steps that have not come back.
        num_cached_tokens: prompt tokens taken from the prefix cache at the first admission.
        num_preemptions: how often its row and blocks were taken away.
        num_swapped: positions whose keys and values lie in host memory; 0 unless it waits.
        row: its row of the persistent batch while it runs.
        media_slots: where the embeddings are that it holds, by index of the item.
        last_step: the last submitted step that names it, or -1.
    """

    __slots__ = (
        "admitted_len",
        "arrival_time",
        "block_keys",
        "block_tables",
        "capacity",
        "eos_token_ids",
        "error",
        "finish_reason",
        "in_lockstep",
        "last_step",
        "limit",
        "max_model_len",
        "media_slots",
        "needs_host",
        "num_cached_tokens",
        "num_computed",
        "num_dropped",
        "num_pending",
        "num_preemptions",
        "num_registered",
        "num_scheduled",
        "num_swapped",
        "number",
        "order",
        "patient",
        "pooling",
        "priority",
        "prompt",
        "prompt_len",
        "prompt_logprobs",
        "prompt_logprobs_done",
        "rank",
        "row",
        "sampling",
        "sequence_id",
        "status",
        "stop_min_len",
        "stop_reason",
        "stop_token_ids",
        "swap_slots",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt: ProcessedPrompt,
        sampling: SamplingParams,
        *,
        eos_token_ids: tuple[int, ...] = (),
        arrival_time: float,
        max_model_len: int,
        priority: int = 0,
        number: int = 0,
        pooling: PoolingParams | None = None,
        patient: bool = False,
    ) -> None:
        self.sequence_id = sequence_id
        self.number = number
        self.prompt = prompt
        self.sampling = sampling
        self.pooling = pooling
        self.patient = patient
        self.eos_token_ids = () if sampling.ignore_eos else tuple(eos_token_ids)
        self.arrival_time = arrival_time
        self.max_model_len = max_model_len
        self.priority = priority
        self.needs_host = sampling.needs_host
        self.media_slots: dict[int, int] = {}

        try:
            self.token_ids: array[int] = packed_token_ids(prompt.token_ids)
        except (struct.error, TypeError):
            raise RequestError(f"request {sequence_id!r}: {_wrong_tokens(prompt)}") from None
        self.prompt_len = len(self.token_ids)
        self.limit = max_model_len
        if pooling is not None:
            self.limit = self.prompt_len + 1  # so that nothing is planned after the prompt
        elif sampling.max_tokens is not None:
            self.limit = min(self.limit, self.prompt_len + sampling.max_tokens)
        self.stop_token_ids = frozenset(self.eos_token_ids + sampling.stop_token_ids)
        self.stop_min_len = self.prompt_len + sampling.min_tokens

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: RowError | None = None
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_swapped = 0

        # Whether the scheduler's Lockstep keeps its counts and newest tokens.
        self.in_lockstep = False
        # The scheduler's own: a block table per group, a count of blocks given back per window, the
        # tokens that the blocks hold, the tokens known at admission, the keys of full blocks and
        # how many are registered, the slots of host memory of each group's last blocks while it is
        # swapped, and the prompt's logprobs until they are complete.
        self.order = -1
        self.rank = (priority, -1)
        self.row: int | None = None
        self.last_step = -1
        self.block_tables: list[list[int]] = []
        self.num_dropped: list[int] = []
        self.capacity = 0
        self.admitted_len = 0
        self.block_keys: list[BlockKey] = []
        self.num_registered = 0
        self.swap_slots: list[list[int]] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs_done = sampling.prompt_logprobs is None

    @property
    def num_output_tokens(self) -> int:
        """Tokens accepted after the prompt."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens accepted after the prompt."""
        return self.token_ids[self.prompt_len :].tolist()

    @property
    def num_in_flight(self) -> int:
        """Positions scheduled whose step has not come back."""
        return self.num_scheduled - self.num_computed

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id!r}, {self.status.name}, prompt={self.prompt_len}, "
            f"output={self.num_output_tokens}, computed={self.num_computed}, "
            f"in_flight={self.num_in_flight})"
        )


def _wrong_tokens(prompt: ProcessedPrompt) -> str:
    """The fault in the tokens that an input processor gave."""
    if not isinstance(prompt.token_ids, Iterable) or not hasattr(prompt.token_ids, "__len__"):
        return f"its tokens must be a sequence of integers, got {type(prompt.token_ids).__name__}"
    for position, token in enumerate(prompt.token_ids):
        try:
            struct.pack("q", token)
        except (struct.error, TypeError):
            return f"token {token!r} at position {position} is not an integer of 64 bits"
    return "its tokens must be a sequence of integers"
