"""Reads configs of Qwen and Qwen-VL checkpoints of the first generation. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    DefaultConfigBuilder,
    HFConfig,
    TiktokenFormat,
    check_kinds,
    stated_keys,
)
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

EMBEDDINGS = 256
"""Embeddings of an image."""

# Defaults of keys that checkpoints leave out, from the original's config class.
_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8192,
    "seq_length": 8192,
    "rotary_emb_base": 10000,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
}
# Keys that say how the model computes; here that is done in one way.
_ONLY = {"rotary_pct": 1.0, "no_bias": True, "scale_attn_weights": True}
_VISUAL = {
    "heads": 16,
    "image_size": 448,
    "image_start_id": 151857,
    "layers": 48,
    "mlp_ratio": 4.9231,
    "output_dim": 4096,
    "patch_size": 14,
    "width": 1664,
}
# <|endoftext|> and <|im_end|> of the published tokenizer, whose code names them.
_ENDS = (151643, 151645)

_MARKS = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
_TEXT_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
)
# What the code of the published tokenizer says of its file.
_TIKTOKEN = TiktokenFormat(
    file="qwen.tiktoken",
    pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    normalizer="NFC",
    added_tokens=_TEXT_TOKENS,
    named_tokens={"eos_token": "<|endoftext|>"},
)
_TIKTOKEN_VL = replace(
    _TIKTOKEN,
    added_tokens=(*_TEXT_TOKENS, *_MARKS, "<img>", "</img>", "<imgpad>"),
    shown_tokens=frozenset(_MARKS),
)

# As the original's code writes a conversation.
_CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>' }}{% endif %}"
    "{% set shown = namespace(count=0) %}"
    "{% for message in messages %}"
    "{{ '' if loop.first and message.role == 'system' else '\n' }}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "{% set shown.count = shown.count + 1 %}"
    "{{ 'Picture %d: <img></img>\n' % shown.count }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)


class QWenConfigBuilder:
    """Reads the configs of Qwen (v1) and of Qwen-VL, which has the key ``visual``.

    In the built config the width of a feed-forward layer is ``ffn_size``: the published
    ``intermediate_size`` is that of both of its inputs together. The scale of the head that
    transformers' names have (``head_dim``, ``rms_norm_eps``) is there, too.
    """

    architecture: ClassVar[str] = "QWenLMHeadModel"

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is senseless or asks for what is not supported.
        """
        stated = stated_keys(hf_config.to_dict())
        values = {**_DEFAULTS, **_ONLY, **stated}
        check_kinds(values, _DEFAULTS)
        for key, wanted in _ONLY.items():
            if values[key] != wanted:
                raise ConfigError(
                    f"config.json: {key} {values[key]!r} is not supported, only {wanted!r}"
                )
        heads, head_dim = values["num_attention_heads"], values["kv_channels"]
        if heads * head_dim != values["hidden_size"]:
            raise ConfigError(
                f"config.json: hidden_size ({values['hidden_size']}) must be num_attention_heads "
                f"({heads}) times kv_channels ({head_dim})"
            )
        if values["seq_length"] < 2:
            raise ConfigError("config.json: seq_length must be 2 or more")
        values |= {
            "head_dim": head_dim,
            "rms_norm_eps": values["layer_norm_epsilon"],
            "ffn_size": values["intermediate_size"] // 2,
        }
        if "visual" in values:
            values["visual"] = _visual(values["visual"], values["hidden_size"])
            _check_marks(values["visual"]["image_start_id"], values["vocab_size"])
            kwargs.setdefault("default_chat_template", _CHAT_TEMPLATE)
        kwargs.setdefault("tiktoken", _TIKTOKEN_VL if "visual" in values else _TIKTOKEN)
        if "eos_token_id" not in values and max(_ENDS) < values["vocab_size"]:
            kwargs.setdefault("eos_token_ids", _ENDS)
        kwargs.setdefault("may_exceed_length", values["use_dynamic_ntk"])
        return DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)


def _visual(stated: Any, hidden_size: int) -> dict[str, Any]:
    where = "config.json: visual:"
    if not isinstance(stated, Mapping):
        raise ConfigError(f"config.json: visual must be an object, got {stated!r}")
    values = {**_VISUAL, **stated_keys(stated)}
    try:
        check_kinds(values, _VISUAL)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json:", where)) from None
    for key, wanted in (("output_dim", hidden_size), ("n_queries", EMBEDDINGS)):
        if values.setdefault(key, wanted) != wanted:
            raise ConfigError(f"{where} {key} {values[key]} is not supported, only {wanted}")
    for whole, part in (("width", "heads"), ("image_size", "patch_size"), ("output_dim", 128)):
        size = values[part] if isinstance(part, str) else part
        if values[whole] % size:
            raise ConfigError(f"{where} {whole} ({values[whole]}) is not divisible by {size}")
    return values


def _check_marks(first: int, vocab_size: int) -> None:
    if first + 2 >= vocab_size:
        raise ConfigError(
            f"config.json: visual: image_start_id ({first}) and the two tokens after it must be "
            f"of the {vocab_size}"
        )
