"""Features, rates and placeholders; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocated import Allocated
from numpy.typing import NDArray

from engine_core.configs import HFConfig
from engine_core.errors import ConfigError, RequestError
from engine_core.inputs import MediaProcessor
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, dummy_weights
from engine_core.step_context import BuildContext
from engine_core.text.chat_template import render_chat_template
from engine_core_qwen2_audio.config import Qwen2AudioConfigBuilder
from engine_core_qwen2_audio.conformance import CASES
from engine_core_qwen2_audio.inputs import Qwen2AudioProcessor
from engine_core_qwen2_audio.sounds import resample

AUDIO = 0
CONFIG: dict[str, Any] = {**(CASES[0].config or {})}
PUBLISHED = {"max_source_positions": 1500, "num_mel_bins": 128}


def processor(
    folder: Path | None = None, audio: dict[str, Any] | None = None, **changes: Any
) -> Qwen2AudioProcessor:
    config = {**CONFIG, **changes}
    if audio is not None:
        config["audio_config"] = {**CONFIG["audio_config"], **audio}
    return Qwen2AudioProcessor(Qwen2AudioConfigBuilder.build(HFConfig(config), folder))


def extractor(**settings: Any) -> Any:
    """transformers'."""
    from transformers import WhisperFeatureExtractor

    made: Any = WhisperFeatureExtractor
    return made(**settings)


def noise(samples: int) -> NDArray[np.float32]:
    return np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)


def features(item: Any, options: Any = None, **audio: Any) -> NDArray[np.float32]:
    prompt = processor(audio=audio).process_media([1, AUDIO, 2], {"audio": [item]}, options or {})
    (one,) = prompt.media
    made: NDArray[np.float32] = one.features["features"]
    assert one.kind == "audio"
    assert one.span == (1, 1 + made.shape[1] // 4)
    assert list(prompt.token_ids) == [1, *[AUDIO] * one.num_embeddings, 2]
    return made


@pytest.mark.parametrize("samples", [321, 640, 16000, 77777, 30 * 16000 - 81, 30 * 16000])
def test_features_are_those_of_transformers(samples: int) -> None:
    expected = extractor(feature_size=128)(
        noise(samples), sampling_rate=16000, return_attention_mask=True
    )
    frames = int(expected["attention_mask"].sum())
    positions = (frames - 1) // 2 + 1
    made = features((noise(samples), 16000), **PUBLISHED)
    assert made.dtype == np.float32
    # The frames of the positions, and the one after them that the last convolution sees.
    assert made.shape == (128, min(2 * positions + 1, 3000))
    assert made.shape[1] // 4 == (positions - 2) // 2 + 1
    np.testing.assert_allclose(made, expected["input_features"][0][:, : made.shape[1]], atol=1e-4)


def test_a_longer_sound_is_cut_as_by_transformers_where_that_is_asked_for() -> None:
    sound = noise(31 * 16000)
    (expected,) = extractor(feature_size=128)(sound, sampling_rate=16000)["input_features"]
    made = features((sound, 16000), {"truncation": True}, **PUBLISHED)
    np.testing.assert_allclose(made, expected, atol=1e-4)
    # What lies behind the end has no part in it at another rate either, but for its neighbours.
    at_8000 = [features((part, 8000), {"truncation": True}) for part in (sound[:24000], sound)]
    np.testing.assert_array_equal(*at_8000)
    for options, said in (
        ({}, "it is 31.00 s long, .*mm_processor_kwargs: truncation"),
        ({"truncation": False}, "it is 31.00 s long"),
        ({"truncation": 1}, "truncation must be true or false, got 1"),
    ):
        with pytest.raises(RequestError, match=said):
            features((sound, 16000), options, **PUBLISHED)


def test_features_that_are_made_already_are_taken() -> None:
    theirs = extractor(feature_size=16, chunk_length=1)
    made = theirs(noise(5000), sampling_rate=16000, return_attention_mask=True)
    given = {
        "input_features": made["input_features"],
        "feature_attention_mask": made["attention_mask"],
    }
    np.testing.assert_allclose(features(given), features((noise(5000), 16000)), atol=1e-4)


def test_integers_are_samples_too() -> None:
    integers = np.round(noise(4000) * 2**15).astype(np.int16)
    floats = integers / np.float32(2**15)
    np.testing.assert_array_equal(features((integers, 16000)), features((floats, 16000)))


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 44100, 48000, 96000, 16001])
def test_other_rates_are_resampled(rate: int) -> None:
    """Tones that both rates have stay as they are, and those above what the lower has go."""
    below = 0.45 * min(rate, 16000)
    tones = [(0.5, 440.0, 0.3), (0.3, 2718.0, 1.1), (0.2, below, 2.0)]

    def wave(at: int, extra: float = 0.0) -> NDArray[np.float64]:
        time = np.arange(at // 4) / at
        out = sum(a * np.sin(2 * np.pi * f * time + p) for a, f, p in tones)
        return np.asarray(out + extra * np.sin(2 * np.pi * 8600 * time))

    made = resample(wave(rate, 0.5 if rate > 18000 else 0.0), rate, 16000)
    assert len(made) == -(-len(wave(rate)) * 16000 // rate)
    # At the ends the tones begin and end, which a filter hears.
    inside = slice(1000, 3000)
    np.testing.assert_allclose(made[inside], wave(16000)[inside], atol=2e-4)


def test_digests_tell_what_differs() -> None:
    def digest(item: Any) -> bytes:
        (one,) = processor().process_media([AUDIO], {"audio": [item]}, {}).media
        return one.digest

    sound = noise(8000)
    assert digest((sound, 16000)) == digest((sound.astype(np.float64), 16000.0))
    others = [(sound, 16000), (sound, 8000), (-sound, 16000), (sound[:-1], 16000)]
    assert len({digest(item) for item in others}) == len(others)


def test_an_item_is_taken_again() -> None:
    first = processor().process_media([AUDIO], {"audio": [(noise(8000), 16000)]}, {}).media
    again = processor().process_media([7, AUDIO, 5, AUDIO], {"audio": [SOUND, *first]}, {})
    assert list(again.token_ids) == [7, 0, 0, 5, *[AUDIO] * 12]
    assert again.media[1].span == (4, 16)
    assert again.media[1].digest == first[0].digest
    assert again.media[1].features is first[0].features
    one, two = processor().process_media([AUDIO, 5, AUDIO], {"audio": [SOUND, SOUND]}, {}).media
    assert one.features is two.features


def test_text_alone() -> None:
    prompt = processor().process([5, 6, 7])
    assert (list(prompt.token_ids), prompt.media) == ([5, 6, 7], ())


def test_a_chat_has_the_form_of_transformers() -> None:
    from transformers import Qwen2AudioProcessor

    theirs: Any = Qwen2AudioProcessor.default_chat_template
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "Glass."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "audio"}]},
    ]
    ours = Qwen2AudioConfigBuilder.build(HFConfig(CONFIG)).default_chat_template
    assert ours is not None
    system = {"role": "system", "content": "Be short."}
    for given in (messages, [system, *messages]):
        prompts = [
            render_chat_template(each, given, add_generation_prompt=True, tools=None, variables={})
            for each in (ours, theirs.fget(None))
        ]
        assert prompts[0] == prompts[1]
        assert "Audio 2: <|audio_bos|><|AUDIO|><|audio_eos|>" in prompts[0]


