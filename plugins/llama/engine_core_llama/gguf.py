"""Translate llama.cpp's ``llama`` files to ordinary Llama or Mixtral checkpoints. Imports no torch.

The way there is llama.cpp's ``conversion/llama.py``; this is the way back. A key or tensor that is
not known is refused, because leaving it out could change the results unseen.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import GGUFDecoderAdapter
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
_LAYER_TENSORS = GGUFDecoderAdapter.layer_tensors
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
# Of a Mixtral in place of these; each expert's matrix is a part of a tensor for all.
_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables that follow from the config; rope_freqs is read for the config.
_DERIVED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")

# Parameters that Llama 3.1 to 3.3 were published with.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


class LlamaGGUFAdapter:
    """Translates the config and the tensors of a GGUF file of architecture ``llama``.

    One with experts is a Mixtral.
    """

    version: ClassVar[int] = 1

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._keys = {
            key.removeprefix("llama."): value
            for key, value in gguf.metadata.items()
            if key.startswith("llama.")
        }
        self._config = self._read_config()
        if self._keys:
            raise CheckpointError(
                f"{gguf.path}: the keys {', '.join('llama.' + key for key in sorted(self._keys))} "
                "have no meaning in a Llama config, so the model would not be the same"
            )

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return self._config

    def tensor_name(self, name: str) -> str | None:
        """The name in an ordinary checkpoint; None for tables that follow from the config.

        Raises:
            CheckpointError: the tensor belongs to no such model.
        """
        if name in _TENSORS:
            return _TENSORS[name]
        if _DERIVED.fullmatch(name):
            return None
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in self._layer_tensors:
            raise CheckpointError(f"{self._gguf.path}: tensor {name!r} is no part of a Llama model")
        return f"model.layers.{match[1]}.{self._layer_tensors[match[2]]}.{match[3]}"

    def transform(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows of q and k from llama.cpp's order to that of ordinary checkpoints.

        llama.cpp rotates neighbouring rows of a head ``(0, 1), (2, 3), ...`` where the others
        rotate ``(0, d/2), (1, d/2 + 1), ...``; its converter permutes the rows for that.
        """
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in ("attn_q", "attn_k"):
            return array
        heads = self._config[
            "num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"
        ]
        if array.shape[0] != heads * self._config["head_dim"]:
            raise CheckpointError(
                f"{self._gguf.path}: tensor {name!r} has {array.shape[0]} rows, not "
                f"{heads} heads of {self._config['head_dim']}"
            )
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    def _read_config(self) -> dict[str, Any]:
        tensors = self._gguf.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self._gguf.path} has no tensor 'token_embd.weight'")
        hidden = self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden // heads)
        rotary_dim = self._integer("rope.dimension_count", head_dim)
        value_dim = self._integer("attention.value_length", head_dim)
        if not head_dim == rotary_dim == value_dim:
            raise CheckpointError(
                f"{self._gguf.path}: a Llama model has one head size, here keys have {head_dim}, "
                f"values {value_dim}, and {rotary_dim} of a key are rotated"
            )
        layers = self._integer("block_count")
        context = self._integer("context_length")
        theta = self._number("rope.freq_base", 10000.0)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(context, theta, head_dim),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": self._has_biases(_ATTENTION, layers),
            "mlp_bias": self._has_biases(_MLP, layers),
        }
        self._layer_tensors = _LAYER_TENSORS
        if self._keys.get("expert_count", 0) != 0:
            self._layer_tensors = {k: v for k, v in _LAYER_TENSORS.items() if k not in _MLP}
            self._layer_tensors |= _EXPERTS
            count, chosen = (self._integer(f"expert_{each}") for each in ("count", "used_count"))
            if chosen > count:
                raise CheckpointError(
                    f"{self._gguf.path}: llama.expert_used_count {chosen} is more than "
                    f"llama.expert_count {count}"
                )
            config |= {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": count,
                "num_experts_per_tok": chosen,
                "sliding_window": None,
            }
        self._check_tensors(layers)
        # Said twice (the embedding has the rows), or about other software than this.
        for key in ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"):
            self._keys.pop(key, None)
        for key in ("expert_count", "expert_used_count", "attention.sliding_window"):
            if self._keys.get(key) == 0:
                del self._keys[key]
        return config

    def _rope_scaling(self, context: int, theta: float, head_dim: int) -> dict[str, Any] | None:
        old_factor = self._number("rope.scale_linear", 0.0)
        factor = self._number("rope.scaling.factor", old_factor)
        kind = self._keys.pop("rope.scaling.type", "linear")
        if "rope_freqs.weight" in self._gguf.tensors:
            if factor not in (0.0, 1.0):
                raise CheckpointError(
                    f"{self._gguf.path} has both rope_freqs.weight and a scaling factor of "
                    f"{factor}; no Llama config says that"
                )
            return self._llama3_scaling(theta, head_dim)
        if kind == "none" or factor in (0.0, 1.0):
            self._keys.pop("rope.scaling.original_context_length", None)
            return None
        if kind == "linear":
            self._keys.pop("rope.scaling.original_context_length", None)
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise CheckpointError(
                f"{self._gguf.path}: the rope scaling {kind!r} is not one of none, linear, yarn"
            )
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._integer(
                "rope.scaling.original_context_length", context
            ),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"rope.scaling.{key}" in self._keys:
                scaling[name] = self._number(f"rope.scaling.{key}")
        if self._keys.get("rope.scaling.attn_factor") == 1.0:
            del self._keys["rope.scaling.attn_factor"]
        return scaling

    def _llama3_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """The parameters of Llama 3.1's scaling, from the divisors of the frequencies it gives.

        Multiplying both frequency factors and the original context by one number gives the same
        scaling, so the low factor can be taken as 1. Then one frequency in the blended band gives
        the original context if the high factor is that of Llama 3, and two of them give both.
        """
        divisors = [float(value) for value in self._gguf.read("rope_freqs.weight").reshape(-1)]
        if len(divisors) != head_dim // 2 or not all(value >= 1 for value in divisors):
            raise CheckpointError(
                f"{self._gguf.path}: rope_freqs.weight must hold {head_dim // 2} numbers of 1 or "
                f"more, got {len(divisors)} from {min(divisors)} on"
            )
        factor = float(f"{max(divisors):.6g}")
        if factor == 1.0:
            return None
        frequencies = [theta ** (-2 * index / head_dim) for index in range(head_dim // 2)]
        # A share of 1 keeps the frequency: share = (context * turns - low) / (high - low).
        blended = [
            (frequency / (2 * math.pi), (1 / divisor - 1 / factor) / (1 - 1 / factor))
            for frequency, divisor in zip(frequencies, divisors, strict=True)
            if 1 < divisor < factor * (1 - 1e-6)
        ]
        candidates = [
            (_LLAMA3_HIGH, round((_LLAMA3_LOW + share * (_LLAMA3_HIGH - _LLAMA3_LOW)) / turns))
            for turns, share in blended[:1]
        ]
        if len(blended) > 1:
            (turns, share), (last_turns, last_share) = blended[0], blended[-1]
            slope = (last_share - share) / (last_turns - turns)
            width = _LLAMA3_LOW / (slope * turns - share)
            candidates.append((float(f"{_LLAMA3_LOW + width:.4g}"), round(slope * width)))
        for high, context in candidates:
            expected = _llama3_divisors(frequencies, factor, high, context)
            if all(
                math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, divisors, strict=True)
            ):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LLAMA3_LOW,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
        raise CheckpointError(
            f"{self._gguf.path}: the numbers in rope_freqs.weight do not follow from Llama 3's "
            "rope scaling, so no Llama config gives the same frequencies"
        )

    def _has_biases(self, names: tuple[str, ...], layers: int) -> bool:
        wanted = [f"blk.{layer}.{name}.bias" for layer in range(layers) for name in names]
        there = [name in self._gguf.tensors for name in wanted]
        if any(there) and not all(there):
            raise CheckpointError(
                f"{self._gguf.path} has tensor {wanted[there.index(True)]!r} but not "
                f"{wanted[there.index(False)]!r}; a Llama model has a bias on all of "
                f"{', '.join(names)} or on none"
            )
        return any(there)

    def _check_tensors(self, layers: int) -> None:
        wanted = [
            "output_norm.weight",
            *(
                f"blk.{layer}.{name}.weight"
                for layer in range(layers)
                for name in self._layer_tensors
            ),
        ]
        missing = [name for name in wanted if name not in self._gguf.tensors]
        if missing:
            raise CheckpointError(
                f"{self._gguf.path} has no tensor {missing[0]!r} ({len(missing)} missing)"
            )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._keys.pop(key, default)
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self._gguf.path}: llama.{key} must be a positive integer, got {value!r}"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._keys.pop(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{self._gguf.path}: llama.{key} must be a number, got {value!r}")
        return float(value)


def _llama3_divisors(
    frequencies: list[float], factor: float, high: float, context: int
) -> list[float]:
    divisors = []
    for frequency in frequencies:
        turns = context * frequency / (2 * math.pi)
        share = min(max((turns - _LLAMA3_LOW) / (high - _LLAMA3_LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors
