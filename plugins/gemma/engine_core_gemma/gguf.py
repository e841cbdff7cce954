"""Translate llama.cpp's ``gemma2`` and ``gemma3`` to ordinary checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/gemma.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen. What these files do
not say is a constant here as it is in llama.cpp's ``src/models/gemma2.cpp`` and ``gemma3.cpp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import GGUFDecoderAdapter
from engine_core.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma2GGUFAdapter(GGUFDecoderAdapter):
    """Translates the config and the tensors of a GGUF file of architecture ``gemma2``."""

    architecture: ClassVar[str] = "gemma2"
    model_class: ClassVar[str] = "Gemma2ForCausalLM"
    # One layer in how many attends to all tokens, where the file does not say.
    full_every: ClassVar[int] = 2
    # The size whose scores are scaled by hidden size and heads, not by the size of a head.
    layers_of_27b: ClassVar[int] = 46
    layer_tensors: ClassVar[dict[str, str]] = {
        **GGUFDecoderAdapter.layer_tensors,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    def transform(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """Norms without the 1 that llama.cpp's converter adds to them; the rest as it is."""
        return array - 1 if name.endswith("norm.weight") else array

    def usual_head_dim(self, hidden: int, heads: int) -> int:
        """256, whatever the hidden size."""
        return 256

    def read_config(self) -> dict[str, Any]:
        """See :class:`GGUFDecoderAdapter`."""
        shared = super().read_config()
        layers = shared["num_hidden_layers"]
        by_hidden = shared["hidden_size"] // shared["num_attention_heads"]
        return {
            **shared,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": (
                by_hidden if layers == self.layers_of_27b else shared["head_dim"]
            ),
            "attention_bias": "blk.0.attn_q.bias" in self.gguf.tensors,
            **self._window_and_caps(layers),
            **self._ropes(),
        }

    def _window_and_caps(self, layers: int) -> dict[str, Any]:
        return {
            "sliding_window": self.integer("attention.sliding_window", 4096),
            "layer_types": self._layer_types(layers),
            "attn_logit_softcapping": self.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self.number("final_logit_softcapping", 30.0),
        }

    def _layer_types(self, layers: int) -> list[str]:
        pattern = self.keys.pop("attention.sliding_window_pattern", self.full_every)
        if hasattr(pattern, "tolist"):  # an array, with true for each layer that slides
            slides = [bool(value) for value in pattern.tolist()]
        elif type(pattern) is int and pattern >= 0:
            slides = [pattern == 0 or bool((index + 1) % pattern) for index in range(layers)]
        else:
            slides = []
        if len(slides) != layers:
            raise CheckpointError(
                f"{self.gguf.path}: {self.architecture}.attention.sliding_window_pattern must be "
                f"an integer or {layers} booleans, got {pattern!r}"
            )
        return [_SLIDING if each else _FULL for each in slides]

    def _ropes(self) -> dict[str, Any]:
        base = self.number("rope.freq_base", 10000.0)
        if self.number("rope.freq_base_swa", base) != base:
            raise CheckpointError(
                f"{self.gguf.path}: {self.architecture}.rope.freq_base_swa is not "
                "rope.freq_base, which all layers of Gemma 2 have"
            )
        return {"rope_theta": base, "rope_scaling": self._rope_scaling()}

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.keys.pop("rope.scaling.type", "linear")
        factor = self.number("rope.scaling.factor", 1.0)
        if kind not in ("none", "linear"):
            raise CheckpointError(
                f"{self.gguf.path}: the rope scaling {kind!r} is not one of none, linear"
            )
        return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}


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
        if self.keys.get("attention.sliding_window"):
            window = self.integer("attention.sliding_window")
        else:  # then no layer slides, whatever the pattern
            self.keys.pop("attention.sliding_window", None)
            types = [_FULL] * layers
        cap = None
        if self.keys.get("final_logit_softcapping"):
            cap = self.number("final_logit_softcapping")
        else:
            self.keys.pop("final_logit_softcapping", None)
        return {
            "sliding_window": window,
            "layer_types": types,
            "final_logit_softcapping": cap,
        }

    def _ropes(self) -> dict[str, Any]:
        return {
            "rope_theta": self.number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10_000.0),
            "rope_scaling": self._rope_scaling(),
        }
