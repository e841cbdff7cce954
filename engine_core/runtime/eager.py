"""Steps that launch every kernel; the other ways capture or record them."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.errors import ModelError
from engine_core.kernels.launch.quick import quickly
from engine_core.nn.module import HookFlag, Module, hooks_registered
from engine_core.plugin_code import silent
from engine_core.runtime.first_pass import check_shape, first_pass, refuse
from engine_core.runtime.graphs import bucket_of
from engine_core.runtime.platform import to_device
from engine_core.runtime.step_batch import StepBatch, StepOutputs, StepState
from engine_core.step_context import StepContext


class ForwardPass:
    """A model and its cache."""

    def __init__(
        self,
        model: nn.Module,
        kv_cache: list[Any],
        vocab_size: int | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """``model`` has the interface that :class:`ModelRunner` describes.

        ``vocab_size`` is that of the logits; None if it is not known. A ``deterministic`` model
        computes all tokens of a step, whoever asks for them.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        # A deterministic model's tokens are computed alike whoever asks for them.
        self._takes_wanted = (
            not deterministic and "wanted" in inspect.signature(model.forward).parameters
        )
        # Methods of the model that have run once.
        self._tried: set[str] = set()
        self._hook_flag = HookFlag()
        for module in model.modules():
            if isinstance(module, Module):
                module.hook_flag = self._hook_flag

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        return type(self._model).__name__

    @property
    def takes_media(self) -> bool:
        """Whether the model makes embeddings of pictures, videos or sounds."""
        return hasattr(self._model, "embed_media")

    @property
    def may_capture_media(self) -> bool:
        """Whether the model's author lets ``embed_media`` be captured as a CUDA graph."""
        return bool(getattr(self._model, "support_media_graph", False))

    @property
    def watched(self) -> bool:
        """Whether forward hooks are registered, so that the model's parts are to be called."""
        return hooks_registered(self._model)

    def hidden(self, context: StepContext, wanted: Tensor | None = None) -> Tensor:
        """``[T, H]``, or the logits ``[T, V]`` of a model without ``get_logits``.

        With ``wanted [S]``, places among the T, those of these tokens alone, ``[S, H]``. A model
        whose ``forward`` has an argument of that name may spare the work on the others.

        Raises:
            ModelError: the model returned something else.
        """
        method = "prepare_inputs_for_generation"
        if not hasattr(self._model, method):
            inputs: Any = context.model_inputs(self._kv_cache)
        else:
            inputs = self._call(method, self._kv_cache, context.inputs_embeds, context)
            if not isinstance(inputs, Mapping):
                raise refuse(
                    self._model, method, inputs, "forward's arguments by name are expected"
                )
        self._hook_flag.watched = watched = self.watched
        tokens, left = context.input_ids.shape[1], wanted
        if wanted is not None and self._takes_wanted and not watched:
            inputs, tokens, left = {**inputs, "wanted": wanted}, len(wanted), None
        try:
            given = self._call("forward", **inputs)
        finally:
            self._hook_flag.watched = None
        name = "T" if left is wanted else "S"
        given = check_shape(self._model, "forward", given, 1, tokens, None, names=f"1 {name} H")[0]
        return given if left is None else given[left]

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[n, H]`` of each item.

        Raises:
            ModelError: the model returned something else.
        """
        method = "embed_media"
        return self._listed(method, self._call(method, kind, items), len(items))

    def embed_media_parts(
        self, kind: str, items: Sequence[Mapping[str, Tensor]]
    ) -> Generator[float, None, list[Tensor]]:
        """As :meth:`embed_media`, in parts: gives the share of the work that is done after each.

        Raises:
            ModelError: the model returned something else.
        """
        method = "embed_media_parts"
        with silent():
            parts = getattr(self._model, method)(kind, items)
        while True:
            try:
                with silent():
                    done = next(parts)
            except StopIteration as end:
                return self._listed(method, end.value, len(items))
            yield done

    def _listed(self, method: str, given: Any, count: int) -> list[Tensor]:
        if not isinstance(given, list | tuple) or len(given) != count:
            raise refuse(self._model, method, given, f"a list of {count} tensors is expected")
        return list(given)

    def usual_media(self) -> list[tuple[str, Sequence[Mapping[str, Tensor]]]]:
        """Items that the model's author expects often: a kind, and the features of each."""
        name = "usual_media"
        with silent():
            return list(getattr(self._model, name)()) if hasattr(self._model, name) else []

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """``[1, T]`` to ``[1, T, H]``, for a model whose steps take embeddings.

        Raises:
            ModelError: it has no ``get_input_embeddings``, or that returned something else.
        """
        method = "get_input_embeddings"
        if not hasattr(self._model, method):
            raise ModelError(
                f"{self.model_name} has embed_media but no {method}, whose module gives the "
                "embeddings of a prompt's other tokens"
            )
        given = getattr(self._model, method)()(token_ids)
        return check_shape(self._model, method, given, *token_ids.shape, None, names="1 T H")

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H]`` to ``[S, V]``, in the model's own type.

        Raises:
            ModelError: the model returned something else.
        """
        method, given = "forward", hidden
        if hasattr(self._model, "get_logits"):
            method, given = "get_logits", self._call("get_logits", hidden)
        shape = (hidden.shape[0], self._vocab_size)
        return check_shape(self._model, method, given, *shape, names="S V")

    def classify(self, states: Tensor) -> Tensor:
        """Pooled states ``[S, H]`` to scores ``[S, 1]``, by the model's own head.

        Raises:
            ModelError: the model returned something else.
        """
        method = "classify"
        given = self._call(method, states)
        return check_shape(self._model, method, given, len(states), 1, names="S 1")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model; what goes on in it is checked the first time."""
        call = self._model if method == "forward" else getattr(self._model, method)
        with silent():
            if method in self._tried:
                return call(*args, **kwargs)
            with first_pass(self._model):
                given = call(*args, **kwargs)
        self._tried.add(method)
        return given

    def __call__(self, context: StepContext, places: Tensor | None = None) -> Tensor:
        """Logits ``[S, V]`` of the tokens at ``places [S]``, or ``[T, V]`` of every token."""
        return self.logits(self.hidden(context, places))


