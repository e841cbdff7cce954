"""Translate llama.cpp's ``qwen2`` and ``qwen3`` to ordinary checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/qwen.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen. These files say
nothing of sliding windows: llama.cpp computes full attention, and so does the config made here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine_core.checkpoint import GGUFFile

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Qwen2GGUFAdapter:
    """Translates the config and the tensors of a GGUF file of architecture ``qwen2``."""

    version: ClassVar[int] = 1
    architecture: ClassVar[str] = "qwen2"
    model_class: ClassVar[str] = "Qwen2ForCausalLM"
    layer_tensors: ClassVar[dict[str, str]] = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        prefix = f"{self.architecture}."
        self._keys = {
            key.removeprefix(prefix): value
            for key, value in gguf.metadata.items()
            if key.startswith(prefix)
        }
        self._config = self._read_config()
        if self._keys:
            names = ", ".join(prefix + key for key in sorted(self._keys))
            raise CheckpointError(
                f"{gguf.path}: the keys {names} have no meaning in a config of "
                f"{self.model_class}, so the model would not be the same"
            )

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return self._config

    def tensor_name(self, name: str) -> str:
        """The name in an ordinary checkpoint.

        Raises:
            CheckpointError: the tensor belongs to no model of this architecture.
        """
        if name in _TENSORS:
            return _TENSORS[name]
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in self.layer_tensors:
            raise CheckpointError(
                f"{self._gguf.path}: tensor {name!r} is no part of a {self.architecture} model"
            )
        return f"model.layers.{match[1]}.{self.layer_tensors[match[2]]}.{match[3]}"

    def transform(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The array as it is: llama.cpp rotates this family's q and k by halves, as all do."""
        del name
        return array

    def _read_config(self) -> dict[str, Any]:
        tensors = self._gguf.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self._gguf.path} has no tensor 'token_embd.weight'")
        hidden = self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self._gguf.path}: {self.architecture}.{key} is not the head size {head_dim}"
                )
        context = self._integer("context_length")
        config = {
            "architectures": [self.model_class],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(context),
            "use_sliding_window": False,
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        # Said twice (the embedding has the rows), or about other software than this.
        for key in ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"):
            self._keys.pop(key, None)
        return config

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        kind = self._keys.pop("rope.scaling.type", "linear")
        original = self._integer("rope.scaling.original_context_length", context)
        factor = self._number("rope.scaling.factor", 1.0)
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
            f"{self._gguf.path}: the rope scaling {kind!r} is not one of none, linear, yarn"
        )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._keys.pop(key, default)
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self._gguf.path}: {self.architecture}.{key} must be a positive integer, got "
                f"{value!r}"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._keys.pop(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{self._gguf.path}: {self.architecture}.{key} must be a positive number, got "
                f"{value!r}"
            )
        return float(value)


class Qwen3GGUFAdapter(Qwen2GGUFAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``qwen3``."""

    architecture: ClassVar[str] = "qwen3"
    model_class: ClassVar[str] = "Qwen3ForCausalLM"
    layer_tensors: ClassVar[dict[str, str]] = {
        **Qwen2GGUFAdapter.layer_tensors,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }

    def _read_config(self) -> dict[str, Any]:
        return {
            **super()._read_config(),
            "attention_bias": "blk.0.attn_q.bias" in self._gguf.tensors,
        }
