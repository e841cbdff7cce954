"""Encoded videos and sounds: the frames and samples that were put in, and what is refused."""

from __future__ import annotations

import struct
import wave
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from engine_core.errors import RequestError
from engine_core.media import videos
from engine_core.media.sounds import decode_audio
from engine_core.media.videos import decode_video


def video(
    count: int = 50, fps: int = 10, form: str = "mp4", codec: str = "libx264", gop: int = 12
) -> bytes:
    """Grey frames, each 5 brighter than the one before."""
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", gop
        for number in range(count):
            pixels = np.full((48, 64, 3), number * 5, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def sound(rate: int = 8000, channels: int = 2, seconds: float = 0.5) -> tuple[bytes, Any]:
    """A wave file, and its samples ``[N, channels]``."""
    values = np.random.default_rng(0).integers(
        -(2**15), 2**15, (int(rate * seconds), channels), dtype=np.int16
    )
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())
    return out.getvalue(), values


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "libx264"),
        ("mpegts", "mpeg2video"),
    ],
)
def test_two_frames_a_second_are_taken(form: str, codec: str) -> None:
    made = decode_video(video(form=form, codec=codec))
    assert np.asarray(made).shape == (len(made), 48, 64, 3)
    assert np.asarray(made).dtype == np.uint8
    assert made.fps == pytest.approx(2.0)
    expected = np.linspace(0, 49, 10).round() * 5
    assert np.abs(np.array([frame.mean() for frame in made]) - expected).max() < 4


def test_the_limits_of_frames_and_pixels() -> None:
    clip = video()
    made = decode_video(clip, max_frames=5)
    assert len(made) == 5
    assert made.fps == pytest.approx(1.0)
    assert len(decode_video(clip, max_pixels=7 * 48 * 64)) == 7
    with pytest.raises(RequestError, match="frames of 64 x 48 pixels, of which 3 are within"):
        decode_video(clip, max_pixels=4 * 48 * 64 - 1)
    # Short ones are taken whole, down to one frame.
    for count in (1, 3, 4):
        assert len(decode_video(video(count))) == count


def test_a_video_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MAX_SECONDS", 4.0)
    with pytest.raises(RequestError, match="takes 5 s, and 4 are taken at most"):
        decode_video(video())


def still() -> bytes:
    out = BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def only_sound() -> bytes:
    out = BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no video in one of mp4"),
        (b"hello" * 100, "no video in one of mp4"),
        (still(), "no video in one of mp4"),
        (video()[:2000], "no video in one of|damaged|has no frames"),
        (video(form="matroska")[:900], "no frames|damaged|no video"),
        (only_sound(), "has no frames: the file holds no"),
        (sound()[0], "no video in one of mp4"),
    ],
    ids=["nothing", "text", "a picture", "truncated", "cut off", "no frames", "a sound"],
)
def test_what_is_no_video_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        decode_video(data)


def test_a_list_of_other_files_is_not_followed(tmp_path: Path) -> None:
    """FFmpeg has formats that name further files and addresses, which it would open."""
    clip = tmp_path / "a.ts"
    clip.write_bytes(video(form="mpegts", codec="mpeg2video"))
    lists = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:5,\nfile://{clip}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{clip}'\n",
        f"ffconcat version 1.0\nfile '{clip.name}'\n",
    )
    for text in lists:
        with pytest.raises(RequestError, match="no video in one of"):
            decode_video(text.encode())
        with pytest.raises(RequestError, match="no sound in one of"):
            decode_audio(text.encode())


@pytest.mark.parametrize(
    ("rate", "channels"), [(8000, 1), (16000, 2), (44100, 3), (8000, 8), (8000, 64)]
)
def test_samples_of_a_wave_file(rate: int, channels: int) -> None:
    data, values = sound(rate, channels)
    samples, found = decode_audio(data)
    assert found == rate
    assert samples.dtype == np.float32
    expected = (values.astype(np.float32) / 2**15).mean(axis=1)
    np.testing.assert_allclose(samples, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("form", "codec"), [("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus")])
