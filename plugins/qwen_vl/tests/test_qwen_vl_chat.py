"""A conversation with images, by the form that the package brings."""

from __future__ import annotations

import base64
import json
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


def test_a_folder_as_it_is_published_runs(tmp_path: Path) -> None:
    """Its tokenizer is a file of ranks, here of bytes alone, and code that is not there."""
    ranks = (b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(ranks))
    maps = {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}
    stated = {"tokenizer_class": "QWenTokenizer", "auto_map": maps}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    # After the bytes come three tokens of the text model, 205 extra ones, and six marks.
    begin = 256 + 3 + 205 + 6
    config = json.loads((GOLDEN / "qwenvl1-tiny" / "config.json").read_text())
    config["vocab_size"] = 480
    config["visual"]["image_start_id"] = begin
    (tmp_path / "config.json").write_text(json.dumps(config))
    pixels = np.zeros((60, 90, 3), np.uint8)
    asked = [{"type": "image", "image": pixels}, {"type": "text", "text": "<ref>é</ref>?"}]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LLM(str(tmp_path), load_format="dummy", max_model_len=512) as llm:
        (output,) = llm.chat([{"role": "user", "content": asked}], params)
        decoded = llm.tokenizer.decode(output.prompt_token_ids)
    start, end = 257, 258

    def line(text: str) -> list[int]:
        return [start, *text.encode(), end, 10]

    assert output.prompt_token_ids == [
        *line("system\nYou are a helpful assistant."),
        *[start, *b"user\nPicture 1: ", begin, *[begin + 2] * 256, begin + 1, 10],
        *[begin - 6, *"é".encode(), begin - 5, *b"?", end, 10],
        *[start, *b"assistant\n"],
    ]
    assert "Picture 1: \n<ref>é</ref>?\n" in decoded
