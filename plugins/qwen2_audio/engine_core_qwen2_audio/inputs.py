"""Sounds of a prompt. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import RequestError, shown
from engine_core.inputs import (
    MediaItem,
    MediaLimit,
    ProcessedPrompt,
    PromptState,
    check_media_kinds,
    expand_placeholders,
    find_placeholders,
    media_digest,
    once_each,
    packed_token_ids,
)

# numpy and what needs it are imported where they are used: every command imports this module.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine_core.configs import ModelConfig

# What transformers' processor calls the features and which of their frames are of the sound.
_FEATURES = ("input_features", "feature_attention_mask")


class Qwen2AudioProcessor:
    """Puts sounds in the place of their tokens."""

    media_kinds: ClassVar[tuple[str, ...]] = ("audio",)
    prompt_state: ClassVar[PromptState] = PromptState()
    reuses_items: ClassVar[bool] = True

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this family."""
        return model_config.architecture == "Qwen2AudioForConditionalGeneration"

    def __init__(self, model_config: ModelConfig) -> None:
        from engine_core_qwen2_audio.sounds import MelExtractor

        config = model_config.hf_config
        self._token: int = config.audio_token_index
        self._bins: int = config.audio_config["num_mel_bins"]
        self._activations = _activations(config.audio_config)
        self._extractor = MelExtractor.from_config(config.audio_config, config.extractor)

    def media_limits(self, options: Mapping[str, Any]) -> dict[str, MediaLimit]:
        """The longest sound, whatever the options, and what the encoder takes for an embedding."""
        seconds = self._extractor.most / self._extractor.rate
        modules = ("audio_tower", "multi_modal_projector")
        return {
            "audio": MediaLimit(
                self._extractor.frames // 4, f"{seconds:g} s", self._activations, modules
            )
        }

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """A prompt of text.

        Raises:
            RequestError: it has a placeholder of a sound.
        """
        return self.process_media(token_ids, {}, {})

    def process_media(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> ProcessedPrompt:
        """The prompt with its sounds, and as many placeholders as they have embeddings.

        Args:
            token_ids: has for each sound one placeholder, or as many as the sound has embeddings.
            media: by "audio", in the order of their placeholders: samples and their rate,
                ``(array [n], rate)``, or the features that transformers' processor makes of one
                sound: ``input_features`` and ``feature_attention_mask``; or an item that was made
                before.
            options: ``truncation``, whether longer sounds than the model takes are cut, as
                transformers' processor does without a word; else they are refused.

        Raises:
            RequestError: placeholders and sounds do not agree, or an item or option is none.
        """
        import numpy as np

        check_media_kinds(media, self.media_kinds)
        for key, value in options.items():
            if key == "truncation" and isinstance(value, bool):
                continue
            known = f"{shown(key)} is not one of truncation"
            wrong = f"truncation must be true or false, got {shown(value)}"
            raise RequestError(
                f"mm_processor_kwargs: {wrong if key == 'truncation' else known}",
                param="mm_processor_kwargs",
            )
        cut = options.get("truncation", False)
        ids: NDArray[np.int64] = np.frombuffer(packed_token_ids(token_ids), np.int64)
        sounds = once_each(media.get("audio", ()), lambda i, item: self._sound(item, i, cut=cut))
        counts = [sound.num_embeddings for sound in sounds]
        places = find_placeholders(ids, self._token, "audio", counts, noun="sound")
        ids, found = expand_placeholders(
            ids, [(*place, sound) for place, sound in zip(places, sounds, strict=True)]
        )
        return ProcessedPrompt(token_ids=array("q", ids.tobytes()), media=tuple(found))

    def _sound(self, item: Any, index: int, *, cut: bool) -> MediaItem:
        """A sound as the caller gave it, as it would be in a prompt of its own."""
        from engine_core_qwen2_audio.sounds import num_embeddings

        if isinstance(item, MediaItem):
            return item
        try:
            if isinstance(item, Mapping):
                features = self._given_features(item)
                digest = media_digest("features", features)
            else:
                samples = self._extractor.samples(item, cut=cut)
                features = self._extractor.features(samples)
                digest = media_digest("samples", samples)
        except RequestError as error:
            param = f"multi_modal_data.audio.{index}"
            raise RequestError(f"audio {index}: {error}", param=param) from None
        return MediaItem("audio", digest, (0, num_embeddings(features)), {"features": features})

    def _given_features(self, given: Mapping[str, Any]) -> NDArray[np.float32]:
        import numpy as np

        if set(given) != set(_FEATURES):
            raise RequestError(
                f"features of a sound are {' and '.join(_FEATURES)}, got {', '.join(given)}"
            )
        try:
            mels = np.asarray(given[_FEATURES[0]], dtype=np.float32)
            mask = np.asarray(given[_FEATURES[1]]).astype(bool)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{' and '.join(_FEATURES)} must be arrays: {error}") from None
        # Of one sound the batch's dimension is 1.
        mels, mask = (each[0] if each.shape[:1] == (1,) else each for each in (mels, mask))
        wanted = (self._bins, self._extractor.frames)
        if mels.shape != wanted or mask.shape != wanted[1:]:
            raise RequestError(
                f"{_FEATURES[0]} must be {list(wanted)} and {_FEATURES[1]} [{wanted[1]}], as the "
                f"model's processor pads them; got {list(mels.shape)} and {list(mask.shape)}"
            )
        frames = int(np.count_nonzero(mask))
        if not mask[:frames].all():
            raise RequestError(f"{_FEATURES[1]} must be ones, and zeros behind them")
        if not np.isfinite(mels).all():
            raise RequestError(f"{_FEATURES[0]} has values that are not finite")
        return self._extractor.trimmed(mels, frames)


def _activations(audio: Mapping[str, Any]) -> int:
    """Numbers that the encoder holds at once for an embedding, at most; see ``model.py``.

    The shortest sound has 7 frames and 3 positions for its one embedding. Of each frame there are
    features, in float32 and in the model's type, the neighbours that a convolution sees, and its
    result before and after the activation; of each position then either the same of the second
    convolution, or in a layer the larger of attention (residual, normed, queries, keys, values and
    the output, twice) and the feed-forward part.
    """
    bins, width, inner = audio["num_mel_bins"], audio["d_model"], audio["encoder_ffn_dim"]
    begin = 7 * (8 * bins + 3 * width) + 3 * 6 * width
    return int(max(begin, 3 * max(9 * width, 4 * width + 2 * inner)))
