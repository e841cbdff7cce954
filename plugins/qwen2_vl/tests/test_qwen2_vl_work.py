"""Where what prompts show is processed: in workers, within limits, once, and without leaks."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flat_pictures import flat_url
from golden_fixtures import GOLDEN
from numpy.typing import NDArray
from PIL import Image

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine_core.configs import HFConfig
from engine_core.engine.media import MediaIntake
from engine_core.errors import EngineDeadError, ErrorCode, QueueFullError, RequestError
from engine_core.inputs import ProcessedPrompt
from engine_core.media import MediaPart, SharedArrays
from engine_core.workers import Member, WorkerPool
from engine_core_qwen2_vl.config import Qwen2VLConfigBuilder
from engine_core_qwen2_vl.inputs import Qwen2VLProcessor

FOLDER = GOLDEN / "qwen2vl-tiny"
IMAGE = 304
RNG = np.random.default_rng(0)
# 256 patches of 588 bytes each, which are shared, and 6 of them, which are not.
LARGE = RNG.integers(0, 256, (224, 224, 3), np.uint8)
OTHER = 255 - LARGE
SMALL = RNG.integers(0, 256, (28, 42, 3), np.uint8)


class Work(MediaIntake):
    """With a pool of its own."""

    def __init__(self, **settings: Any) -> None:
        config = Qwen2VLConfigBuilder.build(HFConfig.from_folder(FOLDER), None)
        # Children of this process that other tests have left, or use.
        self.others = {child.pid for child in psutil.Process().children()}
        self.pool = WorkerPool(
            max_workers=settings.pop("max_workers", 2), max_queued=settings.pop("max_queued", 64)
        )
        super().__init__(Qwen2VLProcessor(config), config, EngineConfig(**settings), self.pool)

    def close(self) -> None:
        super().close()
        self.pool.close()

    def made(self, *images: Any, here: bool = False, **settings: Any) -> ProcessedPrompt:
        made: ProcessedPrompt = self.begun(*images, here=here, **settings).result(60).pop()
        return made

    def begun(
        self,
        *images: Any,
        here: bool = False,
        salts: Any = (),
        client: Any = None,
        longest: int | None = None,
        **options: Any,
    ) -> Any:
        parts = [MediaPart("image", image, f"part.{i}") for i, image in enumerate(images)]
        ids = [5, *[IMAGE, 6] * len(images)]
        asked = ids, {"image": parts}, options, salts
        return self.begin(*asked, here=here, client=client, longest=longest)


@pytest.fixture(scope="module")
def work() -> Iterator[Work]:
    made = Work(mm_processor_cache_gb=0)
    yield made
    made.close()


def data_url(pixels: NDArray[np.uint8] = LARGE, kind: str = "png") -> str:
    out = BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def open_files(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shared_files() -> list[str]:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for path in links if "engine-core" in (name := str(path.readlink()))]


def eventually(seen: Any, expected: Any) -> None:
    deadline = time.monotonic() + 60
    while (last := seen()) != expected:
        assert time.monotonic() < deadline, f"{last} and not {expected}"
        time.sleep(0.01)


def same(one: ProcessedPrompt, other: ProcessedPrompt) -> bool:
    def plain(made: ProcessedPrompt) -> Any:
        items = [
            (item.kind, item.digest, item.span, {k: v.tolist() for k, v in item.features.items()})
            for item in made.media
        ]
        state = {name: value.tolist() for name, value in made.token_state.items()}
        return list(made.token_ids), dict(made.row_state), state, items

    return bool(plain(one) == plain(other))


def test_a_worker_makes_what_this_process_would(work: Work) -> None:
    asked: list[list[Any]] = [[data_url()], [data_url(SMALL)], [data_url(OTHER), data_url(SMALL)]]
    pixels: list[list[Any]] = [[LARGE], [SMALL], [OTHER, SMALL]]
    for urls, arrays in zip(asked, pixels, strict=True):
        here = work.made(*arrays, here=True)
        assert same(work.made(*urls), here)
        assert same(work.made(*arrays), here)
        assert same(work.made(*map(Image.fromarray, arrays)), here)
    large, small = work.made(data_url(), data_url(SMALL)).media
    assert isinstance(large.features, SharedArrays)
    assert isinstance(small.features, dict)
    # Looked at without a copy, and changed for nobody else.
    values = large.features["pixel_values"]
    values[:] = 0
    assert large.features["pixel_values"].any()


def bomb() -> str:
    """A hundred megapixels in a hundred kilobytes."""
    head = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(10_001 * 10_000))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    )
    assert len(content) < 100_000
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (bomb, "10000 x 10000 pixels, and 50000000 are taken at most"),
        (data_url()[:-2000], "the picture is damaged"),
        ("data:image/png;base64,a$b=", "its base64 is wrong"),
        ("https://example.org/a.png", "addresses at 'example.org' are not fetched"),
        ("data:image/gif;base64,R0lGODlhAQABAAAAACw=", "the picture is damaged|no picture"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_place(
    work: Work, url: str | Callable[[], str], said: str
) -> None:
    url = url if isinstance(url, str) else url()
    work.made(data_url(SMALL))  # its first item opens what the pool keeps open
    before = open_files(), work.stats.refused
    with pytest.raises(RequestError, match=f"^part.1: .*({said})") as caught:
        work.made(data_url(SMALL), url)
    assert caught.value.param == "part.1"
    assert (open_files(), work.stats.refused) == (before[0], before[1] + 1)


def test_what_the_family_refuses_keeps_its_words(work: Work) -> None:
    with pytest.raises(RequestError, match=r"part\.0: a picture of 1000 x 1 pixels is too long"):
        work.made(data_url(np.zeros((1, 1000, 3), np.uint8)))
    with pytest.raises(RequestError, match="'colour' is not one of min_pixels, max_pixels"):
        work.made(data_url(), colour=1)
    with pytest.raises(RequestError, match=r"part\.0: what is shown was not handed to a worker"):
        work.made(lambda: None)


def test_what_was_refused_is_forgotten_at_once(work: Work) -> None:
    def parts() -> int:
        return sum(type(each) is MediaPart for each in gc.get_objects())

    gc.collect()
    before = parts()
    gc.disable()  # nothing is to wait for a collection
    try:
        for url in (data_url()[:-2000], "https://example.org/a.png", "data:image/png;base64,a$b="):
            begun = work.begun(url)
            assert isinstance(begun.exception(60), RequestError)
        del begun
        eventually(parts, before)
    finally:
        gc.enable()


def test_what_is_known_is_not_processed_again() -> None:
    work = Work()
    first = work.made(data_url())
    mixed = work.made(data_url(OTHER), data_url(), data_url(SMALL))
    assert (work.stats.cache_queries, work.stats.cache_hits, work.stats.cache_items) == (4, 1, 3)
    assert mixed.media[1].features is first.media[0].features
    assert work.stats.decode_seconds > 0 < work.stats.process_seconds
    without = Work(mm_processor_cache_gb=0)
    assert same(mixed, without.made(data_url(OTHER), data_url(), data_url(SMALL)))
    assert without.stats.cache_items == 0
    # With the workers gone, only what is known can be served.
    work.pool.close()
    turned = work.made(data_url(SMALL), data_url(OTHER), data_url(OTHER))
    assert same(turned, without.made(data_url(SMALL), data_url(OTHER), data_url(OTHER)))
    for others in ({"salts": ("somebody",)}, {"max_pixels": 10_000}):
        with pytest.raises(EngineDeadError):
            work.made(data_url(), **others)
    without.close()


@pytest.mark.parametrize("cache", [0, 1])
def test_what_a_prompt_shows_twice_is_processed_once(cache: int) -> None:
    work = Work(mm_processor_cache_gb=cache)
    for shown, here in (([data_url(), data_url(SMALL), data_url()], False),
                        ([LARGE, SMALL, LARGE.copy()], True),
                        ([LARGE, SMALL, LARGE.copy()], False)):  # fmt: skip
        work.cache.clear()
        one, small, two = (made := work.made(*shown, here=here)).media
        assert one.features is two.features is not small.features
        alone = [work.made(each, here=here).media[0] for each in shown]
        assert [item.digest for item in made.media] == [item.digest for item in alone]
        assert [item.span for item in made.media] == [(1, 65), (66, 72), (73, 137)]
    work.close()


def test_the_cache_keeps_within_its_bytes() -> None:
    work = Work(mm_processor_cache_gb=400_000 / 2**30)
    before = len(shared_files())
    made = []
    for index in range(4):
        made.append(work.made(data_url(LARGE // (index + 1))))
        assert work.stats.cache_bytes <= 400_000
    assert work.stats.cache_items == 2
    assert len(shared_files()) == before + 4
    made.clear()
    assert len(shared_files()) == before + 2
    work.cache.clear()
    assert len(shared_files()) == before
    work.close()


def children(work: Work) -> list[psutil.Process]:
    """Its workers that run."""
    templates = [each for each in psutil.Process().children() if each.pid not in work.others]
    return [child for template in templates for child in template.children()]


def test_a_worker_that_is_killed_ends_its_request_and_a_template_none() -> None:
    work = Work()
    work.made(data_url(SMALL))
    huge = flat_url(3000, 3000)
    begun = work.begun(data_url(SMALL), huge)
    while not (running := children(work)):
        assert not begun.done()
    os.kill(running[0].pid, signal.SIGKILL)
    said = "part: what is shown was not processed: .* ended by SIGKILL"
    with pytest.raises(RequestError, match=said):
        begun.result(30)
    begun = work.begun(data_url(SMALL), huge)
    while not (running := children(work)):
        assert not begun.done()
    parent = running[0].parent()
    assert parent is not None
    os.kill(parent.pid, signal.SIGKILL)
    assert len(begun.result(30).pop().media) == 2
    work.close()


def test_a_worker_ends_when_nobody_waits_for_its_work() -> None:
    work = Work()
    work.made(data_url(SMALL))
    begun = work.begun(flat_url(4000, 4000))
    while not children(work):
        assert not begun.done()
    begun.cancel()
    eventually(lambda: (children(work), work.stats.waiting), ([], 0))
    assert len(work.made(data_url(), data_url(SMALL)).media) == 2
    work.close()


def test_a_download_ends_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect
    with socket.create_server(("127.0.0.1", 0)) as host:
        public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: public)
        monkeypatch.setattr(
            socket.socket, "connect", lambda sock, _: connect(sock, host.getsockname())
        )
        work = Work(allowed_media_domains=("public.example",))
        begun = work.begun("http://public.example/a.png")
        client, _ = host.accept()
        with client:
            client.settimeout(20)
            assert client.recv(1000).startswith(b"GET /a.png")
            assert begun.cancel()
            assert client.recv(1000) == b""
        eventually(lambda: work._sources._turns.num_running, 0)
        assert work.stats.refused == 0
        work.close()


@pytest.mark.parametrize("options", [{}, {"min_pixels": 49_000_000, "max_pixels": 50_000_000}])
def test_large_pictures_hold_up_no_small_ones(options: dict[str, int]) -> None:
    """Neither another's nor those of who shares an address, whatever salts they are sent with."""
    work = Work(max_workers=3)
    work.start()
    side = 100 if options else 5000
    urls = [flat_url(side, side, number) for number in range(8)]
    many = [
        work.begun(url, salts=(number,), client=Member("one", number), **options)
        for number, url in enumerate(urls)
    ]
    for client in (Member("one", "another"), Member("another", None)):
        assert len(work.made(data_url(SMALL), client=client, salts=(client,)).media) == 1
        assert sum(each.done() for each in many) <= 1
        assert work.stats.waiting >= 7
    for each in many:
        each.cancel()
    eventually(lambda: work.stats.waiting, 0)
    work.close()


