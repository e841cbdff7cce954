"""Stages of a pipeline: the layers that each keeps, and the messages between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from engine_core.configs import CacheSpec
from engine_core.errors import OptionError
from engine_core.nn.attention import cached_layers
from engine_core.nn.blocks import link_layers
from engine_core.nn.decoder import Decoder, RotaryCausalLM
from engine_core.nn.embedding import Embedding
from engine_core.runtime.loader import WeightSource, check_weights
from engine_core.runtime.memory import CachePlan, pages, planes_of
from engine_core.steps import StepPlan, StepResult

_T = TypeVar("_T")

_META = torch.device("meta")
# Messages that may be on their way. Gloo does not say of one whether it has gone.
_MOST_SENT = 8


class StageLink:
    """A rank's place in a pipeline, and what it sends to and gets from other stages.

    Nothing that is sent is waited for, and tokens are received when somebody needs them, so that a
    stage computes one batch while another one is in the stages after it.

    Attributes:
        first: whether it embeds tokens.
        last: whether it has the norm and the head, and chooses tokens.
    """

    def __init__(
        self, stage: int, stages: int, rank: int = 0, ranks: int = 1, token_group: Any = None
    ) -> None:
        """``rank`` is this process's among the ``ranks`` of each stage.

        Tokens go through a group of their own, so that they wait for no hidden states.
        """
        self.stage, self.stages = stage, stages
        self.first, self.last = stage == 0, stage == stages - 1
        self._token_group = token_group
        self._peers = [each * ranks + rank for each in range(stages)]
        # With their tensors, which must live until they have gone.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        # Tokens on their way, and the rows of the persistent batch that they are for.
        self._coming: deque[tuple[Any, Tensor, Sequence[int]]] = deque()

    def send(self, x: Tensor, residual: Tensor) -> None:
        """Send what a layer returned to the next stage: ``[1, T, H]`` each."""
        self._send(torch.stack((x, residual)), self.stage + 1, None)

    def receive(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the stage before; ``like [1, T, H]`` has its shape and dtype."""
        both = like.new_empty(2, *like.shape)
        torch.distributed.recv(both, self._peers[self.stage - 1])
        return both[0], both[1]

    def send_tokens(self, tokens: Tensor) -> None:
        """Send the tokens ``[S]`` of a step's rows to every stage before this one."""
        for stage in range(self.stage):
            self._send(tokens.to(torch.int64), stage, self._token_group)

    def expect_tokens(self, rows: Sequence[int], device: torch.device) -> None:
        """Begin to receive the tokens of these rows of the persistent batch."""
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        work = torch.distributed.irecv(tokens, self._peers[-1], self._token_group)
        self._coming.append((work, tokens, rows))

    def settle(self, rows: set[int], last_tokens: Tensor) -> None:
        """Write the tokens that are on their way to any of these rows."""
        while any(not rows.isdisjoint(theirs) for _, _, theirs in self._coming):
            work, tokens, theirs = self._coming.popleft()
            work.wait()
            last_tokens[torch.tensor(theirs, device=last_tokens.device)] = tokens

    def _send(self, tensor: Tensor, stage: int, group: Any) -> None:
        if len(self._sent) == _MOST_SENT:
            self._sent.popleft()[0].wait()
        work = torch.distributed.isend(tensor, self._peers[stage], group)
        self._sent.append((work, tensor))


class _Elsewhere(nn.Module):
    """A part of the model that another stage has."""


class _EmbeddingElsewhere(_Elsewhere):
    """The first stage's embedding, in whose place others have room for its result."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        # The weight's own size and type say nothing: it may be packed.
        self._size, self._dtype = embedding.hidden_size, embedding.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """``[1, T]`` to ``[1, T, H]``, of any values."""
        return torch.empty(*ids.shape, self._size, dtype=self._dtype, device=ids.device)


class _TiedElsewhere(Embedding):
    """The same beside a head with the embedding's matrix, which the checkpoint has by this name."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__(embedding.vocab_size, embedding.hidden_size, embedding.dtype, _META)
        self.method = embedding.method
        # Of codes the scales too.
        for name, parameter in embedding.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """``[1, T]`` to ``[1, T, H]``, of any values."""
        return torch.empty(*ids.shape, self.hidden_size, dtype=self.dtype, device=ids.device)


def find_decoder(model: nn.Module, stages: int, *, pools: bool = False) -> Decoder:
    """The decoder of a model that can be cut into so many stages.

    ``pools``: it is to give vectors or scores in place of tokens.

    Raises:
        OptionError: it cannot; names its class and why.
    """
    name, decoder = type(model).__name__, getattr(model, "model", None)
    why, advice = None, "leave pipeline_parallel_size out"
    if not isinstance(model, RotaryCausalLM) or not isinstance(decoder, Decoder):
        why = "it is no engine_core.nn.RotaryCausalLM, whose layers the core knows"
    elif type(model).forward is not RotaryCausalLM.forward or hasattr(model, "embed_media"):
        why = "it has a forward pass of its own"
    elif pools or not hasattr(model, "lm_head"):
        why = "it gives vectors"
    elif len(cached_layers(decoder.layers)) != len(cached_layers(model)):
        why = "it has a cache outside its layers"
    elif any(layer.cache_spec().keeps_state for layer in cached_layers(model)):
        why = "it keeps states in its cache"
    elif len(decoder.layers) < stages:
        why = f"it has {len(decoder.layers)} layers"
        if len(decoder.layers) > 1:
            advice = f"set pipeline_parallel_size to at most {len(decoder.layers)}"
    if why is not None:
        raise OptionError(f"{name} cannot be cut into {stages} stages: {why}; {advice}")
    assert isinstance(decoder, Decoder), "it was looked at"
    return decoder


