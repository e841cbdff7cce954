"""Pictures on the command line: ``generate --image`` and ``/image`` in a chat."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forkserver
import numpy as np
import pytest
from PIL import Image
from seeing_model import IMAGE_TOKEN, character, write_seeing_model
from serving import ServerProcess, write_tiny_model

from engine_core import LLM, EngineConfig, SamplingParams

pytestmark = pytest.mark.slow

TEXT = "".join(map(character, (5, 80, 7)))
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
SIZES = ["--max-model-len", "256", "--kv-cache-memory", "16MiB"]


def run(*arguments: object, lines: tuple[str, ...] = ()) -> Any:
    done = forkserver.run(
        [sys.executable, "-m", "engine_core.cli", *map(str, arguments)],
        input="".join(f"{line}\n" for line in lines),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, ``m``; two pictures, and a file that is none."""
    folder = tmp_path_factory.mktemp("cli")
    write_seeing_model(folder / "m")
    for name, seed in (("one.png", 0), ("my two.png", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (60, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "none.png").write_text("not a picture")
    return folder


@pytest.fixture(scope="module")
def offline(folder: Path) -> dict[str, Any]:
    """Answers of ``LLM`` to pictures as arrays, by which pictures there are."""
    params = SamplingParams(temperature=0, max_tokens=8)
    pictures = [np.asarray(Image.open(folder / name)) for name in ("one.png", "my two.png")]
    text = {"type": "text", "text": TEXT}
    config = EngineConfig(max_model_len=256, kv_cache_memory=2**24)
    with LLM(str(folder / "m"), config) as llm:
        chosen = {"one": pictures[:1], "both": pictures}
        asked = [
            [
                {
                    "role": "user",
                    "content": [*({"type": "image", "image": each} for each in shown), text],
                }
            ]
            for shown in chosen.values()
        ]
        return dict(zip(chosen, llm.chat(asked, params), strict=True))


def test_generate_shows_pictures(folder: Path, offline: dict[str, Any]) -> None:
    pictures = ["--image", folder / "one.png", "--image", folder / "my two.png"]
    done = run("generate", folder / "m", *pictures, TEXT, "--json", *GREEDY, *SIZES)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_token_ids"] == offline["both"].prompt_token_ids
    assert answer["outputs"][0]["token_ids"] == offline["both"].outputs[0].token_ids
    tokens = answer["metrics"]["media_tokens"]["image"]
    assert len(tokens) == 2
    assert sum(tokens) == answer["prompt_token_ids"].count(IMAGE_TOKEN)
    assert f" prompt tokens ({sum(tokens)} of files), " in done.stderr


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("none.png", "none.png: the data is no picture in one of PNG"),
        ("gone.png", "gone.png is not there; check the path"),
        ("", "is no file"),
    ],
)
def test_a_file_that_is_no_picture_is_named(folder: Path, file: str, said: str) -> None:
    done = run("generate", folder / "m", "--image", folder / file, TEXT, *GREEDY, *SIZES)
    assert done.returncode == 1
    assert said in done.stderr
    assert "messages.0" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_text_model_is_named(folder: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "text")
    done = run("generate", model, "--image", folder / "one.png", "Hi", *SIZES)
    assert done.returncode == 1
    assert f"one.png is given as image, and {model} takes text alone" in done.stderr
    wrong = run("generate", model, "--image", folder / "one.png", "--token-ids", "1,2")
    assert wrong.returncode == 2
    assert "--image needs a template" in wrong.stderr.replace("\n", " ")


def test_an_option_that_turns_pictures_off_is_named(folder: Path) -> None:
    off = ("--limit-mm-per-prompt", '{"image": 0}')
    done = run("generate", folder / "m", "--image", folder / "one.png", TEXT, *SIZES, *off)
    assert done.returncode == 1
    assert "one.png is given as image, and --limit-mm-per-prompt is 0" in done.stderr
    assert done.stderr.count("\n") == 1
    lines = (f"/image {folder / 'one.png'}",)
    chat = run("chat", folder / "m", *GREEDY, *SIZES, *off, lines=lines)
    assert "one.png is given as image, and --limit-mm-per-prompt is 0" in chat.stderr


def test_a_chat_shows_pictures_here_and_on_a_server(folder: Path, offline: dict[str, Any]) -> None:
    lines = (
        f"/image {folder / 'one.png'}",
        TEXT,
        "/reset",
        f"/image {folder / 'none.png'}",
        TEXT,
        "/image",
        f"/image {folder / 'one.png'}",
        f"/image '{folder / 'my two.png'}'",
        TEXT,
        "/image gone.png",
        "/image https://example.org/a.png",
        f"/audio {folder / 'one.png'}",
    )
    texts = [offline[which].outputs[0].text for which in ("one", "both")]
    local = run("chat", folder / "m", *GREEDY, *SIZES, lines=lines)
    with ServerProcess(folder / "m", *SIZES) as server:
        server.wait_ready()
        remote = run("chat", "--url", server.url, *GREEDY, lines=lines)
    for done, name in ((local, "Qwen2VLForConditionalGeneration"), (remote, "m")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == texts
        assert "not answered: " in done.stderr
        assert "none.png: the data is no picture" in done.stderr
        assert "(the next message still has its files; /image alone takes them out)" in done.stderr
        assert "the next message has no image" in done.stderr
        assert "image gone.png is not there" in done.stderr
        assert "cannot be read" not in done.stderr
        assert "image https:/example.org/a.png is an address" in done.stderr
        assert f"one.png is given as audio, and {name} takes image, video and text" in done.stderr