def test_a_prompt_that_its_pictures_make_too_long_costs_nothing() -> None:
    work = Work()
    work.pool.close()  # so that no worker could tell
    wide = data_url(np.zeros((280, 560, 3), np.uint8))  # of 200 embeddings
    for form in ("png", "jpeg", "webp", "gif", "bmp"):
        url = data_url(np.zeros((280, 560, 3), np.uint8), form)
        for shown, length in (((url,), 202), ((url, wide, url), 604)):
            said = f"a prompt of {length} tokens with what it shows is longer than the {length - 1}"
            with pytest.raises(RequestError, match=f"^part(.0)?: {said}") as refused:
                work.begun(*shown, longest=length - 1)
            assert refused.value.code is ErrorCode.PROMPT_TOO_LONG
            with pytest.raises(EngineDeadError):  # which is asked for one that is not too long
                work.begun(*shown, longest=length).result(60)
    assert work.stats.refused == 10
    # Nor is a prompt of more than that made to count it.
    with pytest.raises(RequestError, match="a prompt of 62658 tokens"):
        work.begun(wide, min_pixels=49_000_000, max_pixels=50_000_000, longest=50_000)
    work.close()


def test_a_size_by_which_nothing_is_refused_wrongly() -> None:
    """A picture that the camera held upright counts as what it will be, or less."""
    work = Work()
    out = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((30, 131, 3), np.uint8)).save(out, "jpeg", exif=exif)
    url = "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
    made = work.made(url)
    again = work.begun(url, salts=("a",), longest=len(made.token_ids)).result(60).pop()
    assert same(made, again)
    known = work.begun(url, longest=len(made.token_ids)).result(60).pop()
    assert same(made, known)
    work.close()


