"""Translate llama.cpp's files of Qwen2 and Qwen3 to ordinary checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/qwen.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen. These files say
nothing of sliding windows: llama.cpp computes full attention, and so does the config made here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from engine_core.configs import GGUFDecoderAdapter
from engine_core.errors import CheckpointError

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


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


class Qwen2MoeGGUFAdapter(Qwen2GGUFAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``qwen2moe``."""

    architecture: ClassVar[str] = "qwen2moe"
    model_class: ClassVar[str] = "Qwen2MoeForCausalLM"
    model_type: ClassVar[str | None] = "qwen2_moe"
    layer_tensors: ClassVar[dict[str, str]] = {
        **GGUFDecoderAdapter.layer_tensors,
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }

    def read_config(self) -> dict[str, Any]:
        """See :class:`GGUFDecoderAdapter`."""
        shared = super().read_config()
        inner = self.integer("expert_shared_feed_forward_length", shared["intermediate_size"])
        return {
            **shared,
            **_experts(self, shared, normalised=False),
            "shared_expert_intermediate_size": inner,
            "qkv_bias": "blk.0.attn_q.bias" in self.gguf.tensors,
        }

    def tensor_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in an ordinary checkpoint, where the shared expert's gate is a matrix."""
        one_row = len(shape) == 1 and name.endswith(".ffn_gate_inp_shexp.weight")
        return (1, *shape) if one_row else shape


class Qwen3MoeGGUFAdapter(Qwen3GGUFAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``qwen3moe``."""

    architecture: ClassVar[str] = "qwen3moe"
    model_class: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str | None] = "qwen3_moe"
    layer_tensors: ClassVar[dict[str, str]] = {**Qwen3GGUFAdapter.layer_tensors, **_EXPERTS}

    def read_config(self) -> dict[str, Any]:
        """See :class:`GGUFDecoderAdapter`."""
        shared = super().read_config()
        return {**shared, **_experts(self, shared, normalised=True)}


def _experts(
    adapter: GGUFDecoderAdapter, shared: dict[str, Any], *, normalised: bool
) -> dict[str, Any]:
    """The config's part about experts; ``normalised`` is llama.cpp's rule for the family."""
    chosen = adapter.integer("expert_used_count")
    count = adapter.integer("expert_count")
    if chosen > count:
        raise CheckpointError(
            f"{adapter.gguf.path}: {adapter.architecture}.expert_used_count {chosen} is more than "
            f"{adapter.architecture}.expert_count {count}"
        )
    inner = adapter.integer("expert_feed_forward_length", shared["intermediate_size"] // chosen)
    stated = adapter.keys.pop("expert_weights_norm", normalised)
    if type(stated) is not bool:
        raise CheckpointError(
            f"{adapter.gguf.path}: {adapter.architecture}.expert_weights_norm must be true or "
            f"false, got {stated!r}"
        )
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "norm_topk_prob": stated,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer in range(shared["num_hidden_layers"]) if not _is_sparse(adapter, layer)
        ],
    }


def _is_sparse(adapter: GGUFDecoderAdapter, layer: int) -> bool:
    """Whether a layer has experts: all of their tensors, or none."""
    names = [f"blk.{layer}.{name}.weight" for name in _EXPERTS]
    there = [name in adapter.gguf.tensors for name in names]
    if any(there) and not all(there):
        raise CheckpointError(
            f"{adapter.gguf.path} has tensor {names[there.index(True)]!r} but not "
            f"{names[there.index(False)]!r}; a layer has all tensors of experts or none"
        )
    return all(there)
