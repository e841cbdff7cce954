"""Pictures, videos and chats as people have them, beside what transformers makes of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine_core.testing.reference import prepare
from engine_core.text.chat_template import render_chat_template
from engine_core_internvl.conformance import CASES
from engine_core_internvl.templates import chat_template

CHAT = GOLDEN / "internvl-chat-qwen2"
CONTEXT, START, END = 3, 4, 5
CLIP_MEAN = [[[0.48145466]], [[0.4578275]], [[0.40821073]]]
CLIP_STD = [[[0.26862954]], [[0.26130258]], [[0.27577711]]]
SIZE = 16


def picture(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), np.uint8)


@pytest.fixture(scope="module", params=["internvl-llama", "internvl-qwen2-6b"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = (case for case in CASES if case.name == request.param)
    folder = prepare(case, tmp_path_factory.mktemp(request.param)).folder
    tokens = {"<IMG_CONTEXT>": CONTEXT, "<img>": START, "</img>": END}
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    return folder


def test_pictures_are_as_in_transformers(folder: Path) -> None:
    """Of its PIL image processor and its model, with random weights; the text model is Llama."""
    from transformers import InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
    )

    pictures = [picture(30, 50), picture(16, 16)]
    size = {"height": SIZE, "width": SIZE}
    made = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True)(
        images=pictures, return_tensors="pt"
    )
    first, second = made["num_patches"].tolist()
    assert (first, second) == (7, 1)
    ids = [9, START, *[CONTEXT] * 4 * first, END, 8, START, *[CONTEXT] * 4, END, 7, 20]
    theirs: Any = InternVLForConditionalGeneration
    model = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), pixel_values=made["pixel_values"]).logits[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=160, prompt_logprobs=160)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16}
    media = {"image": [Image.fromarray(pictures[0]), pictures[1]]}
    short = [9, CONTEXT, 8, START, CONTEXT, END, 7, 20]
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate({"prompt_token_ids": short, "multi_modal_data": media}, params)
    assert output.prompt_token_ids == ids
    assert output.prompt_logprobs is not None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ours = torch.tensor([[row[token].logprob for token in range(160)] for row in rows])
    torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with a tokenizer of a token a character."""
    return with_tokenizer(CHAT, tmp_path_factory.mktemp("internvl") / "m")


