"""Translate llama.cpp's ``gemma2`` and ``gemma3`` to ordinary checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/gemma.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen. What these files do
not say is a constant here as it is in llama.cpp's ``src/models/gemma2.cpp`` and ``gemma3.cpp``.
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
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma2GGUFAdapter:
    """Translates the config and the tensors of a GGUF file of architecture ``gemma2``."""

    version: ClassVar[int] = 1
    architecture: ClassVar[str] = "gemma2"
    model_class: ClassVar[str] = "Gemma2ForCausalLM"
    model_type: ClassVar[str] = "gemma2"
    # One layer in how many attends to all tokens, where the file does not say.
    full_every: ClassVar[int] = 2
    # The size whose scores are scaled by hidden size and heads, not by the size of a head.
    layers_of_27b: ClassVar[int] = 46
    layer_tensors: ClassVar[dict[str, str]] = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
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
        # Said twice (the embedding has the rows), or about other software than this.
        for key in ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"):
            self._keys.pop(key, None)
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
        """Norms without the 1 that llama.cpp's converter adds to them; the rest as it is."""
        return array - 1 if name.endswith("norm.weight") else array

    def _read_config(self) -> dict[str, Any]:
        tensors = self._gguf.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self._gguf.path} has no tensor 'token_embd.weight'")
        hidden = self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", 256)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self._gguf.path}: {self.architecture}.{key} is not the head size {head_dim}"
                )
        layers = self._integer("block_count")
        of_27b = layers == self.layers_of_27b
        return {
            "architectures": [self.model_class],
            "model_type": self.model_type,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "query_pre_attn_scalar": hidden // heads if of_27b else head_dim,
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            **self._window_and_caps(layers),
            **self._ropes(),
        }

    def _window_and_caps(self, layers: int) -> dict[str, Any]:
        return {
            "sliding_window": self._integer("attention.sliding_window", 4096),
            "layer_types": self._layer_types(layers),
            "attn_logit_softcapping": self._number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._number("final_logit_softcapping", 30.0),
        }

    def _layer_types(self, layers: int) -> list[str]:
        pattern = self._keys.pop("attention.sliding_window_pattern", self.full_every)
        if hasattr(pattern, "tolist"):  # an array, with true for each layer that slides
            slides = [bool(value) for value in pattern.tolist()]
        elif type(pattern) is int and pattern >= 0:
            slides = [pattern == 0 or bool((index + 1) % pattern) for index in range(layers)]
        else:
            slides = []
        if len(slides) != layers:
            raise CheckpointError(
                f"{self._gguf.path}: {self.architecture}.attention.sliding_window_pattern must be "
                f"an integer or {layers} booleans, got {pattern!r}"
            )
        return [_SLIDING if each else _FULL for each in slides]

    def _ropes(self) -> dict[str, Any]:
        base = self._number("rope.freq_base", 10000.0)
        if self._number("rope.freq_base_swa", base) != base:
            raise CheckpointError(
                f"{self._gguf.path}: {self.architecture}.rope.freq_base_swa is not "
                "rope.freq_base, which all layers of Gemma 2 have"
            )
        return {"rope_theta": base, "rope_scaling": self._rope_scaling()}

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._keys.pop("rope.scaling.type", "linear")
        factor = self._number("rope.scaling.factor", 1.0)
        if kind not in ("none", "linear"):
            raise CheckpointError(
                f"{self._gguf.path}: the rope scaling {kind!r} is not one of none, linear"
            )
        return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}

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


class Gemma3GGUFAdapter(Gemma2GGUFAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``gemma3``."""

    architecture: ClassVar[str] = "gemma3"
    model_class: ClassVar[str] = "Gemma3ForCausalLM"
    model_type: ClassVar[str] = "gemma3_text"
    full_every: ClassVar[int] = 6
    layers_of_27b: ClassVar[int] = 62
    layer_tensors: ClassVar[dict[str, str]] = {
        **Gemma2GGUFAdapter.layer_tensors,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }

    def _window_and_caps(self, layers: int) -> dict[str, Any]:
        types = self._layer_types(layers)
        window = None
        if self._keys.get("attention.sliding_window"):
            window = self._integer("attention.sliding_window")
        else:  # then no layer slides, whatever the pattern
            self._keys.pop("attention.sliding_window", None)
            types = [_FULL] * layers
        cap = None
        if self._keys.get("final_logit_softcapping"):
            cap = self._number("final_logit_softcapping")
        else:
            self._keys.pop("final_logit_softcapping", None)
        return {
            "sliding_window": window,
            "layer_types": types,
            "final_logit_softcapping": cap,
        }

    def _ropes(self) -> dict[str, Any]:
        return {
            "rope_theta": self._number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10_000.0),
            "rope_scaling": self._rope_scaling(),
        }