def test_compressed_sounds(form: str, codec: str) -> None:
    rate = 48000
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        form_of = stream.codec_context.format.name
        frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        converter = av.AudioResampler(form_of, "mono", rate, stream.codec_context.frame_size)
        for piece in [*converter.resample(frame), *converter.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    samples, found = decode_audio(out.getvalue())
    assert found == rate
    assert abs(len(samples) - rate) < 4000  # encoders add some silence
    middle = samples[rate // 4 : 3 * rate // 4]
    peak = np.abs(np.fft.rfft(middle)).argmax() * rate / len(middle)
    assert abs(peak - 440) < 4
    assert abs(np.abs(middle).max() - 0.5) < 0.05


def test_what_is_no_sound_is_refused() -> None:
    data, _ = sound()
    with pytest.raises(RequestError, match=r"more than 0\.25 s"):
        decode_audio(data, max_seconds=0.25)
    for wrong, said in (
        (b"", "no sound in one of wav"),
        (data[:20], "no sound in one of|holds no sound|damaged"),
        (data[:44], "no samples|damaged"),
        (video(), "holds no sound"),
        (still(), "no sound in one of wav"),
        # What a header may say that is not so: places of the format, channels and bits.
        (patched(data, 20, 0xFFFF), "encoded in a way that cannot be decoded here"),
        (patched(data, 34, 0), "encoded in a way that cannot be decoded here"),
        (patched(data, 22, 0), "has 0 channels of 8000 samples a second; it is to have 1 to 64"),
        (patched(data, 22, 65), "has 65 channels of 8000 samples a second"),
    ):
        with pytest.raises(RequestError, match=said):
            decode_audio(wrong)


def noise(form: str, codec: str, bits: int | None = None, **options: str) -> bytes:
    """Two seconds that cannot be compressed, so that half of the file is half of the sound."""
    out, rate = BytesIO(), 16000
    values = np.random.default_rng(0).normal(0, 0.1, (1, 2 * rate)).astype(np.float32)
    with av.open(out, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        if bits is not None:
            stream.bit_rate = bits
        name, size = stream.codec_context.format.name, stream.codec_context.frame_size or 1000
        width = 0 if name.startswith("flt") else int(name[1:3])
        given = (values * 2 ** (width - 1)).astype(f"<i{width // 8}") if width else values
        for start in range(0, given.shape[1], size):
            piece = np.ascontiguousarray(given[:, start : start + size])
            frame = av.AudioFrame.from_ndarray(piece, format=name, layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("aiff", "pcm_s16be"),
        ("flac", "flac"),
        ("mp3", "mp3"),
        ("matroska", "flac"),
    ],
)
def test_a_sound_that_is_cut_off_is_refused(form: str, codec: str) -> None:
    data = noise(form, codec)
    samples, rate = decode_audio(data)
    assert abs(len(samples) / rate - 2) < 0.1
    with pytest.raises(RequestError, match=r"the sound is truncated: it has [01]\.\d|is damaged"):
        decode_audio(data[: len(data) // 2])


def test_a_tag_ahead_of_an_mp3_file_hides_nothing() -> None:
    data = noise("mp3", "mp3")
    tag = b"ID3\x03\0\0" + bytes((0, 0, 40, 0)) + bytes(40 * 128)
    body = data[10 + sum(byte << 7 * (3 - at) for at, byte in enumerate(data[6:10])) :]
    assert len(decode_audio(tag + body)[0]) > 30000
    with pytest.raises(RequestError, match=r"the sound is truncated: it has 0\.\d"):
        decode_audio(tag + body[: len(body) // 2])


def test_an_mp3_file_without_a_table_is_heard_at_any_rates_of_its_frames() -> None:
    """FFmpeg takes the first frame's rate for that of all."""
    bare = {"write_xing": "0", "id3v2_version": "0"}
    small, large = (noise("mp3", "mp3", bits, **bare) for bits in (8000, 160000))
    assert len(large) > 15 * len(small)
    samples, rate = decode_audio(small + large)
    assert 3.8 < len(samples) / rate < 4.4


@pytest.mark.parametrize("size", [0, 2**31 - 1, 2**32 - 1, 0x7FFFF000])
def test_a_wave_file_that_was_written_as_it_came_is_heard(size: int) -> None:
    """Who streams it does not know how much there will be."""
    data, values = sound()
    assert data[36:40] == b"data"
    samples, _ = decode_audio(data[:40] + struct.pack("<I", size) + data[44:])
    assert len(samples) == len(values)


def test_a_sound_of_which_a_packet_is_missing_is_heard() -> None:
    data, values = sound()
    assert len(decode_audio(data[:-40])[0]) == len(values) - 10


@pytest.mark.parametrize(("form", "codec"), [("matroska", "libx264"), ("flv", "flv")])
def test_a_video_that_is_cut_off_is_refused(form: str, codec: str) -> None:
    data = video(50, form=form, codec=codec)
    assert len(decode_video(data)) == 10
    with pytest.raises(RequestError, match=r"the video is truncated: it has [0-3]\.\d.* 5\.00 s"):
        decode_video(data[: len(data) // 2])


def test_a_video_whose_index_comes_first_is_refused_if_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for seed in range(40):
            pixels = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    data = path.read_bytes()
    assert len(decode_video(data)) == 8
    with pytest.raises(RequestError, match=r"the video is truncated: it has [12]\.\d"):
        decode_video(data[: len(data) // 2])


def patched(data: bytes, place: int, value: int) -> bytes:
    """A file with another number of two bytes at a place."""
    return data[:place] + struct.pack("<H", value) + data[place + 2 :]