def with_tokenizer(golden: Path, folder: Path) -> Path:
    shutil.copytree(golden, folder)
    special = {"<IMG_CONTEXT>": 300, "<img>": 301, "</img>": 302}
    special |= {"<|im_start|>": 303, "<|im_end|>": 304}
    names = {number: name for name, number in special.items()}
    vocabulary = {names.get(n, chr(n) if n < 128 else chr(0x4E00 + n)): n for n in range(320)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    # It knows no pictures; the family's counts before it.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ 1 / 0 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_cache_memory": 2**24, "max_model_len": 512}


def encoded(text: str) -> list[int]:
    """The tokens of text, after the tokenizer above; ``#`` stands for an image of one tile."""
    names = {"<|im_start|>": "\1", "<|im_end|>": "\2"}
    for name, mark in names.items():
        text = text.replace(name, mark)
    special = {"\1": [303], "\2": [304], "#": [301, *[300] * 4, 302]}
    return [n for c in text for n in special.get(c, [ord(c) if ord(c) < 128 else ord("?")])]


def test_a_chat_with_a_picture_has_the_format_of_the_original_code(talking: Path) -> None:
    image = picture(56, 56)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": parts},
    ]
    with LLM(str(talking), **SETTINGS) as llm:
        (chat,) = llm.chat(messages, GREEDY)
        expected = encoded(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\n#\nWhat?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert chat.prompt_token_ids == expected
        media = {"multi_modal_data": {"image": image}}
        (plain,) = llm.generate({"prompt_token_ids": expected, **media}, GREEDY)
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_video_is_its_frames_as_images_with_their_numbers(talking: Path) -> None:
    frames = picture(3, 60, 90)
    with LLM(str(talking), max_num_batched_tokens=16, max_num_seqs=1, **SETTINGS) as llm:
        prompt: Any = {
            "prompt": "ab Frame1: <img></img>\nWhy?",
            "multi_modal_data": {"video": frames},
        }
        (video,) = llm.generate(prompt, GREEDY)
        expected = encoded("ab Frame1: #\nFrame2: #\nFrame3: #\nWhy?")
        assert video.prompt_token_ids == expected
        images: Any = {
            "prompt_token_ids": expected,
            "multi_modal_data": {"image": list(frames)},
            "mm_processor_kwargs": {"dynamic_image_size": False},
        }
        (other,) = llm.generate(images, GREEDY)
        (again,) = llm.generate(prompt, GREEDY)
    assert video.outputs[0].token_ids == other.outputs[0].token_ids
    assert video.outputs[0].token_ids == again.outputs[0].token_ids


# Frames; the tower takes 32 at once.
@pytest.mark.parametrize("clips", [(40, 5), pytest.param((40, 5, 66), marks=pytest.mark.long)])
@pytest.mark.slow
def test_videos_of_many_frames_are_as_in_transformers(
    tmp_path: Path, clips: tuple[int, ...]
) -> None:
    """Which gives all frames to its tower at once; alone, and in parts beside streams."""
    from transformers import InternVLForConditionalGeneration

    folder = with_tokenizer(GOLDEN / "internvl-hf-qwen2", tmp_path / "m")
    theirs: Any = InternVLForConditionalGeneration
    model = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    videos = [picture(count, 56, 56) for count in clips]
    prompts: list[Any] = [
        {"prompt": "a Frame1: <img></img>\nWhy?", "multi_modal_data": {"video": video}}
        for video in videos
    ]
    config = {"kv_cache_memory": 2**25, "max_model_len": 2048, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=320)
    expected = []
    with LLM(str(folder), max_num_batched_tokens=256, **config) as llm:
        for prompt, video in zip(prompts, videos, strict=True):
            (output,) = llm.generate(prompt, params)
            labels = "".join(f"Frame{number}: #\n" for number in range(1, len(video) + 1))
            assert output.prompt_token_ids == encoded(f"a {labels}Why?")
            ids = torch.tensor([output.prompt_token_ids])
            pixels = torch.from_numpy(video).permute(0, 3, 1, 2) / 255
            pixels = (pixels - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
            with torch.inference_mode():
                logits = model(input_ids=ids, pixel_values=pixels).logits[0, -1]
                given = {"input_ids": ids, "pixel_values": pixels, "eos_token_id": None}
                made = model.generate(**given, max_new_tokens=8, do_sample=False)
            assert output.outputs[0].logprobs is not None
            row = output.outputs[0].logprobs[0]
            ours = torch.tensor([row[token].logprob for token in range(320)])
            torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)
            expected.append(made[0, ids.shape[1] :].tolist())

    async def answer(engine: AsyncEngine, prompt: Any, sampling: SamplingParams) -> list[int]:
        async with await engine.add_request(prompt, sampling) as stream:
            return [t async for out in stream for each in out.outputs for t in each.token_ids]

    async def scene() -> None:
        settings = EngineConfig(max_num_batched_tokens=64, mm_processor_cache_gb=0, **config)
        engine = await AsyncEngine.start(str(folder), settings)
        try:

            async def stream() -> None:
                while True:
                    await answer(engine, "Why?", GREEDY.replace(max_tokens=1500))

            engine.start_trace()
            streaming = asyncio.create_task(stream())
            answers = (answer(engine, prompt, GREEDY) for prompt in prompts)
            assert await asyncio.gather(*answers) == expected
            streaming.cancel()
            trace = await engine.take_trace()
            assert trace is not None
            parts = [part for step in trace.steps for part in step.media]
            assert len(parts) > 2 * len(clips)
        finally:
            await engine.close()

    asyncio.run(scene())


def rendered(name: str, messages: list[dict[str, Any]], *, begins: bool = False) -> str:
    template, _ = chat_template(name, None, begins=begins)
    assert template is not None
    return render_chat_template(
        template,
        messages,
        add_generation_prompt=True,
        tools=None,
        variables={"bos_token": "<s>"},
    )


def test_formats_of_other_checkpoints() -> None:
    """As ``conversation.py`` of the original code writes them."""
    said = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    shown = "<img><IMG_CONTEXT></img>\nWhat?"
    assert rendered("internvl_zh", said) == (
        f"<s> <human>: {shown} <bot>: A cat.</s><human>: Sure? <bot>:"
    )
    for name in ("internlm2-chat", "Hermes-2"):
        text = rendered(name, said, begins=name == "internlm2-chat")
        head, rest = text.split("<|im_end|>", 1)
        assert head.startswith("<s><|im_start|>system\n" if name[0] == "i" else "<|im_start|>sys")
        assert "InternVL" in head
        assert rest == (
            f"<|im_start|>user\n{shown}<|im_end|><|im_start|>assistant\nA cat.<|im_end|>"
            "<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\n"
        )
    assert chat_template("another", None, begins=False) == (None, None)
