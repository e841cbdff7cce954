"""Sounds through the whole engine, with random weights, against transformers' class."""

from __future__ import annotations

import re
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine_core import LLM, RequestOutput, SamplingParams
from engine_core.testing.reference import prepare
from engine_core_qwen2_audio.conformance import CASES

AUDIO, VOCAB = 0, 160
SETTINGS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    # Chunks end inside of sounds.
    "chunks-of-5": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "chunks-of-1": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "room-for-one-sound": {"encoder_cache_tokens": 25},
}


@dataclass(frozen=True)
class Prompt:
    """A prompt, its sounds as transformers' extractor makes them, and what its model answers."""

    ids: list[int]
    sounds: list[NDArray[np.float32]]
    features: dict[str, Any]
    logits: torch.Tensor  # [prompt length + 15, vocab]
    new_tokens: list[int]

    @property
    def given(self) -> Any:
        media = {"audio": [(sound, 16000) for sound in self.sounds]}
        return {"prompt_token_ids": self.ids, "multi_modal_data": media}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = CASES
    folder = prepare(case, tmp_path_factory.mktemp("qwen2-audio")).folder
    # So that no answer has the token of a sound.
    tensors = load_file(folder / "model.safetensors")
    (head,) = (tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight"))
    head[AUDIO] = 0.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def sound(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    draw = np.random.default_rng(seed)
    time = np.arange(round(16000 * seconds)) / 16000
    tones = sum(np.sin(2 * np.pi * f * time + f) for f in draw.uniform(80, 6000, 5))
    noise = draw.normal(0, 0.02, len(time))
    return np.asarray(tones * np.hanning(len(time)) / 8 + noise, np.float32)


def extracted(*sounds: NDArray[np.float32]) -> dict[str, Any]:
    """Features of sounds as the published processor's extractor makes them."""
    from transformers import WhisperFeatureExtractor

    theirs: Any = WhisperFeatureExtractor
    made = theirs(feature_size=16, chunk_length=1)(
        list(sounds), sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    kept = {"input_features": "input_features", "attention_mask": "feature_attention_mask"}
    return {ours: np.asarray(made[theirs]) for theirs, ours in kept.items()}


def embeddings(seconds: float) -> int:
    """As the published processor counts them."""
    frames = -(-round(16000 * seconds) // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    from transformers import Qwen2AudioForConditionalGeneration

    theirs: Any = Qwen2AudioForConditionalGeneration
    model = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    text = [9, 71, 14, 5, 100, 33, 28, 90, 4, 17]
    asked: list[tuple[str, list[float], list[int]]] = [
        ("text", [], text),
        ("text after a sound", [0.63], [AUDIO, *text]),
        ("a sound in the middle", [0.2], [*text[1:5], AUDIO, 8, 41]),
        ("several", [1.0, 0.05, 0.317], [3, AUDIO, 7, 6, AUDIO, AUDIO, 5, 2]),
        ("an odd number of frames", [0.21], [AUDIO, 44, 45]),
    ]
    return [made(model, *each) for each in asked]


@torch.inference_mode()
def made(model: Any, name: str, seconds: list[float], ids: list[int]) -> Prompt:
    sounds = [sound(length, index) for index, length in enumerate(seconds)]
    counts = iter([embeddings(length) for length in seconds])
    ids = [token for one in ids for token in [one] * (next(counts) if one == AUDIO else 1)]
    features = extracted(*sounds) if sounds else {}
    tensors = {name: torch.as_tensor(value) for name, value in features.items()}
    inputs = {"input_ids": torch.tensor([ids]), **tensors}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=16, min_new_tokens=16, eos_token_id=None
    )
    new = out[0, len(ids) :].tolist()
    assert AUDIO not in new, name
    whole = torch.tensor([[*ids, *new[:-1]]])
    inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    return Prompt(ids, sounds, features, model(**inputs).logits[0], new)


def llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **settings)


def params(*, with_prompt: bool = True) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=16,
        ignore_eos=True,
        logprobs=VOCAB,
        prompt_logprobs=VOCAB if with_prompt else None,
    )


def check(output: RequestOutput, prompt: Prompt) -> None:
    """The same tokens, and logits within 1e-4."""
    assert output.prompt_token_ids == prompt.ids
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert completion.token_ids == prompt.new_tokens
    rows = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
    ours = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows if row])
    expected = prompt.logits[-len(rows) :].log_softmax(-1)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_and_logits_are_those_of_transformers(
    folder: Path, prompts: list[Prompt], settings: dict[str, Any]
) -> None:
    with llm(folder, **settings) as engine:
        outputs = engine.generate([prompt.given for prompt in prompts], params())
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, prompt)


