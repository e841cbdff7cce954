"""Sounds over HTTP: what strangers send is answered or refused by name, and others go on."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine_core.testing.reference import prepare
from engine_core_qwen2_audio.conformance import CASES

av: Any = pytest.importorskip("av", reason="PyAV is not installed")
httpx: Any = pytest.importorskip("httpx", reason="httpx is not installed")
serving: Any = pytest.importorskip("serving", reason="the server's packages are not installed")

SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    (case,) = CASES
    folder = prepare(case, tmp_path_factory.mktemp("qwen2-audio") / "m").folder
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    vocabulary |= {chr(0x4E00 + number): number for number in range(len(SPECIAL), 160)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x4E00 + 159)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    options = ("--kv-cache-memory", "16MiB", "--limit-mm-per-prompt", '{"audio": 2}')
    with serving.ServerProcess(folder, *options, "--api-key", "a", "--api-key", "b") as server:
        yield server.wait_ready()


def wave(samples: Any, rate: int = 16000, channels: int = 1, form: int = 1) -> bytes:
    """A file whose header says so, whatever the samples are."""
    data = np.asarray(samples)
    width = data.dtype.itemsize
    align = width * channels
    head = struct.pack("<HHIIHH", form, channels, rate, rate * align % 2**32, align, 8 * width)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head
    body += b"data" + struct.pack("<I", data.nbytes) + data.tobytes()
    return b"RIFF" + struct.pack("<I", len(body)) + body


def silence(form: str, codec: str, seconds: float, rate: int = 16000) -> bytes:
    """A file of another format, in which an hour takes little."""
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        name, size = stream.codec_context.format.name, stream.codec_context.frame_size or 1152
        for start in range(0, int(seconds * rate), size):
            piece = np.zeros((1, size), {"s16": "<i2", "s32p": "<i4", "fltp": "<f4"}[name])
            frame = av.AudioFrame.from_ndarray(piece, format=name, layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def sound(content: bytes | str, **more: Any) -> dict[str, Any]:
    data = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **more}


def ask(server: Any, *parts: Any, key: str = "a", **more: Any) -> Any:
    text = {"type": "text", "text": chr(0x4E00 + 20)}
    messages = [{"role": "user", "content": [*parts, text]}]
    body = {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 0, **more}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


TONE = (8000 * np.sin(np.arange(4000) / 5)).astype("<i2")
TYPED = {"type": "text", "text": "<|AUDIO|>"}
PART = "messages.0.content.0.input_audio"
HOUR = silence("flac", "flac", 3601, rate=1000)
REFUSED: dict[str, tuple[list[Any], dict[str, Any], str, str]] = {
    "nothing": ([sound("")], {}, PART, "there is no audio"),
    "base64": ([sound("a$b=")], {}, PART, "its base64 is wrong"),
    "text": ([sound(b"hello" * 99)], {}, PART, "the data is no sound in one of wav"),
    "its head": ([sound(wave(TONE)[:44])], {}, PART, "the sound has no samples"),
    "no rate": ([sound(wave(TONE, rate=0))], {}, PART, "the data is no sound in one of wav"),
    "a rate": ([sound(wave(TONE, rate=10**9))], {}, PART, "from 1000 to 384000, got 1000000000"),
    "no channel": ([sound(wave(TONE, channels=0))], {}, PART, "has 0 channels"),
    "channels": ([sound(wave(TONE, channels=99))], {}, PART, "has 99 channels"),
    "another codec": ([sound(wave(TONE, form=0xFFFF))], {}, PART, "cannot be decoded here"),
    "NaN": (
        [sound(wave(np.full(4000, np.nan, "<f4"), form=3))],
        {},
        PART,
        f"{PART}: its samples are not all finite",
    ),
    "NaN behind another": (
        [sound(wave(TONE)), sound(wave(np.full(4000, np.nan, "<f4"), form=3))],
        {},
        "messages.0.content.1.input_audio",
        "messages.0.content.1.input_audio: its samples are not all finite",
    ),
    "cut off": ([sound(wave(TONE)[:2000])], {}, PART, "the sound is truncated: it has 0.06 s"),
    "an hour": ([sound(HOUR)], {}, PART, "the sound takes more than 1200 s"),
    "an hour cut": (
        [sound(HOUR)],
        {"mm_processor_kwargs": {"truncation": True}},
        PART,
        "the sound takes more than 1200 s",
    ),
    "no FLAC": ([sound(silence("flac", "flac", 0))], {}, PART, "the sound has no samples"),
    "a picture": (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}],
        {},
        "messages.0.content.0.image_url",
        "has 'image', and Qwen2AudioForConditionalGeneration takes audio and text",
    ),
    "a picture as sound": (
        [sound(b"\x89PNG\r\n\x1a\n" * 9)],
        {},
        PART,
        "is no sound in one of wav",
    ),
    "a playlist": (
        [sound(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n")],
        {},
        PART,
        "the data is no sound in one of wav",
    ),
    "a file": (
        [{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}],
        {},
        "messages.0.content.0.audio_url",
        "files are not read",
    ),
    "long": ([sound(wave(np.zeros(20000, "<i2")))], {}, PART, "it is 1.25 s long, and a sound may"),
    "short": ([sound(wave(TONE[:99]))], {}, PART, "it is too short"),
    "many": (
        [sound(wave(TONE))] * 3,
        {},
        "messages.0.content.2.input_audio",
        "3 items of the kind 'audio', and 2 are taken at most",
    ),
    "typed": ([sound(wave(TONE)), TYPED], {}, PART, "audio placeholders (token 0) in 2 places"),
    "typed alone": ([TYPED], {}, "messages", "audio placeholders (token 0) in 1 places"),
    "a number": (
        [{"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}}],
        {},
        f"{PART}.data",
        f"{PART}.data: Input should be a valid string, got 5",
    ),
    "an option": (
        [sound(wave(TONE))],
        {"mm_processor_kwargs": {"truncation": ["x"] * 10_000}},
        "mm_processor_kwargs",
        "truncation must be true or false, got ['x', 'x'",
    ),
    "another option": (
        [sound(wave(TONE))],
        {"mm_processor_kwargs": {"x" * 10_000: 1}},
        "mm_processor_kwargs",
        "... is not one of truncation",
    ),
}


def test_what_is_no_sound_is_refused_by_name_while_others_are_heard(server: Any) -> None:
    heard = ask(server, sound(wave(TONE)))
    assert heard.status_code == 200, heard.text
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(ask, server, sound(wave(TONE)), key="b") for _ in range(20)]
        for name, (parts, more, param, said) in REFUSED.items():
            refused = ask(server, *parts, **more)
            assert refused.status_code == 400, (name, refused.text)
            error = refused.json()["error"]
            assert error["param"] == param, (name, error)
            assert said in error["message"], (name, error)
            assert len(refused.content) < 1000, name
    for other in others:
        assert other.result().json()["choices"] == heard.json()["choices"]


def test_many_channels_and_large_samples_are_heard(server: Any) -> None:
    for data in (
        wave(np.repeat(TONE, 8), channels=8),
        wave(np.repeat(TONE, 64), channels=64),
        wave(np.full(4000, 1e38, "<f4"), form=3),
        wave(np.zeros(4000, "<i2")),
        wave(TONE[:3000], rate=15999),
        silence("flac", "flac", 0.4, rate=96000),
        silence("mp3", "mp3", 0.4, rate=44100),
    ):
        answer = ask(server, sound(data))
        assert answer.status_code == 200, answer.text


def test_a_uuid_is_its_keys_alone(server: Any) -> None:
    first = ask(server, sound(wave(TONE), uuid="u"))
    again = {"type": "input_audio", "input_audio": None, "uuid": "u"}
    assert ask(server, again).json()["choices"] == first.json()["choices"]
    other = ask(server, again, key="b")
    assert other.status_code == 400
    assert "no audio is known by the uuid 'u'" in other.json()["error"]["message"]
    assert ask(server, sound(wave(TONE[::-1]), uuid="u"), key="b").status_code == 200
    assert ask(server, again).json()["choices"] == first.json()["choices"]
