"""Pictures in every form that a program may give them, offline: one picture, one answer."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from seeing_model import IMAGE_TOKEN, VIDEO_TOKEN, character, write_seeing_model

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.configs import HFConfig
from engine_core.engine import frontend
from engine_core.engine.media import MediaIntake
from engine_core.engine.trace import EngineTrace, write_trace
from engine_core.errors import ConfigError, OptionError, RequestError
from engine_core.inputs import MediaItem, Video
from engine_core.media import MediaPart, fetch
from engine_core.workers import WorkerPool
from engine_core_qwen2_vl.config import Qwen2VLConfigBuilder
from engine_core_qwen2_vl.inputs import Qwen2VLProcessor

av: Any = pytest.importorskip("av", reason="PyAV is not installed")

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "".join(map(character, (5, 80, 7)))
PROMPT = f"<|vision_start|><|image_pad|><|vision_end|>{TEXT}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_seeing_model(tmp_path_factory.mktemp("parts") / "m").parent
    Image.fromarray(PIXELS).save(folder / "a.png")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = EngineConfig(
        kv_cache_memory=2**24,
        max_model_len=512,
        allowed_local_media_path=str(folder),
        limit_mm_per_prompt={"image": 2},
    )
    with LLM(str(folder / "m"), config) as made:
        yield made


def tokens(llm: LLM, prompt: Any) -> list[int]:
    (output,) = llm.generate(prompt, PARAMS)
    return output.outputs[0].token_ids


def test_one_picture_in_every_form(llm: LLM, folder: Path) -> None:
    file = folder / "a.png"
    url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    forms: list[Any] = [PIXELS, Image.open(file), file, str(file), file.read_bytes(), url]
    forms += [f"file://{file}", [PIXELS]]
    prompts = [{"prompt": PROMPT, "multi_modal_data": {"image": form}} for form in forms]
    (expected, *others) = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]
    assert others == [expected] * len(others)
    text = {"type": "text", "text": TEXT}
    chats: list[list[Any]] = [
        [{"type": "image", "image": PIXELS}, text],
        [{"type": "image_url", "image_url": {"url": url}}, text],
        [{"type": "image_url", "image_url": f"file://{file}"}, text],
        [{"image": str(file)}, {"text": TEXT}],  # as MindIE has it
    ]
    outputs = llm.chat([[{"role": "user", "content": parts}] for parts in chats], PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * len(chats)
    assert not llm.engine.frontend.media._sources._held
    # And another one is another one.
    assert tokens(llm, {**prompts[0], "multi_modal_data": {"image": 255 - PIXELS}}) != expected


def test_prompts_of_many_files_wait_for_each_other(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_QUEUED", "_MAX_HELD", "_MAX_OF_CLIENT"):
        monkeypatch.setattr(fetch, name, 1)
    prompt = {"prompt": 2 * PROMPT, "multi_modal_data": {"image": 2 * [folder / "a.png"]}}
    outputs = llm.generate([prompt] * 12, PARAMS)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_a_picture_by_its_uuid(llm: LLM) -> None:
    given = {"prompt": PROMPT, "multi_modal_data": {"image": [PIXELS]}}
    expected = tokens(llm, {**given, "multi_modal_uuids": {"image": ["a"]}})
    again = {"prompt": PROMPT, "multi_modal_data": {"image": None}}
    assert tokens(llm, {**again, "multi_modal_uuids": {"image": "a"}}) == expected
    with pytest.raises(RequestError, match="no image is known by the uuid 'b'") as refused:
        tokens(llm, {**again, "multi_modal_uuids": {"image": "b"}})
    assert "multi_modal_data.image.0" in str(refused.value)


def test_a_trace_has_the_pictures_of_each_step(llm: LLM, tmp_path: Path) -> None:
    trace = llm.engine.core.trace = EngineTrace()
    given = {"prompt": PROMPT, "multi_modal_data": {"image": PIXELS[::-1].copy()}}
    (output,) = llm.generate([given, TEXT], PARAMS)[:1]
    llm.engine.core.trace = None
    count = output.prompt_token_ids.count(IMAGE_TOKEN)
    shown = [record for record in trace.steps if record.media]
    assert [record.media for record in shown] == [((0, count, count),)]
    assert [record.encoded > 0 for record in trace.steps] == [
        record in shown for record in trace.steps
    ]
    write_trace(tmp_path / "trace.json", trace)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    arguments = [event["args"] for event in events if "encode_us" in event.get("args", {})]
    assert [each["media"] for each in arguments if each["encode_us"]] == [[[0, count, count]]]
    assert len(arguments) == len(trace.steps)


def test_prompts_are_processed_side_by_side_and_answered_in_their_order(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that two of them read is read by one thread."""
    opened = Image.open(folder / "a.png")
    pictures: list[Any] = [255 - PIXELS, opened, PIXELS // 2, opened, PIXELS // 3, PIXELS]
    pictures.append(PIXELS // 4)
    prompts: list[Any] = [
        {"prompt": PROMPT, "multi_modal_data": {"image": picture}} for picture in pictures
    ]
    prompts.insert(2, TEXT)
    alone = [tokens(llm, prompt) for prompt in prompts]
    both = threading.Barrier(2)
    process = Qwen2VLProcessor.process_media

    def meet(*arguments: Any) -> Any:
        if any(not isinstance(each, MediaItem) for each in arguments[2].get("image", ())):
            both.wait(30)
        return process(*arguments)

    monkeypatch.setattr(frontend, "_THREADS", 2)
    monkeypatch.setattr(Qwen2VLProcessor, "process_media", meet)
    llm.engine.frontend.media.cache.clear()
    opened = pictures[1] = pictures[3] = Image.open(folder / "a.png")
    for prompt, picture in zip(prompts[:2] + prompts[3:], pictures, strict=True):
        prompt["multi_modal_data"]["image"] = picture
    outputs = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_the_first_prompt_that_is_wrong_is_named(llm: LLM) -> None:
    def shown(picture: Any) -> Any:
        return {"prompt": PROMPT, "multi_modal_data": {"image": picture}}

    for bad in ([shown(b"1"), shown(b"2")], [{"prompt": 1}, shown(b"1")], [shown(b"1"), [-1]]):
        with pytest.raises(RequestError, match=r"^prompt 1: "):
            llm.generate([shown(PIXELS), *bad, shown(PIXELS)], PARAMS)
    assert not llm.engine.has_unfinished


def test_a_name_means_what_the_prompts_before_gave(llm: LLM) -> None:
    def named(picture: Any) -> Any:
        given = {"image": [picture]}
        return {"prompt": PROMPT, "multi_modal_data": given, "multi_modal_uuids": {"image": ["n"]}}

    first, second = (tokens(llm, named(picture)) for picture in (PIXELS, 255 - PIXELS))
    assert first != second
    asked = [named(each) for each in (PIXELS, None, 255 - PIXELS, None)]
    made = [output.outputs[0].token_ids for output in llm.generate(asked, PARAMS)]
    assert made == [first, first, second, second]


def test_settings_of_the_processing(llm: LLM, folder: Path) -> None:
    given = {"prompt": PROMPT, "multi_modal_data": {"image": PIXELS}}
    small = {"max_pixels": 3136}
    (own,) = llm.generate([{**given, "mm_processor_kwargs": small}], PARAMS)  # type: ignore[list-item]
    (usual,) = llm.generate([given], PARAMS)  # type: ignore[list-item]
    count = usual.prompt_token_ids.count(IMAGE_TOKEN)
    assert own.prompt_token_ids.count(IMAGE_TOKEN) < count
    asked = [{"role": "user", "content": [{"image": PIXELS}, {"text": TEXT}]}]
    (chat,) = llm.chat(asked, PARAMS, mm_processor_kwargs=small)
    assert chat.outputs[0].token_ids == own.outputs[0].token_ids
    config = EngineConfig(kv_cache_memory=2**24, max_model_len=512, mm_processor_kwargs=small)
    with LLM(str(folder / "m"), config) as other:
        assert tokens(other, given) == own.outputs[0].token_ids
        more = {**given, "mm_processor_kwargs": {"max_pixels": 100_000}}
        assert tokens(other, more) == usual.outputs[0].token_ids


def test_an_encoded_video_is_its_frames(llm: LLM, folder: Path) -> None:
    with av.open(str(folder / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=10)  # it loses nothing
        stream.height, stream.width, stream.pix_fmt = 60, 90, "bgr0"
        frames = np.random.default_rng(1).integers(0, 256, (4, 60, 90, 3), dtype=np.uint8)
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    prompt = PROMPT.replace("image", "video")
    made = [
        llm.generate([{"prompt": prompt, "multi_modal_data": {"video": video}}], PARAMS)[0]
        for video in (str(folder / "a.mkv"), frames, [list(frames)], Video(frames, fps=10.0))
    ]
    assert len({tuple(each.outputs[0].token_ids) for each in made}) == 1
    assert made[0].prompt_token_ids.count(VIDEO_TOKEN) > 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"image": "none.png"}, "'none.png' cannot be read: No such file"),
        ({"image": "file:///etc/passwd"}, "not below the folder"),
        ({"image": [PIXELS] * 3}, "multi_modal_data.image.2: the prompt has 3 items"),
        ({"audio": (np.zeros(9, np.float32), 16000)}, "has 'audio', and Qwen2VLForCond"),
        ({"image": None}, "there is no image"),
        ({"image": b"hello"}, r"^prompt 0: multi_modal_data\.image\.0: the data is no picture in"),
        ({"video": np.zeros((0, 4, 4, 3), np.uint8)}, "one or more frames"),
    ],
    ids=["no file", "not allowed", "too many", "a sound", "nothing", "no picture", "no frames"],
)
def test_what_a_program_gives_wrong(llm: LLM, data: Any, said: str) -> None:
    prompt = PROMPT.replace("image", next(iter(data)))
    with pytest.raises(RequestError, match=said):
        tokens(llm, {"prompt": prompt, "multi_modal_data": data})
    assert tokens(llm, {"prompt": PROMPT, "multi_modal_data": {"image": PIXELS}})


