"""A conversation with images, by the form that the package brings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from golden_fixtures import GOLDEN
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine_core import LLM, SamplingParams

BEGIN, END, PAD = 300, 301, 302


def checkpoint(folder: Path) -> Path:
    """The golden one with a tokenizer of a token a character, and the marks."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwenvl1-tiny" / name, folder)
    marks = {"<img>": BEGIN, "</img>": END, "<imgpad>": PAD}
    names = {number: name for name, number in marks.items()}
    vocabulary = {names.get(n, chr(n)): n for n in range(320)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in marks])
    tokenizer.add_tokens([AddedToken(chr(n), normalized=False) for n in range(1, 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_pictures_stand_where_they_are_in_a_conversation(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    asked: list[dict[str, Any]] = [
        {"type": "image", "image": Image.fromarray(pixels)},
        {"type": "text", "text": "Which of both? "},
        {"type": "image", "image": 255 - pixels},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(checkpoint(tmp_path)), max_model_len=700) as llm:
        (output,) = llm.chat([{"role": "user", "content": asked}], params)
        (other,) = llm.chat([{"role": "user", "content": asked[::-1]}], params)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            "Picture 1: <img></img>\nWhich of both? Picture 2: <img></img>\n<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        media = {"image": [pixels, 255 - pixels]}
        (same,) = llm.generate({"prompt": text, "multi_modal_data": media}, params)
    assert output.prompt_token_ids == same.prompt_token_ids
    assert output.prompt_token_ids.count(PAD) == 2 * 256
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert output.outputs[0].token_ids != other.outputs[0].token_ids
