"""Pictures and videos over HTTP: what strangers send is answered or refused by name."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flat_pictures import flat_url
from golden_fixtures import GOLDEN
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

httpx: Any = pytest.importorskip("httpx", reason="httpx is not installed")
av: Any = pytest.importorskip("av", reason="PyAV is not installed")
serving: Any = pytest.importorskip("serving", reason="the server's packages are not installed")

SPECIAL = {"<IMG_CONTEXT>": 300, "<img>": 301, "</img>": 302}
SPECIAL |= {"<|im_start|>": 303, "<|im_end|>": 304}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model ``m``, a picture beside it, and the folder ``media``."""
    folder = tmp_path_factory.mktemp("internvl-server")
    shutil.copytree(GOLDEN / "internvl-chat-qwen2", folder / "m")
    names = {number: name for name, number in SPECIAL.items()}
    vocabulary = {names.get(n, chr(n) if n < 128 else chr(0x4E00 + n)): n for n in range(320)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "m" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "secret.png").write_bytes(encoded(PICTURE))
    (folder / "media" / "folder").mkdir(parents=True)
    (folder / "media" / "a.png").write_bytes(encoded(PICTURE))
    (folder / "media" / "link.png").symlink_to(folder / "secret.png")
    os.mkfifo(folder / "media" / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    options = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
    options += ("--limit-mm-per-prompt", '{"image": 20, "video": 1}')
    options += ("--allowed-local-media-path", str(folder / "media"))
    options += ("--allowed-media-domains", "localhost", "--allowed-media-domains", "name.invalid")
    options += ("--api-key", "a", "--api-key", "b")
    with serving.ServerProcess(folder / "m", *options) as server:
        yield server.wait_ready()


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, kind, **options)
    return out.getvalue()


def clip(frames: int = 10) -> bytes:
    """So many tenths of a second of video; a sound alone if there are none."""
    out = BytesIO()
    with av.open(out, "w", format="matroska") as container:
        if frames:
            stream: Any = container.add_stream("libx264", rate=10)
            stream.height, stream.width, stream.pix_fmt = 60, 90, "yuv420p"
            for seed in range(frames):
                pixels = np.random.default_rng(seed).integers(0, 256, (60, 90, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        else:
            stream = container.add_stream("aac", rate=8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def with_text_of(size: int) -> bytes:
    """A picture with so many bytes of text, in a few of a PNG file."""
    body = b"k\0\0" + zlib.compress(bytes(size), 9)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + body))
    whole = encoded(PICTURE)
    return whole[:33] + chunk + whole[33:]  # behind the head


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(address: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}, **more}


