"""Steps that launch every kernel; the other ways capture or record them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.nn.module import HookFlag, Module, hooks_registered
from engine_core.runtime.platform import to_device
from engine_core.runtime.step_batch import StepBatch, StepOutputs, StepState
from engine_core.step_context import StepContext


class ForwardPass:
    """A model and its cache."""

    def __init__(self, model: nn.Module, kv_cache: list[Any]) -> None:
        """``model`` has the interface that :class:`ModelRunner` describes."""
        self._model = model
        self._kv_cache = kv_cache
        self._hook_flag = HookFlag()
        for module in model.modules():
            if isinstance(module, Module):
                module.hook_flag = self._hook_flag

    @property
    def watched(self) -> bool:
        """Whether forward hooks are registered, so that the model's parts are to be called."""
        return hooks_registered(self._model)

    def hidden(self, context: StepContext) -> Tensor:
        """``[T, H]``, or the logits ``[T, V]`` of a model without ``get_logits``."""
        prepare = getattr(self._model, "prepare_inputs_for_generation", None)
        inputs: dict[str, Any] = (
            prepare(self._kv_cache, context.inputs_embeds, context)
            if prepare is not None
            else context.model_inputs(self._kv_cache)
        )
        self._hook_flag.watched = self.watched
        try:
            hidden: Tensor = self._model(**inputs)
        finally:
            self._hook_flag.watched = None
        return hidden[0]

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[n, H]`` of each item.

        Raises:
            TypeError: the model has no ``embed_media``, or gives another number of tensors.
        """
        embed: Any = getattr(self._model, "embed_media", None)
        name = type(self._model).__name__
        if embed is None:
            raise TypeError(f"{name} has no embed_media, and a prompt has {kind}s")
        embeddings = list(embed(kind, items))
        if len(embeddings) != len(items):
            raise TypeError(
                f"{name}.embed_media({kind!r}) of {len(items)} items gave {len(embeddings)} tensors"
            )
        return embeddings

    def merged(self, context: StepContext, embeddings: Sequence[tuple[int, Tensor]]) -> Tensor:
        """The tokens' embeddings ``[1, T, H]``, with others from given tokens on."""
        model: Any = self._model
        merged: Tensor = model.get_input_embeddings()(context.input_ids).clone()
        for begin, given in embeddings:
            merged[0, begin : begin + len(given)] = given
        return merged

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H]`` to ``[S, V]``, in the model's own type."""
        get_logits = getattr(self._model, "get_logits", None)
        logits: Tensor = hidden if get_logits is None else get_logits(hidden)
        return logits

    def __call__(self, context: StepContext, places: Tensor | None = None) -> Tensor:
        """Logits ``[S, V]`` of the tokens at ``places [S]``, or ``[T, V]`` of every token."""
        hidden = self.hidden(context)
        return self.logits(hidden if places is None else hidden[places])


class EagerSteps:
    """Runs every step by the model itself."""

    def __init__(self, state: StepState, forward: ForwardPass) -> None:
        self._state = state
        self._forward = forward

    def run(self, batch: StepBatch, embeddings: Sequence[tuple[int, Tensor]] = ()) -> StepOutputs:
        """Run a step; see :class:`~engine_core.runtime.step_batch.Steps`.

        ``embeddings`` are put in place of those of the tokens from their numbers on.
        """
        device = self._state.device
        for table in self._state.tables:
            table.flush()
        parts = self._state.split(batch, to_device(batch.numbers, device))
        context = self._state.context(batch, parts)
        if embeddings:
            context = replace(context, inputs_embeds=self._forward.merged(context, embeddings))
        hidden = self._forward.hidden(context)
        if batch.decodes:
            return StepOutputs(self._forward.logits(hidden))
        if not batch.sampled:
            return StepOutputs(hidden=hidden)
        last = self._state.split(batch, batch.numbers)["last"]
        where = last[torch.tensor([batch.places[index] for index in batch.sampled])]
        logits = self._forward.logits(hidden[to_device(where, device)])
        return StepOutputs(logits, hidden=hidden)
