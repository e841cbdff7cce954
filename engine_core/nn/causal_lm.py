"""Methods that the engine calls on a model with a language-model head, beside ``forward``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine_core.nn.attention import KVCacheLayer
from engine_core.step_context import StepContext


class CausalLM(nn.Module):
    """The usual answers of a model whose head is ``lm_head``.

    A family sets ``lm_head`` in its constructor, and overrides
    :meth:`prepare_inputs_for_generation` if its forward pass needs more than tokens and positions.

    Attributes:
        support_cuda_graph: whether its steps may be captured as CUDA graphs or, on a CPU, recorded.
            They must then be functions of tensors that do no harm when they run twice: a layer that
            updates a state in place says False.
        lm_head: gives logits.
    """

    support_cuda_graph = True
    lm_head: nn.Module

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., vocab]``."""
        return self.adjust_logits(self.lm_head(hidden_states))

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """``[..., vocab]`` to ``[..., vocab]``: for families that cap or scale their logits."""
        return logits

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step."""
        assert context is not None, "the runner passes the step's context"
        return context.model_inputs(past_key_values)