def test_equal_pictures_that_come_at_once_are_processed_once() -> None:
    work = Work()
    work.start()
    huge = flat_url(2000, 2000)
    begun = [work.begun(huge), work.begun(huge, data_url(SMALL)), work.begun(huge, salts=("a",))]
    one, two, other = [each.result(60).pop().media for each in begun]
    assert two[0].features is one[0].features is not other[0].features
    assert two[0].digest == other[0].digest
    assert work.stats.cache_items == 3
    # Whoever comes first may leave, or be refused for something else.
    assert isinstance(work.made(data_url(SMALL)).media[0].features, dict)
    black = flat_url(2000, 1999)
    for bad in (None, "data:image/png;base64,a$b="):
        shown = [black] if bad is None else [data_url(OTHER), bad]
        first, second = work.begun(*shown), work.begun(shown[0])
        if bad is None:
            assert first.cancel()
        else:
            with pytest.raises(RequestError, match="its base64 is wrong"):
                first.result(60)
        assert len(second.result(60).pop().media) == 1
    # A uuid is known as soon as its picture is.
    named = [
        work.begin(
            [5, IMAGE], {"image": [MediaPart("image", value, "part", "u")]}, {}, (), here=False
        )
        for value in (data_url(LARGE // 3), None)
    ]
    one, two = [each.result(60).pop().media for each in named]
    assert one[0].features is two[0].features
    # And nothing but the cache holds them.
    gc.collect()
    gc.disable()
    try:
        begun = [work.begun(data_url(LARGE // 5)), work.begun(data_url(LARGE // 5), huge)]
        for each in begun:
            each.result(60).clear()
        del each, begun, one, two, other
        work.cache.clear()
        eventually(shared_files, [])
    finally:
        gc.enable()
    work.close()


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by salt"])
def test_nobody_waits_for_all_that_another_client_shows(named: bool) -> None:
    work = Work()
    work.start()
    done = []

    def ask(client: str, *shown: str) -> Any:
        whose = {"client": client} if named else {"salts": (client,)}
        begun = work.begun(*shown, **whose)
        begun.add_done_callback(lambda _: done.append(client))
        return begun

    own = data_url()
    huge = [flat_url(1500, 1500 + i, i) for i in range(6)]
    begun = [ask("a", each) for each in huge[:4]]
    # What the other one shows is also in a prompt that waits behind these: it is not waited for.
    begun += [ask("a", own, huge[4]), ask("b", own), ask("a", own, huge[5])]
    left = [ask("a", huge[0], huge[1]), ask("b", data_url(OTHER))]
    assert all(each.cancel() for each in left)
    assert [len(each.result(60).pop().media) for each in begun] == [1, 1, 1, 1, 2, 1, 2]
    # Behind one of the other's, or some more that were done before it came: not behind all.
    assert done.index("b", 2) < 6
    assert work.stats.waiting == 0
    work.close()


def test_closing_while_pictures_wait_tells_each() -> None:
    work = Work(max_queued=3, mm_processor_cache_gb=0)
    work.start()
    before = open_files()
    huge = flat_url(3000, 3000)
    begun = [work.begun(huge) for _ in range(4)]
    assert work.stats.waiting == 4
    with pytest.raises(QueueFullError, match="4 requests wait for the processor of pictures"):
        work.begun(huge)
    begun[-1].cancel()
    begun.append(work.begun(huge))
    work.pool.close()
    for each in begun[:3] + begun[4:]:
        assert isinstance(each.exception(30), EngineDeadError)
    eventually(lambda: work.stats.waiting, 0)
    eventually(lambda: open_files() <= before, True)


CONFIG = EngineConfig(kv_cache_memory=2**24, max_model_len=256, skip_tokenizer_init=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def shown(*images: Any) -> Any:
    ids = [5, *[IMAGE, 6] * len(images)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(images)}}


ASKED = [(LARGE, OTHER), (OTHER,), (SMALL, LARGE)]


@cache
def offline(ranks: int) -> list[list[int]]:
    """Tokens of the arrays of each of :data:`ASKED`, and of the first ones turned."""
    prompts = [shown(*images) for images in (*ASKED, ASKED[0][::-1])]
    with LLM(str(FOLDER), CONFIG.replace(tensor_parallel_size=ranks)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_the_same_by_every_way(ranks: int) -> None:
    prompts = [shown(*images) for images in ASKED]
    urls = [shown(*map(data_url, images)) for images in ASKED]
    gc.collect()  # what other tests left
    *expected, turned = offline(1)
    assert turned != expected[0]
    config = CONFIG.replace(tensor_parallel_size=ranks, enable_prefix_caching=False)

    async def served(engine: AsyncEngine, prompt: Any) -> list[int]:
        async with await engine.add_request(prompt, GREEDY) as stream:
            return [t async for out in stream for each in out.outputs for t in each.token_ids]

    async def scene() -> None:
        engine = await AsyncEngine.start(str(FOLDER), config)
        try:
            for given in (urls, prompts):
                for _ in range(2):
                    tokens = await asyncio.gather(*(served(engine, each) for each in given))
                    assert tokens == expected
            stats = engine.frontend.media.stats
            assert stats.cache_hits >= 10
            # The cache has the files of the two large ones, in two forms; the engine has none.
            assert len(shared_files()) <= 4
            eventually(lambda: shared_in(engine.pid), 0)
        finally:
            await engine.close()
        assert shared_files() == []

    asyncio.run(scene())
    assert offline(ranks) == [*expected, turned]


def test_pictures_are_prepared_beside_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = 0
    at_steps: list[int] = []
    process = Qwen2VLProcessor.process_media

    def counted(self: Any, ids: Any, media: Any, options: Any) -> Any:
        nonlocal prepared
        made = process(self, ids, media, options)
        prepared += bool(media)
        return made

    monkeypatch.setattr(Qwen2VLProcessor, "process_media", counted)
    prompts = [shown(np.roll(SMALL, shift, 1)) for shift in range(42)]
    with LLM(str(FOLDER), CONFIG.replace(max_num_batched_tokens=64)) as llm:

        def ask(given: Any, **more: Any) -> list[list[int]]:
            nonlocal prepared
            prepared = 0
            at_steps.clear()
            return [each.outputs[0].token_ids for each in llm.generate(given, GREEDY, **more)]

        # Priorities are those of all prompts, so that all are known before the first step.
        expected = ask(prompts, priority=[0] * 41 + [1])
        looks = lambda module, inputs: at_steps.append(prepared)  # noqa: E731
        llm.apply_model(lambda model: model.model.register_forward_pre_hook(looks))
        assert ask(prompts, priority=[0] * 41 + [1]) == expected
        assert at_steps[0] == 42
        assert ask(prompts) == expected
        # A step is filled by 8 prompts, and 16 more are prepared ahead.
        assert 8 <= at_steps[0] <= 8 + 16 < 42 == at_steps[-1]
        # What cannot be taken is told when it is there, and nothing of the others is kept.
        bad = [*prompts[:40], shown(SMALL[:, :0])]
        with pytest.raises(RequestError, match=r"^prompt 40: multi_modal_data.image.0: an"):
            llm.generate(bad, GREEDY)
        assert at_steps
        assert not llm.engine.has_unfinished
        assert ask(prompts) == expected


def shared_in(pid: int) -> int:
    """Open files of shared memory in the process and its children."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    names = []
    for process in family:
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                names.append(str(path.readlink()))
            except FileNotFoundError:
                continue
    return sum("engine-core-media" in name for name in names)


def test_nothing_is_left_after_aborts_and_the_death_of_the_engine() -> None:
    gc.collect()  # what other tests left
    config = CONFIG.replace(mm_processor_cache_gb=0)
    long = GREEDY.replace(max_tokens=100)

    async def scene() -> None:
        engine = await AsyncEngine.start(str(FOLDER), config)
        try:
            streams = [await engine.add_request(shown(data_url()), long) for _ in range(4)]
            assert shared_in(engine.pid) <= 4
            for stream in streams[:2]:
                await stream.abort()
            await streams[2].aclose()
            async for output in streams[3]:
                assert output.outputs[0].error is None
                assert len(shared_files()) == (not output.finished)
            eventually(lambda: shared_in(engine.pid), 0)
            # Cancelled while it is processed, which makes few tokens of it.
            huge = shown(flat_url(3000, 3000))
            huge["mm_processor_kwargs"] = {"max_pixels": 10_000}
            task = asyncio.create_task(engine.add_request(huge, long))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.frontend.media.stats.waiting:
                await asyncio.sleep(0.01)
            assert shared_files() == []
            stream = await engine.add_request(shown(data_url()), long)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert shared_files() == []
        finally:
            await engine.close()

    asyncio.run(scene())


def test_memory_of_requests_under_way_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # One large picture is within it, two are not.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("engine_core.engine.frontend._SHARE_OF_MEMORY", 225_000 / memory)
    # None of them is done before the last one is asked for.
    config, long = CONFIG.replace(max_model_len=4096), GREEDY.replace(max_tokens=2000)

    async def scene() -> None:
        engine = await AsyncEngine.start(str(FOLDER), config)
        try:
            streams = [await engine.add_request(shown(data_url()), long) for _ in range(3)]
            streams.append(await engine.add_request(shown(data_url(OTHER)), long))
            with pytest.raises(QueueFullError, match="of 4 requests under way take 0 MiB"):
                await engine.add_request(shown(data_url(SMALL)), long)
            streams.append(await engine.add_request([5, 6], long))
            await streams[3].aclose()
            await engine.add_request(shown(data_url(SMALL)), long)
        finally:
            await engine.close()

    asyncio.run(scene())