def test_prompts_by_themselves_are_the_same_cold_and_from_the_prefix_cache(
    folder: Path, prompts: list[Prompt]
) -> None:
    with llm(folder, block_size=4) as engine:
        for cached in (False, True):
            for prompt in prompts:
                (output,) = engine.generate(prompt.given, params(with_prompt=False))
                check(output, prompt)
                expected = (len(prompt.ids) - 1) // 4 * 4 if cached else 0
                assert output.metrics.num_cached_tokens == expected


def test_another_sound_in_its_place_is_not_taken_from_the_prefix_cache(
    folder: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[1]
    other = {"audio": [(sound(0.63, seed=9), 16000)]}
    with llm(folder, block_size=4) as engine:
        given: Any = {**prompt.given, "multi_modal_data": other}
        (first,) = engine.generate(given, params())
        (output,) = engine.generate(prompt.given, params(with_prompt=False))
    assert first.prompt_token_ids == prompt.ids
    assert first.outputs[0].token_ids != prompt.new_tokens
    check(output, prompt)


def test_one_placeholder_stands_for_a_whole_sound_and_features_for_samples(
    folder: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[2]
    short = [token for token in prompt.ids if token != AUDIO]
    short.insert(4, AUDIO)
    with llm(folder) as engine:
        for audio in ((prompt.sounds[0], 16000), prompt.features):
            given: Any = {"prompt_token_ids": short, "multi_modal_data": {"audio": audio}}
            (output,) = engine.generate(given, params())
            check(output, prompt)


def test_a_file_is_heard_as_its_samples_are(folder: Path, tmp_path: Path) -> None:
    """Of two channels, of which the mean is heard, and of another rate than the model's."""
    left, right = (np.round(sound(0.4, seed) * 2**14).astype("<i2") for seed in (1, 2))
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(22050)
        file.writeframes(np.stack([left, right], axis=1).tobytes())
    mean = (left.astype(np.float32) + right) / 2 / 2**15
    with llm(folder) as engine:
        outputs = []
        for audio in (str(tmp_path / "a.wav"), (mean, 22050)):
            given: Any = {"prompt_token_ids": [5, AUDIO, 9], "multi_modal_data": {"audio": audio}}
            outputs += engine.generate(given, params())
    ours, theirs = (output.outputs[0] for output in outputs)
    assert len(outputs[0].prompt_token_ids) == 2 + embeddings(6400 / 22050)
    assert ours.token_ids == theirs.token_ids
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("text", ["language_model.model.", "language_model.model.model."])
def test_layouts_of_checkpoints_with_the_text_model_outside(
    folder: Path, prompts: list[Prompt], tmp_path: Path, text: str
) -> None:
    """The published one, and that of transformers 5.10 to 5.22."""
    check_layout(folder, prompts[1], tmp_path, text, "language_model.lm_head.", "")


def test_the_layout_of_checkpoints_with_everything_inside(
    folder: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    """That of transformers' modules, by ``save_original_format=False``."""
    check_layout(folder, prompts[1], tmp_path, "model.language_model.", "lm_head.", "model.")


def check_layout(
    folder: Path, prompt: Prompt, target: Path, text: str, head: str, inside: str
) -> None:
    """A checkpoint whose text model, head and other modules are named so is read."""

    def renamed(name: str) -> str:
        """Whichever layout the installed transformers has written."""
        if "lm_head." in name:
            return head + "weight"
        if "language_model." in name:
            return text + re.sub(r"^(model\.|language_model\.)+", "", name)
        return inside + name.removeprefix("model.")

    tensors = load_file(folder / "model.safetensors")
    save_file({renamed(name): each for name, each in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    with llm(target) as engine:
        (output,) = engine.generate(prompt.given, params())
    check(output, prompt)