def cut(
    model: nn.Module, source: WeightSource | None, where: str, link: StageLink
) -> tuple[WeightSource | None, range]:
    """Take away from a model on meta what other stages have.

    Every stage has as many layers, or one fewer than those before it. A head that is tied to the
    embedding is on the last stage, beside the embedding on the first.

    Args:
        model: one that :func:`find_decoder` takes.
        source: the tensors of all of it; None for random weights.
        where: their name for messages.
        link: says which stage this is.

    Returns:
        the tensors of this stage, and which of the model's layers with a cache it has.
    """
    decoder: Any = find_decoder(model, link.stages)
    account = None if source is None else check_weights(model, source, where)
    every, count = decoder.layers, len(decoder.layers)
    whole, more = divmod(count, link.stages)
    begin = link.stage * whole + min(link.stage, more)
    span = range(begin, begin + whole + (link.stage < more))
    before, own = (
        len(cached_layers(nn.ModuleList(every[index] for index in part)))
        for part in (range(span.start), span)
    )
    decoder.cut(span, link)
    head: Any = model.lm_head
    if not link.first:
        embedding = decoder.embed_tokens
        tied = link.last and head.weight is embedding.weight
        decoder.embed_tokens = (_TiedElsewhere if tied else _EmbeddingElsewhere)(embedding)
    if not link.last:
        decoder.norm = _Elsewhere()
        model.lm_head = _Elsewhere()
    cached = range(before, before + own)
    if source is None or account is None:
        return source, cached
    names = {name for param in model.parameters() for name in account.sources(param)}
    names |= {second for first, second in account.uncompared if first in names}
    return _Part(source, names), cached


def of_each_stage(model: nn.Module, stages: int, measure: Callable[[nn.Module], _T]) -> list[_T]:
    """``measure`` of each stage of a model on meta, which is whole again afterwards."""
    decoder: Any = find_decoder(model, stages)
    whole: Any = model
    kept = decoder.layers, decoder.embed_tokens, decoder.norm, whole.lm_head
    values = []
    for stage in range(stages):
        cut(model, None, "", StageLink(stage, stages))
        values.append(measure(model))
        decoder.layers, decoder.embed_tokens, decoder.norm, whole.lm_head = kept
        decoder.cut(range(len(decoder.layers)), None)
        link_layers(decoder.layers, decoder.norm)
    return values


class _Part:
    """The tensors of a checkpoint that have these names."""

    def __init__(self, source: WeightSource, names: set[str]) -> None:
        self._source, self._names = source, names

    @property
    def headers(self) -> Mapping[str, Any]:
        """See :class:`WeightSource`."""
        headers = self._source.headers.items()
        return {name: header for name, header in headers if name in self._names}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`WeightSource`."""
        for name, tensor in self._source.weights():
            if name in self._names:
                yield name, tensor


def whole_budget(
    stages: Sequence[tuple[Sequence[CacheSpec], int]], block_size: int
) -> tuple[tuple[CacheSpec, ...], int]:
    """All layers' specs, and the budget of a cache of all of them that fits on each stage.

    Args:
        stages: the specs of each stage's layers, and its bytes.
        block_size: tokens of a block.
    """
    specs = tuple(spec for own, _ in stages for spec in own)
    whole, each = pages(specs, block_size, [len(own) for own, _ in stages])
    budgets = (budget // page for (_, budget), page in zip(stages, each, strict=True))
    return specs, min(budgets) * whole


def stage_plan(plan: CachePlan, cached: range) -> CachePlan:
    """The part of a cache that a stage with these layers keeps: the same blocks, of fewer bytes."""
    groups = plan.layer_groups[cached.start : cached.stop]
    planes = planes_of(plan.cache_config.groups, groups)
    return replace(plan, layer_groups=groups, planes=planes)


def parts_of(plan: StepPlan, count: int) -> list[StepPlan]:
    """A plan as up to ``count`` plans of fewer rows, which follow each other through the stages."""
    rows = list(plan.rows)
    size = -(-len(rows) // count)
    cuts = [tuple(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
    rest = [StepPlan(plan.step_id, part, repeat=plan.repeat) for part in cuts[1:]]
    return [replace(plan, rows=cuts[0]), *rest]


def joined(results: Sequence[StepResult]) -> StepResult:
    """The result of a plan, of those of its parts."""
    rows = tuple(row for result in results for row in result.rows)
    return StepResult(results[0].step_id, rows)
