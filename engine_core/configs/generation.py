"""Sampling parameters recommended by a checkpoint's ``generation_config.json``.

Reference: ``GenerationConfig`` and ``generation/logits_process.py`` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.configs.builder import token_ids
from engine_core.configs.sampling import SamplingParams
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs.model import ModelConfig

GENERATION_CONFIG = "generation_config.json"
"""The file's name."""
_SAME_MEANING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Keys that change which tokens come and have no exact counterpart, with the values that turn them
# off besides null.
_UNREAD: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": ([],),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": (),
}
# The same of keys that mean nothing where the most probable token is taken.
_UNREAD_IF_SAMPLED: Mapping[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A checkpoint's recommended sampling; see :func:`read_recommendation`.

    Attributes:
        values: fields of :class:`SamplingParams`.
        min_tokens: its least number of tokens, which gives way to other fields.
    """

    values: Mapping[str, Any]
    min_tokens: int

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters of the fields ``given``, over the checkpoint's, over our defaults.

        Where ``min_tokens`` is not given, the checkpoint's is cut to ``max_tokens``, as
        transformers does, and is none for a guided text, which ends where it is complete.

        Raises:
            ConfigError: a field given is unknown or out of range, or fields contradict each other.
        """
        values = {**self.values, **given}
        if self.min_tokens and "min_tokens" not in given and values.get("guided") is None:
            longest = values.get("max_tokens", SamplingParams().max_tokens)
            # Another type is refused below.
            cut = isinstance(longest, int) and 0 < longest < self.min_tokens
            values["min_tokens"] = longest if cut else self.min_tokens
        return SamplingParams(**values)


def read_recommendation(
    generation_config: Mapping[str, Any], model_config: ModelConfig
) -> Recommendation:
    """Read the sampling that ``generation_config.json`` recommends.

    ``suppress_tokens`` and ``bad_words_ids`` become bad words; those with tokens outside the
    vocabulary are left out, as the model cannot generate them. For what is not read see
    :func:`unread_keys`.

    Raises:
        ConfigError: a value is senseless; names the file, the key and the value.
    """
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(
            f"{GENERATION_CONFIG}: do_sample: true or false is expected, got {do_sample!r}"
        )
    values = {
        ours: generation_config[name]
        for name, ours in _SAME_MEANING.items()
        if generation_config.get(name) is not None
    }
    if do_sample is False:
        values["temperature"] = 0.0
    suppressed = _suppressed(generation_config, model_config)
    if suppressed:
        values["bad_words"] = suppressed
    min_tokens = values.pop("min_tokens", 0)
    try:
        SamplingParams(**values)
        min_tokens = SamplingParams(min_tokens=min_tokens, max_tokens=None).min_tokens
    except ConfigError as error:
        theirs = {ours: f"{GENERATION_CONFIG}: {name}" for name, ours in _SAME_MEANING.items()}
        message = error.named(lambda ours: theirs.get(ours, f"SamplingParams.{ours}"))
        raise ConfigError(message) from None
    return Recommendation(values, min_tokens)


def unread_keys(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that would change which tokens come and are not read, with their values."""
    given = dict(_UNREAD)
    if generation_config.get("do_sample") is not False:
        given |= _UNREAD_IF_SAMPLED
    unread = {
        name: generation_config[name]
        for name, off in given.items()
        if generation_config.get(name) is not None and generation_config[name] not in off
    }
    if generation_config.get("min_new_tokens") is not None:
        unread.pop("min_length", None)  # transformers does not read it then either
    return unread


def has_long_bad_words(generation_config: Mapping[str, Any]) -> bool:
    """Whether some of ``bad_words_ids`` are of several tokens.

    transformers bans one that begins in the prompt, too; as a bad word it must begin in the output.
    """
    return any(len(word) > 1 for word in _bad_words(generation_config))


def _suppressed(
    generation_config: Mapping[str, Any], model_config: ModelConfig
) -> tuple[tuple[int, ...], ...]:
    suppress = generation_config.get("suppress_tokens")
    if suppress is not None and not isinstance(suppress, list):
        raise ConfigError(
            f"{GENERATION_CONFIG}: suppress_tokens: a list is expected, got {suppress!r}"
        )
    words: list[tuple[int, ...]] = [(token,) for token in _tokens(suppress, "suppress_tokens")]
    # transformers lets no bad word forbid the end.
    ends = {
        (token,)
        for token in (
            *model_config.eos_token_ids,
            *_tokens(generation_config.get("eos_token_id"), "eos_token_id"),
        )
    }
    banned = [*words, *(word for word in _bad_words(generation_config) if word not in ends)]
    return tuple(
        word
        for word in dict.fromkeys(banned)
        if all(0 <= token < model_config.vocab_size for token in word)
    )


def _bad_words(generation_config: Mapping[str, Any]) -> list[tuple[int, ...]]:
    words = generation_config.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ConfigError(
            f"{GENERATION_CONFIG}: bad_words_ids: a list of lists of token ids is expected, got "
            f"{words!r}"
        )
    return [_tokens(word, "bad_words_ids") for word in words]


def _tokens(value: Any, key: str) -> tuple[int, ...]:
    return token_ids(value, key, GENERATION_CONFIG)
