"""Translate llama.cpp's ``qwen2`` and ``qwen3`` to ordinary checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/qwen.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen. These files say
nothing of sliding windows: llama.cpp computes full attention, and so does the config made here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from engine_core.configs import GGUFDecoderAdapter
from engine_core.errors import CheckpointError


class Qwen2GGUFAdapter(GGUFDecoderAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``qwen2``."""

    architecture: ClassVar[str] = "qwen2"
    model_class: ClassVar[str] = "Qwen2ForCausalLM"

    def read_config(self) -> dict[str, Any]:
        """See :class:`GGUFDecoderAdapter`."""
        shared = super().read_config()
        return {
            **shared,
            "hidden_act": "silu",
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(shared["max_position_embeddings"]),
            "use_sliding_window": False,
        }

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        kind = self.keys.pop("rope.scaling.type", "linear")
        original = self.integer("rope.scaling.original_context_length", context)
        factor = self.number("rope.scaling.factor", 1.0)
        if kind == "none" or factor == 1.0:
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        raise CheckpointError(
            f"{self.gguf.path}: the rope scaling {kind!r} is not one of none, linear, yarn"
        )


class Qwen3GGUFAdapter(Qwen2GGUFAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``qwen3``."""

    architecture: ClassVar[str] = "qwen3"
    model_class: ClassVar[str] = "Qwen3ForCausalLM"
    layer_tensors: ClassVar[dict[str, str]] = {
        **GGUFDecoderAdapter.layer_tensors,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }

    def read_config(self) -> dict[str, Any]:
        """See :class:`GGUFDecoderAdapter`."""
        return {
            **super().read_config(),
            "attention_bias": "blk.0.attn_q.bias" in self.gguf.tensors,
        }
