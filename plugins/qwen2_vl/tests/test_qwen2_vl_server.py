"""Pictures over HTTP: the openai client, data URLs, and what is refused beside it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flat_pictures import flat_url
from PIL import Image
from seeing_model import IMAGE_TOKEN, character, write_seeing_model
from serving import ServerProcess

from engine_core import LLM, EngineConfig, SamplingParams

av: Any = pytest.importorskip("av", reason="PyAV is not installed")
openai: Any = pytest.importorskip("openai", reason="openai is not installed")
prometheus: Any = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus_client is not installed"
)

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
ASKED = {"model": "m", "temperature": 0, "max_tokens": 8}
ASKED |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("qwen2vl") / "m")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    (model.parent / "media").mkdir()
    limits = ("--kv-cache-memory", "16MiB", "--max-model-len", "512")
    limits += ("--limit-mm-per-prompt", '{"image": 2}')
    limits += ("--allowed-local-media-path", str(model.parent / "media"))
    with ServerProcess(model, *limits) as server:
        yield server.wait_ready()


def data_url(pixels: Any = PIXELS) -> str:
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def message(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "".join(map(character, (5, 80, 7)))}
    return [{"role": "user", "content": [*parts, text]}]


def test_a_picture_over_http_is_what_it_is_offline(server: ServerProcess, model: Path) -> None:
    config = EngineConfig(kv_cache_memory=2**24, max_model_len=256)
    with LLM(str(model), config) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        parts = [{"type": "image", "image": PIXELS}, {"type": "image", "image": 255 - PIXELS}]
        text = message()[0]["content"]
        (offline,) = llm.chat([{"role": "user", "content": [*parts, *text]}], params)
        (other,) = llm.chat([{"role": "user", "content": [*parts[::-1], *text]}], params)
    assert offline.outputs[0].token_ids != other.outputs[0].token_ids
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="m",
            messages=message(data_url(), data_url(255 - PIXELS)),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == offline.outputs[0].token_ids
    # Two pictures, each with its two marks, and three tokens of text.
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(offline.prompt_token_ids) > 7
    assert offline.prompt_token_ids.count(IMAGE_TOKEN) == answer.usage.prompt_tokens - 7
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.model_dump()["image_tokens"] == answer.usage.prompt_tokens - 7
    assert offline.metrics.media_tokens == {"image": [6, 6]}


def test_a_hundred_mixed_requests_are_what_they_are_one_by_one(
    server: ServerProcess, model: Path
) -> None:
    """Texts, pictures of many sizes, some of them again, two at once; streamed and not."""
    chance = np.random.default_rng(3)
    sizes = [(28 * high, 28 * wide) for high, wide in ((2, 2), (2, 4), (5, 3), (4, 4))]
    pictures = [chance.integers(0, 256, (*size, 3), np.uint8) for size in sizes * 4]
    shown = [[*chance.choice(len(pictures), chance.integers(0, 3))] for _ in range(100)]
    texts = ["".join(map(character, chance.integers(5, 90, 1 + each % 9))) for each in range(100)]
    config = EngineConfig(kv_cache_memory=2**24, max_model_len=512)
    with LLM(str(model), config) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        expected = []
        for places, text in zip(shown, texts, strict=True):
            parts: list[Any] = [{"type": "image", "image": pictures[each]} for each in places]
            asked: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
            expected.append(llm.chat(asked, params)[0].outputs[0].token_ids)
    assert len({tuple(each) for each in expected}) > 50
    urls = [data_url(each) for each in pictures]

    async def ask(client: openai.AsyncOpenAI, number: int) -> list[int]:
        parts = message(*(urls[each] for each in shown[number]))[0]["content"][:-1]
        content = [*parts, {"type": "text", "text": texts[number]}]
        given: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 6}
        given["messages"] = [{"role": "user", "content": content}]
        given["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        if number % 2:
            answer = await client.chat.completions.create(**given)
            tokens: list[int] = answer.choices[0].model_dump()["token_ids"]
            return tokens
        stream = await client.chat.completions.create(**given, stream=True)
        chunks = [chunk.choices[0].model_dump() async for chunk in stream if chunk.choices]
        return [token for chunk in chunks for token in chunk.get("token_ids") or ()]

    async def ask_all() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(100)))

    assert asyncio.run(ask_all()) == expected


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def as_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def clip(*, sound: bool = False) -> bytes:
    """A second of video, or of sound alone."""
    out = BytesIO()
    with av.open(out, "w", format="mp4") as container:
        if sound:
            stream: Any = container.add_stream("aac", rate=8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 8000
            container.mux(stream.encode(frame))
        else:
            stream = container.add_stream("libx264", rate=10)
            stream.height, stream.width, stream.pix_fmt = 60, 90, "yuv420p"
            for shade in range(10):
                pixels = np.full_like(PIXELS, 20 * shade)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def part(url: str | None, kind: str = "image_url", **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: url, **more}]}]


def typed(text: str, *urls: str) -> list[dict[str, Any]]:
    """Pictures, and the text that somebody typed."""
    (made,) = message(*urls)
    return [{**made, "content": [*made["content"], {"type": "text", "text": text}]}]


PICTURE = Image.fromarray(PIXELS)
BOMB = encoded(Image.new("1", (10_000, 10_000)), "PNG")  # 100 million pixels in some kilobytes
ANIMATED = encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(180)])
PLACE = "messages.0.content.0.image_url"
REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "address": (message("https://example.org/a.png"), "at 'example.org' are not fetched", PLACE),
    "this machine": (message("http://127.0.0.1:8000/a.png"), "are not fetched", PLACE),
    "file": (message("file:///etc/passwd"), "not below the folder that the server allows", PLACE),
    "upwards": (message("file:///{media}/../m/config.json"), "not below the folder", PLACE),
    "path": (message("/etc/passwd"), "this is text", PLACE),
    "no picture": (message(as_url(b"hello")), "no picture in one of PNG", PLACE),
    "base64": (message(data_url() + "===="), "its base64 is wrong", PLACE),
    "truncated": (message(as_url(encoded(PICTURE, "PNG")[:-5000])), "damaged", PLACE),
    "huge": (message(as_url(BOMB)), "10000 x 10000 pixels, and 50000000 are taken", PLACE),
    "animated": (message(as_url(ANIMATED, "image/gif")), "animated (GIF)", PLACE),
    "too long": (message(data_url(np.zeros((1, 300, 3), np.uint8))), "is too long", PLACE),
    "a video as picture": (message(as_url(clip(), "video/mp4")), "data:image/TYPE", PLACE),
    "a picture as video": (
        part(data_url(), "video_url"),
        "data:video/TYPE",
        "messages.0.content.0.video_url",
    ),
    "no frames": (
        part(as_url(clip(sound=True), "video/mp4"), "video_url"),
        "the video has no frames",
        "messages.0.content.0.video_url",
    ),
    "a sound": (
        part(as_url(clip(sound=True), "audio/mp4"), "audio_url"),
        "takes image, video and text",
        "messages.0.content.0.audio_url",
    ),
    "nothing": (part(None), "there is no image", PLACE),
    "unknown uuid": (part(None, uuid="nobody's"), 'is known by the uuid "nobody\'s"', PLACE),
    "too many": (
        message(*[data_url()] * 3),
        "has 3 items of the kind 'image', and 2 are taken",
        "messages.0.content.2.image_url",
    ),
    "typed": (typed("<|image_pad|>"), "number of images of 0", "messages"),
    "typed beside a picture": (typed("<|image_pad|>", data_url()), "in 2 places", PLACE),
    "a video typed": (typed("<|video_pad|>", data_url()), "number of videos of 0", PLACE),
}


@pytest.mark.parametrize(("messages", "said", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_shown_is_refused_by_its_place(
    server: ServerProcess, model: Path, messages: Any, said: str, param: str
) -> None:
    text = json.dumps({**ASKED, "messages": messages})
    text = text.replace("{media}", str((model.parent / "media").relative_to("/")))
    url = server.url + "/v1/chat/completions"
    headers = {"content-type": "application/json"}
    refused = httpx.post(url, content=text, headers=headers, timeout=60)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_a_placeholder_typed_where_nothing_can_be_shown(server: ServerProcess) -> None:
    body = {**ASKED, "prompt": "<|image_pad|>"}
    refused = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "number of images of 0" in refused.json()["error"]["message"]


def test_nobody_else_suffers_from_what_is_refused(server: ServerProcess) -> None:
    """A long answer goes on as it does alone, while all of these come at once."""
    url = server.url + "/v1/chat/completions"
    asked = {**ASKED, "max_tokens": 200, "messages": message(data_url())}
    alone = httpx.post(url, json=asked, timeout=60).json()["choices"]
    with ThreadPoolExecutor(8) as threads:
        answer = threads.submit(httpx.post, url, json=asked, timeout=60)
        bodies = [{**ASKED, "messages": messages} for messages, _, _ in REFUSED.values()]
        refused = threads.map(lambda body: httpx.post(url, json=body, timeout=60), bodies)
        assert {each.status_code for each in refused} == {400}
        assert answer.result().json()["choices"] == alone


def test_a_picture_is_shown_again_by_its_uuid(server: ServerProcess) -> None:
    url = server.url + "/v1/chat/completions"

    def ask(messages: Any, **more: Any) -> httpx.Response:
        return httpx.post(url, json={**ASKED, "messages": messages, **more}, timeout=60)

    first = ask(part(data_url(), uuid="a"), cache_salt="mine")
    assert first.status_code == 200, first.text
    again = ask(part(None, uuid="a"), cache_salt="mine")
    assert again.json()["choices"] == first.json()["choices"]
    # Nobody else's: not without the salt, nor with another one, nor made in another way.
    for more in ({}, {"cache_salt": "yours"}):
        assert "is known by the uuid 'a'" in ask(part(None, uuid="a"), **more).text
    other = {"cache_salt": "mine", "mm_processor_kwargs": {"max_pixels": 3136}}
    assert "is known by the uuid 'a'" in ask(part(None, uuid="a"), **other).text
    # A name is that of the picture that had it last; and what is shown counts, not its name.
    second = ask(part(data_url(255 - PIXELS), uuid="a"), cache_salt="mine")
    assert second.json()["choices"] != first.json()["choices"]
    again = ask(part(None, uuid="a"), cache_salt="mine")
    assert again.json()["choices"] == second.json()["choices"]


def test_files_below_the_allowed_folder_and_videos(server: ServerProcess, model: Path) -> None:
    url = server.url + "/v1/chat/completions"
    (model.parent / "media" / "a.png").write_bytes(encoded(PICTURE, "PNG"))

    def ask(messages: Any, **more: Any) -> Any:
        answer = httpx.post(url, json={**ASKED, "messages": messages, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    file = ask(part(f"file://{model.parent}/media/a.png"))
    data = ask(part(data_url()))
    assert file["choices"] == data["choices"]
    least = {"mm_processor_kwargs": {"min_pixels": 3136}}  # as for a picture
    video = ask(part(as_url(clip(), "video/mp4"), "video_url"), **least)
    # Ten frames, of which four are taken: two pairs, of a picture's embeddings each.
    marks = 2
    embeddings = data["usage"]["prompt_tokens"] - marks
    assert video["usage"]["prompt_tokens"] == 2 * embeddings + marks


def test_detail_changes_nothing_and_base64_may_have_lines(server: ServerProcess) -> None:
    url = server.url + "/v1/chat/completions"
    head, _, content = data_url().partition(",")
    lines = "\n".join(content[place : place + 76] for place in range(0, len(content), 76))
    answers = []
    for shown, detail in ((data_url(), None), (f"{head},{lines}", "low"), (data_url(), "high")):
        messages = message(shown)
        if detail is not None:
            messages[0]["content"][0]["image_url"]["detail"] = detail
        answer = httpx.post(url, json={**ASKED, "messages": messages}, timeout=60)
        assert answer.status_code == 200, answer.text
        answers.append((answer.json()["choices"], answer.json()["usage"]["prompt_tokens"]))
    assert answers[0] == answers[1] == answers[2]
    wrong = message(data_url())
    wrong[0]["content"][0]["image_url"]["detail"] = "most"
    refused = httpx.post(url, json={**ASKED, "messages": wrong}, timeout=60)
    assert refused.status_code == 400
    assert "detail" in refused.json()["error"]["param"]


def test_tokens_of_pictures_are_not_counted_beforehand(server: ServerProcess) -> None:
    body = {"model": "m", "messages": message(data_url())}
    refused = httpx.post(server.url + "/tokenize", json=body, timeout=60)
    assert refused.status_code == 400
    assert "usage of an answer" in refused.json()["error"]["message"]


def test_other_services_take_pictures_in_their_own_parts(server: ServerProcess) -> None:
    text = message()[0]["content"][0]["text"]
    url = data_url()
    more = {"model": "m", "temperature": 0}

    def post(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(server.url + path, json={**more, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = post("/v1/chat/completions", {"messages": message(url), "max_tokens": 4})
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
    plain = post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 4},
    )
    assert plain["choices"][0]["message"] == chat["choices"][0]["message"]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    response = post(
        "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    )
    kept = httpx.get(f"{server.url}/v1/responses/{response['id']}/input_items", timeout=60).json()
    assert kept["data"][0]["content"] == parts
    assert post("/v1/responses", {"input": kept["data"], "max_output_tokens": 4})["output"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    asked = {"messages": [{"role": "user", "content": blocks}]}
    anthropic = post("/v1/messages", {**asked, "max_tokens": 4})
    tokens = chat["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens"] == anthropic["usage"]["input_tokens"] == tokens
    answered = chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == answered
    assert anthropic["content"][0]["text"] == answered
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json=asked, timeout=60)
    assert counted.status_code == 400
    assert "usage of an answer" in counted.json()["error"]["message"]
    small = post(
        "/v1/chat/completions",
        {"messages": message(url), "max_tokens": 1, "mm_processor_kwargs": {"max_pixels": 3136}},
    )
    assert small["usage"]["prompt_tokens"] < tokens


def figures(server: ServerProcess) -> dict[str, float]:
    """All figures by name and labels, as Prometheus' own parser reads them."""
    server.wait_for("engine_core_requests_running", 0)
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return {
        ",".join([sample.name.removeprefix("engine_core_"), *sample.labels.values()]): sample.value
        for family in prometheus.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_pictures(server: ServerProcess) -> None:
    url = server.url + "/v1/chat/completions"
    new = np.random.default_rng(7).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    before = figures(server)
    for urls in ([data_url(new)], [data_url(new), data_url(255 - new)], []):
        # No two prompts begin alike: blocks of the prefix cache would spare the encoder the asking.
        messages = message(*urls)
        messages[0]["content"].insert(0, {"type": "text", "text": character(90 + len(urls))})
        body = {**ASKED, "messages": messages}
        httpx.post(url, json=body, timeout=60).raise_for_status()
    broken = {**ASKED, "messages": message("data:image/png;base64,aGVsbG8=")}
    assert httpx.post(url, json=broken, timeout=60).status_code == 400
    after = figures(server)
    more = {name: value - before[name] for name, value in after.items() if name in before}
    assert more["media_items_total,image"] == 3
    assert more["media_items_total,video"] == 0
    assert more["processor_cache_queries_items_total"] == 4
    assert more["processor_cache_hits_items_total"] == 1
    assert more["encoder_cache_queries_items_total"] == 3
    assert more["encoder_cache_hits_items_total"] == 1
    # Two steps computed pictures, three requests had some to prepare.
    assert more["encoder_time_seconds_count"] == 2
    assert 0 < more["encoder_time_seconds_sum"] < 60
    assert more["media_preparation_time_seconds_count"] == 3
    assert more["media_decode_seconds_total"] > 0
    assert more["media_process_seconds_total"] > 0
    assert more["media_refused_prompts_total"] == 1
    assert after["media_requests_waiting"] == 0


def test_processing_ends_when_its_client_leaves(server: ServerProcess) -> None:
    """Otherwise the picture would be decoded and kept, and known when it comes again."""
    huge = flat_url(7000, 7000)
    # As it is, it would be more tokens than the model takes, which its header tells at once.
    shown = {"messages": message(huge), "mm_processor_kwargs": {"max_pixels": 20_000}}
    body = json.dumps({**ASKED, **shown}).encode()
    before = figures(server)
    address = (httpx.URL(server.url).host, httpx.URL(server.url).port or 0)
    with socket.create_connection(address) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        server.wait_for("engine_core_media_requests_waiting", 1)
        now = figures(server)["media_decode_seconds_total"]
        assert now == before["media_decode_seconds_total"], "it was processed before it was seen"
    server.wait_for("engine_core_media_requests_waiting", 0)
    after = figures(server)
    assert after["media_decode_seconds_total"] == before["media_decode_seconds_total"]


def test_who_sends_large_pictures_holds_up_nobody(server: ServerProcess) -> None:
    """Each with a salt of its own, which is no client of its own."""
    url = server.url + "/v1/chat/completions"
    small = {"max_pixels": 20_000}
    large = [flat_url(4100, 4100, number) for number in range(6)]

    def ask(shown: str, salt: str, source: str = "127.0.0.1") -> float:
        body = {**ASKED, "messages": message(shown), "cache_salt": salt}
        body |= {"mm_processor_kwargs": small} if len(shown) > 50_000 else {}
        with httpx.Client(
            transport=httpx.HTTPTransport(local_address=source), timeout=300
        ) as client:
            answer = client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return time.monotonic()

    with ThreadPoolExecutor(6) as pool:
        many = [pool.submit(ask, shown, str(number)) for number, shown in enumerate(large)]
        while not any(each.done() for each in many):
            time.sleep(0.01)
        other = ask(data_url(PIXELS // 2), "other", "127.0.0.2")
        same = ask(data_url(PIXELS // 3), "another")
        ends = [each.result() for each in many]
    assert sum(end > other for end in ends) >= 3
    assert sum(end > same for end in ends) >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_by_its_pictures_is_refused_at_once(
    server: ServerProcess, stream: bool
) -> None:
    body = {**ASKED, "messages": message(flat_url(2000, 2000))}
    answer = httpx.post(
        server.url + "/v1/chat/completions", json={**body, "stream": stream}, timeout=60
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"
    assert "with what it shows is longer than the 511 that are taken" in error["message"]
