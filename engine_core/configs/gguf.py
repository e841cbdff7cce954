"""Translation of llama.cpp's decoders to ordinary checkpoints, for families to build on."""

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


class GGUFDecoderAdapter:
    """Translates the config and the tensors of a decoder; subclasses say what is theirs.

    It is a ``GGUFAdapter``. A key or tensor that is not known is refused, because leaving it out
    could change the results unseen. :meth:`read_config` takes the keys that it understands.

    Attributes:
        version: see ``GGUFAdapter``.
        architecture: the one that a GGUF file calls itself.
        model_class: the one of ``config.json``.
        model_type: likewise; the architecture if None.
        layer_tensors: names in a layer of the file, and in a layer of an ordinary checkpoint.
    """

    version: ClassVar[int] = 1
    architecture: ClassVar[str]
    model_class: ClassVar[str]
    model_type: ClassVar[str | None] = None
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
        """Look at the file.

        Raises:
            CheckpointError: it has a key or value that cannot be translated.
        """
        self.gguf = gguf
        prefix = f"{self.architecture}."
        self.keys = {
            key.removeprefix(prefix): value
            for key, value in gguf.metadata.items()
            if key.startswith(prefix)
        }
        self._config = self.read_config()
        # Said twice (the embedding has the rows), or about other software than this.
        for key in ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"):
            self.keys.pop(key, None)
        if self.keys:
            names = ", ".join(prefix + key for key in sorted(self.keys))
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
                f"{self.gguf.path}: tensor {name!r} is no part of a {self.architecture} model"
            )
        return f"model.layers.{match[1]}.{self.layer_tensors[match[2]]}.{match[3]}"

    def transform(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The array as it is: llama.cpp rotates q and k of most families by halves, as all do."""
        del name
        return array

    def read_config(self) -> dict[str, Any]:
        """The part of ``config.json`` that decoders share; a subclass adds its own.

        Raises:
            CheckpointError: a key or the embedding is missing, or a value is senseless.
        """
        tensors = self.gguf.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self.gguf.path} has no tensor 'token_embd.weight'")
        hidden = self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", self.usual_head_dim(hidden, heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self.gguf.path}: {self.architecture}.{key} is not the head size {head_dim}"
                )
        return {
            "architectures": [self.model_class],
            "model_type": self.model_type or self.architecture,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
        }

    def usual_head_dim(self, hidden: int, heads: int) -> int:
        """The head size where the file states none."""
        return hidden // heads

    def integer(self, key: str, default: int | None = None) -> int:
        """Take a positive integer out of the keys.

        Raises:
            CheckpointError: it is none, or is missing without a default.
        """
        value = self.keys.pop(key, default)
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self.gguf.path}: {self.architecture}.{key} must be a positive integer, got "
                f"{value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Take a positive number out of the keys.

        Raises:
            CheckpointError: it is none, or is missing without a default.
        """
        value = self.keys.pop(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{self.gguf.path}: {self.architecture}.{key} must be a positive number, got "
                f"{value!r}"
            )
        return float(value)


__all__ = ["GGUFDecoderAdapter"]
