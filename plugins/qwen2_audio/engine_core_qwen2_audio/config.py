"""Reads configs of Qwen2-Audio checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import HFConfig, check_kinds, object_of, stated_keys
from engine_core.configs.hf_config import read_object
from engine_core.errors import ConfigError, CorruptCheckpointError
from engine_core.registry import text_model_config

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_TEXT_MODEL = "Qwen2ForCausalLM"
_PARTS = ("architectures", "audio_config", "model_type", "text_config")

# Defaults of keys that checkpoints leave out, from transformers' config classes: those published
# say of their text model what differs from a Qwen2 of 7B.
_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}
_EXTRACTOR = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
_LENGTH = {"chunk_length": 30}
# Of an extractor's keys these say how features are computed; here that is done in one way.
_EXTRACTOR_ONLY = {"dither": 0.0, "do_normalize": False, "padding_value": 0.0}

# For checkpoints that bring none: transformers' processor has it in its code, and it is Qwen2's.
_CHAT_TEMPLATE = (
    "{% set heard = namespace(count=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'audio' %}"
    "{% set heard.count = heard.count + 1 %}"
    "{{ 'Audio %d: <|audio_bos|><|AUDIO|><|audio_eos|>\n' % heard.count }}"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Qwen2AudioConfigBuilder:
    """Reads the configs of Qwen2-Audio.

    The built config has ``text_config``, as the text model's own builder leaves it, and the
    encoder's ``audio_config``; ``audio_token_index``; and ``extractor``, the numbers by which a
    sound becomes features.
    """

    architecture: ClassVar[str] = "Qwen2AudioForConditionalGeneration"

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        ``model_path`` is where ``preprocessor_config.json`` is read from, if it is there.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        stated = stated_keys(hf_config.to_dict())
        around = {key: value for key, value in stated.items() if key not in _PARTS}
        text = {**_TEXT, **around, **stated_keys(object_of(stated, "text_config"))}
        text["architectures"] = [_TEXT_MODEL]
        config = text_model_config(HFConfig(text), model_path, {_TEXT_MODEL: "engine-core-qwen2"})
        token = stated.get("audio_token_index", stated.get("audio_token_id", 151646))
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"config.json: audio_token_index must be a token of the {config.vocab_size}, got "
                f"{token!r}"
            )
        audio = _audio_config(object_of(stated, "audio_config"))
        values = {
            "text_config": config.hf_config.to_dict(),
            "audio_config": audio,
            "audio_token_index": token,
            "extractor": _extractor(model_path, audio),
        }
        kwargs.setdefault("architecture", cls.architecture)
        kwargs.setdefault("default_chat_template", _CHAT_TEMPLATE)
        return config.replace(hf_config=HFConfig(values), text_model=config, **kwargs)


def _audio_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    values = {**_AUDIO, **stated_keys(stated)}
    try:
        check_kinds(values, _AUDIO)
    except ConfigError as error:
        message = str(error).replace("config.json:", "config.json: audio_config:")
        raise ConfigError(message) from None
    if values.setdefault("activation_function", "gelu") != "gelu":
        raise ConfigError(
            "config.json: audio_config: activation_function "
            f"{values['activation_function']!r} is not supported, only 'gelu'"
        )
    width, heads = values["d_model"], values["encoder_attention_heads"]
    if width % heads:
        raise ConfigError(
            f"config.json: audio_config: d_model ({width}) is not divisible by "
            f"encoder_attention_heads ({heads})"
        )
    return values


def _extractor(folder: Path | None, audio: Mapping[str, Any]) -> dict[str, Any]:
    """Rate, hop and window of the features, and ``chunk_length``, the longest sound's seconds."""
    where = "preprocessor_config.json"
    given = stated_keys(_read(folder, where) or {})
    if not given:  # As transformers 5 saves it.
        where = "processor_config.json"
        given = stated_keys(object_of(_read(folder, where) or {}, "feature_extractor"))
    values = {key: given.get(key, default) for key, default in {**_EXTRACTOR, **_LENGTH}.items()}
    try:
        check_kinds(values, {**_EXTRACTOR, **_LENGTH})
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json", where, 1)) from None
    for key, wanted in (*_EXTRACTOR_ONLY.items(), ("feature_size", audio["num_mel_bins"])):
        if given.get(key, wanted) != wanted:
            raise ConfigError(f"{where}: {key} {given[key]!r} is not supported, only {wanted!r}")
    # The encoder has a position for every second frame.
    frames = 2 * audio["max_source_positions"]
    if "chunk_length" not in given:
        values["chunk_length"] = frames * values["hop_length"] // values["sampling_rate"]
    samples = values["chunk_length"] * values["sampling_rate"]
    if samples != frames * values["hop_length"]:
        raise ConfigError(
            f"{where}: {values['chunk_length']} s of {values['sampling_rate']} samples, of which "
            f"{values['hop_length']} make a frame, are not the {frames} frames of the encoder"
        )
    return values


def _read(folder: Path | None, name: str) -> dict[str, Any] | None:
    try:
        return None if folder is None else read_object(folder / name, CorruptCheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        return None