def video(content: bytes, kind: str = "video/x-matroska") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(content, kind)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(server: Any, *parts: Any, key: str = "a", words: str = "What?", **more: Any) -> Any:
    messages = [{"role": "user", "content": [*parts, text(words)]}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    address = f"{server.url}/v1/chat/completions"
    return httpx.post(address, json={**body, **more}, headers=headers, timeout=60)


PICTURE = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
GOOD = image(url(encoded(PICTURE)))
LONGER = clip(30)
TWICE: dict[str, Any] = {"save_all": True, "append_images": [Image.fromarray(255 - PICTURE)]}
PART, CLIP = "messages.0.content.0.image_url", "messages.0.content.0.video_url"
NO_PICTURE = "the data is no picture in one of PNG"


def huge() -> list[Any]:
    """100 million pixels in 12 KB."""
    return [image(url(encoded(Image.new("1", (10_000, 10_000)))))]


def with_much_text() -> list[Any]:
    return [image(url(with_text_of(2**27)))]


# What is sent, the field that the refusal names, and words of it. What takes long to make is a
# function: all processes that share the tests import this module.
REFUSED: dict[str, tuple[list[Any] | Callable[[], list[Any]], str, str]] = {
    "nothing": ([image("")], PART, "there is no image"),
    "no bytes": ([image("data:image/png;base64,")], PART, NO_PICTURE),
    "base64": ([image("data:image/png;base64,a$b=")], PART, "its base64 is wrong"),
    "padding": ([image(url(b"12345").rstrip("="))], PART, "its base64 is wrong: Incorrect padding"),
    "no comma": ([image("data:image/png;base64")], PART, "is to begin with data:image/TYPE;base64"),
    "no base64": ([image("data:image/png,abc")], PART, "is to begin with data:image/TYPE;base64"),
    "a drawing": ([image(url(b"<svg/>", "image/svg+xml"))], PART, NO_PICTURE),
    "TIFF": ([image(url(encoded(PICTURE, "TIFF"), "image/tiff"))], PART, NO_PICTURE),
    "PNG cut off": ([image(url(encoded(PICTURE)[:-5000]))], PART, "the picture is damaged"),
    "JPEG cut off": ([image(url(encoded(PICTURE, "JPEG")[:-500]))], PART, "is truncated"),
    "WebP cut off": ([image(url(encoded(PICTURE, "WEBP")[:-500]))], PART, "is damaged"),
    "huge": (huge, PART, "10000 x 10000 pixels, and 50000000 are taken"),
    "much text": (with_much_text, PART, "the picture is damaged"),
    "GIF": ([image(url(encoded(Image.fromarray(PICTURE), "GIF", **TWICE)))], PART, "(GIF); send"),
    "WebP": ([image(url(encoded(Image.fromarray(PICTURE), "WEBP", **TWICE)))], PART, "(WEBP)"),
    "PNG": ([image(url(encoded(Image.fromarray(PICTURE), **TWICE)))], PART, "is animated (PNG)"),
    "a video as picture": ([image(url(clip()))], PART, NO_PICTURE),
    "a picture as video": ([video(encoded(PICTURE))], CLIP, "the data is no video in one of mp4"),
    "a picture's type": ([video(b"", "image/png")], CLIP, "begin with data:video/TYPE"),
    "no frames": ([video(clip(0))], CLIP, "the video has no frames"),
    "a video cut off": ([video(LONGER[: len(LONGER) // 2])], CLIP, "the video is truncated"),
    "a sound": (
        [{"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}],
        "messages.0.content.0.input_audio",
        "has 'audio', and InternVLChatModel takes image, video and text",
    ),
    "two videos": (
        [video(clip()), video(clip())],
        "messages.0.content.1.video_url",
        "2 items of the kind 'video', and 1 are taken",
    ),
    "the third": (
        [GOOD, text("and"), image(url(encoded(PICTURE)[:-999]))],
        "messages.0.content.2.image_url",
        "messages.0.content.2.image_url: the picture is damaged",
    ),
    "typed": ([text("<IMG_CONTEXT>")], "messages", "image placeholders (token 300) in 1 places"),
    "typed beside one": ([GOOD, text("<IMG_CONTEXT>")], PART, "(token 300) in 2 places"),
    "typed as a video": ([text("<img></img>")], "messages", "video placeholders (<img></img>)"),
    "typed beside a video": ([video(clip()), text("<img></img>")], CLIP, "</img>) in 2 places"),
    "path": ([image("/etc/passwd")], PART, "or as an address with https or file"),
    "file": ([image("file:///etc/passwd")], PART, "not below the folder that the server allows"),
    "upwards": ([image("file://{}/media/../secret.png")], PART, "not below the folder"),
    "coded": ([image("file://{}/media/%2e%2e/secret.png")], PART, "not below the folder"),
    "link": ([image("file://{}/media/link.png")], PART, "not below the folder"),
    "pipe": ([image("file://{}/media/pipe.png")], PART, ": 'pipe.png' is no file"),
    "folder": ([image("file://{}/media/folder")], PART, "'folder' cannot be read: Is a directory"),
    "gone": ([image("file://{}/media/gone.png")], PART, "'gone.png' cannot be read: No such file"),
    "other machine": ([image("file://evil{}/media/a.png")], PART, "files are not read"),
    "address": ([image("https://example.org/a.png")], PART, "at 'example.org' are not fetched"),
    "this machine": ([image("http://localhost/a.png")], PART, "has an address that is not public"),
    "its number": ([image("http://127.0.0.1/a.png")], PART, "at '127.0.0.1' are not fetched"),
    "another port": ([image("http://localhost:22/")], PART, "at 'localhost:22' are not fetched"),
    "user": ([image("http://localhost@evil.org/")], PART, "at 'evil.org' are not fetched"),
    "no host": ([image(r"http:\\localhost\a.png")], PART, "names no host"),
    "no such name": ([image("https://name.invalid/a.png")], PART, "nothing comes from 'name.inval"),
    "scheme": ([image("ftp://localhost/a.png")], PART, "this is 'ftp'"),
    "unknown": ([image(None, uuid="none")], PART, "no image is known by the uuid 'none'"),
}


def bodies(folder: Path) -> dict[str, list[Any]]:
    """Refused inputs, with the folder in their paths."""
    return {
        name: json.loads(
            json.dumps(parts() if callable(parts) else parts).replace("{}", str(folder))
        )
        for name, (parts, _, _) in REFUSED.items()
    }


def test_what_cannot_be_seen_is_refused_by_name_while_others_are_answered(
    server: Any, folder: Path
) -> None:
    alone = ask(server, GOOD, max_tokens=64).json()
    assert alone["usage"]["prompt_tokens_details"]["image_tokens"] > 20
    sent = bodies(folder)
    with ThreadPoolExecutor(12) as threads:
        others = [threads.submit(ask, server, GOOD, key="b", max_tokens=64) for _ in range(8)]
        answers = dict(
            zip(sent, threads.map(lambda parts: ask(server, *parts), sent.values()), strict=True)
        )
        for name, (_, param, said) in REFUSED.items():
            refused = answers[name]
            assert refused.status_code == 400, (name, refused.text)
            error = refused.json()["error"]
            assert error["param"] == param, (name, error)
            assert said in error["message"], (name, error)
            assert len(refused.content) < 1000, name
        for other in others:
            assert other.result().json()["choices"] == alone["choices"]
    server.wait_for("engine_core_media_requests_waiting", 0)


def test_videos_and_files_are_seen(server: Any, folder: Path) -> None:
    shown = ask(server, GOOD).json()
    file = ask(server, image(f"file://{folder}/media/a.png")).json()
    assert file["choices"] == shown["choices"]
    # One tile of 4 embeddings a frame, between two marks, with a label of 9 before each but the
    # first. Of ten frames in a second four are taken.
    seen = ask(server, video(clip())).json()
    words = ask(server, words="Frame1: \nWhat?").json()
    frames = 4 * (4 + 2) + 3 * len("\nFrame2: ")
    assert seen["usage"]["prompt_tokens"] == words["usage"]["prompt_tokens"] + frames


def test_a_key_does_not_wait_for_all_pictures_of_another(server: Any) -> None:
    large = [image(flat_url(3000 - i, 3000)) for i in range(9)]
    with ThreadPoolExecutor(9) as threads:
        many = [threads.submit(ask, server, each, max_tokens=1) for each in large]
        while server.metric("engine_core_media_requests_waiting") < 8:
            assert not all(each.done() for each in many)
        one = ask(server, image(url(encoded(255 - PICTURE))), key="b", max_tokens=1)
        assert one.status_code == 200
        # Behind all of them at most two would not be done: those that generate.
        assert sum(each.done() for each in many) <= 6
        assert [each.result().status_code for each in many] == [200] * 9
    server.wait_for("engine_core_media_requests_waiting", 0)


def test_more_than_the_context_holds_is_told_as_that(server: Any) -> None:
    """Each picture alone would do."""
    others = [image(url(encoded(np.roll(PICTURE, shift, 0)))) for shift in range(20)]
    refused = ask(server, *others)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].startswith("the prompt is too long: a prompt of ")
    assert "maximum context length is 512 tokens" in error["message"]


def test_other_services_name_the_part_of_their_own_request(server: Any) -> None:
    good, bad = url(encoded(PICTURE)), url(encoded(PICTURE)[:-999])
    headers = {"Authorization": "Bearer a"}

    def post(path: str, **body: Any) -> Any:
        body = {"model": "m", **body}
        return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)

    def block(address: str) -> dict[str, Any]:
        data = address.partition(",")[2]
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }

    blocks = [{"role": "user", "content": [block(good), text("and"), block(bad)]}]
    for more in ({}, {"system": "Be brief."}):
        refused = post("/v1/messages", messages=blocks, max_tokens=2, **more)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "messages.0.content.2.source"
        assert error["message"].startswith("messages.0.content.2.source: the picture is damaged")

    def item(*addresses: str) -> list[dict[str, Any]]:
        parts = [{"type": "input_image", "image_url": each} for each in addresses]
        return [
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": [{"type": "input_text", "text": "Look"}, *parts]},
        ]

    kept = post("/v1/responses", input=item(good), max_output_tokens=2)
    assert kept.status_code == 200, kept.text
    for more in ({}, {"instructions": "Be brief.", "previous_response_id": kept.json()["id"]}):
        refused = post("/v1/responses", input=item(good, bad), max_output_tokens=2, **more)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "input.1.content.2.image_url"
        assert error["message"].startswith("input.1.content.2.image_url: the picture is damaged")


def test_a_uuid_is_that_of_a_key_a_kind_and_options(server: Any) -> None:
    named = ask(server, {**GOOD, "uuid": "u"})
    for nothing in ({"image_url": None}, {"image_url": {"url": ""}}, {}):
        again = ask(server, {"type": "image_url", "uuid": "u", **nothing})
        assert again.json()["choices"] == named.json()["choices"]
    empty = image(None, uuid="u")
    for other in (
        ask(server, empty, key="b"),
        ask(server, empty, cache_salt="salt"),
        ask(server, empty, mm_processor_kwargs={"max_dynamic_patch": 2}),
        ask(server, {"type": "video_url", "video_url": None, "uuid": "u"}),
    ):
        assert other.status_code == 400
        assert "is known by the uuid 'u'" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"colour": 1}, "'colour' is not one of dynamic_image_size, use_thumbnail"),
        ({"max_dynamic_patch": 10**9}, "must be an integer from 1 to 64, got 1000000000"),
        ({"min_dynamic_patch": 5, "max_dynamic_patch": 2}, "min_dynamic_patch (5) is more than"),
        ({"use_thumbnail": "yes"}, "use_thumbnail must be true or false, got 'yes'"),
        ([1], "must be an object, got [1]"),
    ],
)
def test_options_that_are_none(server: Any, options: Any, said: str) -> None:
    refused = ask(server, GOOD, mm_processor_kwargs=options)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "mm_processor_kwargs"
    assert said in refused.json()["error"]["message"]