def test_options_that_are_none(folder: Path) -> None:
    for option, value, said in (
        ("allowed_local_media_path", str(folder / "none"), "is no folder"),
        ("allowed_media_domains", "https://example.org/", "is no host"),
        ("limit_mm_per_prompt", {"smell": 1}, "smell"),
        ("limit_mm_per_prompt", {"image": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig(**{option: value})
    config = Qwen2VLConfigBuilder.build(HFConfig.from_folder(folder / "m"), None)
    settings = EngineConfig(mm_processor_kwargs={"max_pixels": 1})
    with pytest.raises(OptionError, match="takes text alone"):
        MediaIntake(None, config, settings, WorkerPool())


def test_a_uuid_is_its_owners_alone(folder: Path) -> None:
    """Whatever else the owners share; a salt divides further."""
    config = Qwen2VLConfigBuilder.build(HFConfig.from_folder(folder / "m"), None)
    pool = WorkerPool()
    intake = MediaIntake(Qwen2VLProcessor(config), config, EngineConfig(), pool)

    def made(value: Any, owner: bytes, *salts: bytes) -> bytes:
        part = MediaPart("image", value, "here", "a", owner)
        asked = intake.begin([IMAGE_TOKEN, 5], {"image": [part]}, {}, salts, here=True)
        return asked.result(60).pop().media[0].digest

    first, second = made(PIXELS, b"one"), made(255 - PIXELS, b"two")
    assert made(None, b"one") == first != second == made(None, b"two")
    for owner, salts in ((b"three", ()), (b"one", (b"salt",)), (b"", (b"one",))):
        with pytest.raises(RequestError, match="no image is known by the uuid 'a'"):
            made(None, owner, *salts)
    intake.close()
    pool.close()


def test_objects_that_are_no_pictures_are_named(llm: LLM) -> None:
    closed = Image.fromarray(PIXELS)
    closed.close()
    for given, said in (
        (closed, "multi_modal_data.image.0: an image cannot be read: Operation on closed image"),
        ((PIXELS, 16000), "multi_modal_data.image.0: .* got tuple"),
        ([[PIXELS, 5]], "multi_modal_data.image.0: .* got list"),
        (PIXELS.astype(float), "got ndarray of float64"),
        ({1}, "got set"),
    ):
        with pytest.raises(RequestError, match=said):
            tokens(llm, {"prompt": PROMPT, "multi_modal_data": {"image": given}})