def test_it_is_a_media_processor() -> None:
    assert isinstance(processor(), MediaProcessor)


SOUND = (noise(1600), 16000)  # two embeddings
MASK = np.repeat([1, 0], [10, 90])


@pytest.mark.parametrize(
    ("ids", "audio", "message"),
    [
        ([AUDIO], [], "in 1 places, 1 in all, for a number of sounds of 0;"),
        ([1], [SOUND], "in 0 places, .* of 1 with 2 embeddings"),
        ([AUDIO, 1, AUDIO], [SOUND], "in 2 places, 2 in all, .* sounds of 1 with 2"),
        ([AUDIO] * 3, [SOUND, SOUND], "in 1 places, 3 in all, .* of 2 with 2, 2"),
        ([AUDIO], [noise(1600)], r"audio 0: a sound is an array and its rate, .* got ndarray"),
        ([AUDIO], [(noise(1600), "16k")], "whole number|samples a second from 1000 .* got '16k'"),
        ([AUDIO], [(noise(1600), 16000.5)], "a whole number, got 16000.5"),
        ([AUDIO], [(noise(1600), 100)], "from 1000 to 384000, got 100"),
        ([AUDIO], [(noise(1600).reshape(2, 800), 16000)], r"one channel, \[n\]; got float32 \[2"),
        ([AUDIO], [(np.zeros(0), 16000)], r"got float64 \[0\]"),
        ([AUDIO], [("cat.wav", 16000)], "samples of a sound are floats"),
        ([AUDIO], [(noise(1600).astype(np.uint8), 16000)], r"got uint8"),
        ([AUDIO], [(np.full(1600, np.nan), 16000)], "not all finite"),
        ([AUDIO], [(np.full(1600, np.inf, np.float16), 16000)], "not all finite"),
        ([AUDIO], [(np.full(1600, -1e300), 16000)], "far beyond those from -1 to 1"),
        ([AUDIO], [(noise(16001), 16000)], "1.00 s long, and a sound may be 1 s at most"),
        ([AUDIO], [(noise(320), 16000)], "too short: a sound must be longer than 0.02 s"),
        ([AUDIO], [{"input_features": 1}], "are input_features and feature_attention_mask, got"),
        (
            [AUDIO],
            [{"input_features": np.zeros((16, 99)), "feature_attention_mask": MASK}],
            r"must be \[16, 100\] .* got \[16, 99\] and \[100\]",
        ),
        (
            [AUDIO],
            [{"input_features": np.zeros((16, 100)), "feature_attention_mask": 1 - MASK}],
            "ones, and zeros behind them",
        ),
        (
            [AUDIO],
            [{"input_features": np.full((16, 100), np.inf), "feature_attention_mask": MASK}],
            "not finite",
        ),
    ],
)
def test_what_is_refused(ids: list[int], audio: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor().process_media(ids, {"audio": audio}, {})


def test_other_kinds_and_options_are_refused() -> None:
    with pytest.raises(RequestError, match="of the kind audio, not image"):
        processor().process_media([1], {"image": [0]}, {})
    with pytest.raises(RequestError, match="'fps' is not one of truncation"):
        processor().process_media([AUDIO], {"audio": [SOUND]}, {"fps": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_token_index": 160}, "audio_token_index must be a token of the 160, got 160"),
        ({"text_config": 1}, "text_config must be an object"),
        ({"text_config": {"rope_scaling": {"type": "dynamic"}}}, "'dynamic' is not one of default"),
        ({"audio": {"encoder_layers": 0}}, "audio_config: encoder_layers must be a positive"),
        ({"audio": {"activation_function": "relu"}}, "'relu' is not supported, only 'gelu'"),
        ({"audio": {"d_model": 33}}, "not divisible by encoder_attention_heads"),
        ({"audio": {"max_source_positions": 51}}, "are not the 102 frames"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor(**changes)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"feature_size": 80}, "feature_size 80 is not supported, only 16"),
        ({"dither": 0.1}, "dither 0.1 is not supported"),
        ({"chunk_length": 30}, "30 s of 16000 samples, .* are not the 100 frames"),
        ({"hop_length": "x"}, "hop_length must be a positive integer"),
    ],
)
def test_extractors_that_are_refused(
    nested: bool, stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    name = "processor_config.json" if nested else "preprocessor_config.json"
    content = {"feature_extractor": stated} if nested else stated
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        processor(tmp_path)


def test_a_checkpoint_says_how_features_are_made(tmp_path: Path) -> None:
    """Of transformers' own writing: here at twice the rate, with twice the hop and window."""
    settings = {"feature_size": 16, "sampling_rate": 32000, "hop_length": 320, "n_fft": 800}
    theirs = extractor(**settings, chunk_length=1)
    theirs.save_pretrained(tmp_path)
    made = theirs(noise(9000), sampling_rate=32000)["input_features"][0]
    prompt = processor(tmp_path).process_media([AUDIO], {"audio": [(noise(9000), 32000)]}, {})
    ours = prompt.media[0].features["features"]
    np.testing.assert_allclose(ours, made[:, : ours.shape[1]], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [481, 16000])  # the shortest with 7 frames, and the longest
def test_the_encoder_takes_no_more_memory_than_is_said(samples: int, dtype: torch.dtype) -> None:
    """With the proportions of the published one."""
    audio = {"d_model": 320, "encoder_ffn_dim": 1280, "num_mel_bins": 32, "encoder_layers": 2}
    stated = {**CONFIG, "audio_config": {**CONFIG["audio_config"], **audio}}
    config = Qwen2AudioConfigBuilder.build(HFConfig(stated))
    registry = build_registry()
    context = BuildContext(dtype=dtype, model_class=registry.model_class)
    model: Any = build_on_meta(registry.model_class(config.architecture), config, context)
    dummy_weights(model, torch.device("cpu"), 0)
    maker = Qwen2AudioProcessor(config)
    made = maker.process_media([AUDIO] * 4, {"audio": [(noise(samples), 16000)] * 4}, {}).media
    with torch.inference_mode(), Allocated() as allocated:
        items = [
            {name: torch.tensor(value) for name, value in item.features.items()} for item in made
        ]
        model.embed_media("audio", items)
    measured = allocated.peak / sum(item.num_embeddings for item in made) / dtype.itemsize
    said = maker.media_limits({})["audio"].activations
    assert measured <= said <= 3 * measured


def test_the_longest_sound_is_as_long_as_is_said() -> None:
    limit = processor().media_limits({})["audio"]
    (item,) = processor().process_media([AUDIO], {"audio": [(noise(16000), 16000)]}, {}).media
    assert item.num_embeddings == limit.num_embeddings == 25
    assert limit.largest == "1 s"