class EagerSteps:
    """Runs every step by the model itself."""

    def __init__(self, state: StepState, forward: ForwardPass, *, chooses: bool = True) -> None:
        """``chooses``: whether somebody wants logits."""
        self._state = state
        self._forward = forward
        self._chooses = chooses

    def run(self, batch: StepBatch) -> StepOutputs:
        """Run a step; see :class:`~engine_core.runtime.step_batch.Steps`."""
        device = self._state.device
        for table in self._state.tables:
            table.flush()
        parts = self._state.split(batch, to_device(batch.numbers, device))
        context = self._state.context(batch, parts)
        if not self._chooses:
            return StepOutputs(hidden=self._forward.hidden(context))
        if batch.decodes:
            return StepOutputs(self._forward.logits(self._forward.hidden(context)))
        if batch.padded:
            # As in the captured step of this shape: its kernels are there, for as many places.
            with quickly(batch.key.quick):
                logits = self._forward(context, parts["last"])
            chosen = [batch.places[index] for index in batch.sampled]
            where = to_device(torch.tensor(chosen, dtype=torch.int64), device)
            return StepOutputs(logits[where] if chosen else None)
        last, places = self._state.split(batch, batch.numbers)["last"], batch.places
        sampled = last[torch.tensor([places[index] for index in batch.sampled], dtype=torch.int64)]
        if batch.whole:
            hidden = self._forward.hidden(context)
            states = hidden[to_device(sampled, device)]
        else:
            hidden, count = None, len(sampled)
            if device.type == "cuda" and count:
                # As many as in captured steps, whose kernels there are.
                more = min(bucket_of(count), self._state.max_rows) - count
                sampled = torch.cat([sampled, sampled[-1:].expand(more)])
            states = self._forward.hidden(context, to_device(sampled, device))[:count]
        return StepOutputs(self._forward.logits(states) if batch.sampled else None, hidden=hidden)
