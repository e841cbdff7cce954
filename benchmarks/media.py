"""Measure pictures on a GPU: encoders beside transformers', first tokens, streams and gaps.

    python benchmarks/media.py                          # everything, for both shapes
    python benchmarks/media.py encoder --shapes qwen2_vl_7b --seconds 3
    python benchmarks/media.py gaps --rate 1.5 --seconds 40
    python benchmarks/media.py --tiny                   # tiny models on a CPU, to try the script

All weights are random. Each part prints a table.

- ``attention``: PyTorch's kernels for the segments of an encoder, in TFLOP/s.
- ``encoder``: pictures a second, ours and transformers' in turn in one process, both from features
  in host memory; the time of a replay alone; and the floor, by operations at ``--tflops`` and by
  the bytes of the weights at ``--bandwidth``.
- ``first``: a picture and 1,000 tokens of text, of nobody else: milliseconds to the first token,
  with a new picture, with one that was shown before behind another text, and of text alone that is
  as long.
- ``streams``: 64 requests at once, each with a picture: tokens a second, and of texts as long.
- ``gaps``: text streams, beside which pictures of 1786 x 2526 arrive all the time, or texts as
  long: the gaps between tokens, by the events of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams, own_process
from engine_core.configs import HFConfig
from engine_core.engine.trace import EngineTrace, write_trace
from engine_core.kernels import Segments, attend_segments
from engine_core.registry import build_registry

QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
        "mlp_ratio": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
# InternVL2.5 8B in transformers' layout, whose text model has the sizes of InternLM2.5 7B.
INTERNVL = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "torch_dtype": "bfloat16",
    "downsample_ratio": 0.5,
    "image_token_id": 92546,
    "image_seq_length": 256,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 92553,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "internvl_vision",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
}
SHAPES: dict[str, dict[str, Any]] = {"qwen2_vl_7b": QWEN2_VL, "internvl2_5_8b": INTERNVL}
PARTS = ("attention", "encoder", "first", "streams", "gaps")
LARGE = (2526, 1786)
# Mean and standard deviation of red, green and blue, of Qwen2-VL and CLIP.
CLIP = (
    torch.tensor([0.48145466, 0.4578275, 0.40821073]),
    torch.tensor([0.26862954, 0.26130258, 0.27577711]),
)


def shape_of(name: str, options: argparse.Namespace, *, text_layers: int | None = None) -> Any:
    """A config; with few layers and narrow if it is to be tried on a CPU."""
    config = json.loads(json.dumps(SHAPES[name]))
    text = config.get("text_config", config)
    if options.tiny:
        config["torch_dtype"] = "float32"
        text |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        text |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
        }
        if config is text:
            text["rope_scaling"]["mrope_section"] = [2, 3, 3]
            config["vision_config"] |= {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
            }
        else:
            text["head_dim"] = 16
            config["vision_config"] |= {"hidden_size": 32, "intermediate_size": 48}
            config["vision_config"] |= {"num_hidden_layers": 2, "num_attention_heads": 2}
            config["vision_config"] |= {"image_size": [56, 56]}
            config["image_seq_length"] = 4
    if text_layers is not None:
        text["num_hidden_layers"] = text_layers
    return config


def written(config: Any, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "internvl":
        context = config["image_token_id"]
        tokens = {"<img>": context - 2, "</img>": context - 1, "<IMG_CONTEXT>": context}
        (folder / "added_tokens.json").write_text(json.dumps(tokens))
        tile = dict(zip(("height", "width"), config["vision_config"]["image_size"], strict=True))
        pixels = {"crop_to_patches": True, "min_patches": 1, "max_patches": 12, "size": tile}
    else:  # as published, so that a picture of 1786 x 2526 has 5,760 tokens
        pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return str(folder)


def tower_work(config: Any, patches: int) -> tuple[float, float]:
    """Operations of an item with so many patches that see each other, and bytes of the weights."""
    vision = config["vision_config"]
    qwen = "embed_dim" in vision
    width = vision["embed_dim"] if qwen else vision["hidden_size"]
    inner = int(width * vision["mlp_ratio"]) if qwen else vision["intermediate_size"]
    depth = vision["depth"] if qwen else vision["num_hidden_layers"]
    out = config.get("text_config", config)["hidden_size"]
    merged = 4 * width
    layers = depth * (4 * width * width + 2 * width * inner)
    merger = merged * (merged if qwen else out) + (merged if qwen else out) * out
    attention = 4.0 * patches * patches * width * depth
    return 2.0 * patches * (layers + merger / 4) + attention, 2.0 * (layers + merger)


def pictures(draw: np.random.Generator, side: int | tuple[int, int], count: int) -> list[Any]:
    """Random pictures ``[H, W, 3]``."""
    high, wide = (side, side) if isinstance(side, int) else side
    return [draw.integers(0, 256, (high, wide, 3), dtype=np.uint8) for _ in range(count)]


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Each row as it comes."""
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print_row(row)


def print_row(row: Sequence[Any]) -> None:
    cells = (f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row)
    print(f"| {' | '.join(cells)} |", flush=True)


def synchronize(options: argparse.Namespace) -> None:
    if not options.tiny:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], options: argparse.Namespace, seconds: float) -> float:
    """Seconds of one call, by as many as take so long together."""
    synchronize(options)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        for _ in range(1 if options.tiny else 4):
            work()
            count += 1
        synchronize(options)
    return (time.perf_counter() - begin) / count


def attention(options: argparse.Namespace) -> None:
    device = torch.device("cpu" if options.tiny else "cuda")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    sizes = [(2, 16, 2, 8)] if options.tiny else []
    if not options.tiny:
        sizes = [(8, 1024, 16, 80), (2, 5476, 16, 80), (1, 23040, 16, 80), (13, 1025, 16, 64)]
    rows = []
    for count, size, heads, width in sizes:
        qkv = torch.randn(count * size, 3, heads, width, device=device, dtype=dtype)
        q, k, v = qkv.unbind(1)
        segments = Segments([(count, size)], device)
        batched = [part.unflatten(0, (count, size)).transpose(1, 2) for part in (q, k, v)]
        kernels: dict[str, Callable[[], object]] = {
            "attend_segments": lambda q=q, k=k, v=v, s=segments: attend_segments(q, k, v, s),
        }
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):

            def backend(parts: Any = batched, name: str = name) -> object:
                chosen = getattr(torch.nn.attention.SDPBackend, name)
                with torch.nn.attention.sdpa_kernel(chosen):
                    return torch.nn.functional.scaled_dot_product_attention(*parts)

            kernels[name.split("_")[0].lower()] = backend
        row: list[Any] = [f"{count} x {size}", heads, width]
        for work in kernels.values():
            try:
                work()  # cuDNN looks for a plan at the first call
                taken = seconds_of(work, options, options.seconds / 4)
                row.append(4.0 * count * size * size * heads * width / taken / 1e12)
            except RuntimeError:
                row.append("none")
        rows.append(row)
    print_table("Attention, TFLOP/s", ("segments", "heads", "width", *kernels), rows)


def theirs_of(config: Any, options: argparse.Namespace) -> Callable[[list[Any]], object]:
    """Transformers' encoder of these features, on the device."""
    import transformers

    device = torch.device("cpu" if options.tiny else "cuda")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    classes: Any = transformers
    how: dict[str, Any] = {"attn_implementation": "sdpa"}
    values = {key: value for key, value in config.items() if key != "model_type"}
    if "embed_dim" in config["vision_config"]:
        outer = ("vision_config", "image_token_id", "video_token_id", "architectures")
        text = {key: value for key, value in values.items() if key not in outer}
        text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_type": "default"}
        text["rope_parameters"] |= {"rope_theta": text.pop("rope_theta")}
        given = {**{key: values[key] for key in outer[:3]}, "text_config": text}
        with device:  # a CPU draws its random weights for most of a minute
            model = classes.Qwen2VLForConditionalGeneration._from_config(
                classes.Qwen2VLConfig(**given), dtype=dtype, **how
            )
        tower = model.model.visual.to(device).eval()

        vision = config["vision_config"]
        channels = (3, -1, vision["patch_size"] ** 2)
        mean, std = (column.to(device).view(3, 1, 1) for column in CLIP)

        def encode(items: list[Any]) -> object:
            pixels = sent(torch.cat([item["pixel_values"] for item in items]), device)
            grids = torch.stack([item["grid_thw"] for item in items])
            if pixels.dtype is torch.uint8:  # as ours: a frame of bytes
                pixels = (pixels.unflatten(1, channels) / 255 - mean) / std
                frames = vision["temporal_patch_size"]
                pixels = pixels.expand(-1, -1, frames, -1).flatten(1)
            return tower(pixels.to(dtype), grid_thw=sent(grids, device))

    else:
        with device:
            model = classes.InternVLForConditionalGeneration._from_config(
                classes.InternVLConfig(**values), dtype=dtype, **how
            )
        whole = model.model.to(device).eval()
        mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
        std = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)

        def encode(items: list[Any]) -> object:
            tiles = sent(torch.cat([item["pixel_values"] for item in items]), device)
            if tiles.dtype is torch.uint8:  # as ours
                tiles = (tiles.permute(0, 3, 1, 2) / 255 - mean) / std
            return whole.get_image_features(pixel_values=tiles.to(dtype))

    return encode


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def settings(options: argparse.Namespace, **more: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024 if options.tiny else 16384,
        "max_num_seqs": 8 if options.tiny else 128,
        "encoder_cache_tokens": 512 if options.tiny else 65536,
        "hf_overrides": {"tie_word_embeddings": False},
    }
    if options.tiny:
        given |= {"device": "cpu", "kv_cache_memory": 64 * 2**20}
    return EngineConfig(**(given | more))


def processed(config: Any, prompt: dict[str, Any]) -> Any:
    """A prompt as the family's processor gives it."""
    with tempfile.TemporaryDirectory() as folder:
        path, registry = Path(written(config, Path(folder))), build_registry()
        built = registry.model_config(HFConfig.from_folder(path), path)
        processor: Any = registry.input_processor(built)
    media = {kind: [value] for kind, value in prompt["multi_modal_data"].items()}
    return processor.process_media(prompt["prompt_token_ids"], media, {})


def features_of(config: Any, picture: Any) -> dict[str, torch.Tensor]:
    """Features that the model computes a picture's embeddings from."""
    (item,) = processed(config, Prompts(config).shown(picture, 1, 1)).media
    return {key: torch.from_numpy(np.array(value)) for key, value in item.features.items()}


def sides(options: argparse.Namespace) -> tuple[int, ...]:
    return (56,) if options.tiny else (448, 1024)


def encoder(options: argparse.Namespace) -> None:
    print_table(
        f"Pictures a second from host memory; the floor at {options.tflops} TFLOP/s",
        ("shape", "side", "batch", "ours", "transformers", "ratio", "replay alone", "floor"),
        encoder_rows(options),
    )


@torch.inference_mode()
def encoder_rows(options: argparse.Namespace) -> Iterator[list[Any]]:
    """A row of the table for each shape, side and batch."""
    draw = np.random.default_rng(0)
    for name in options.shapes:
        config = shape_of(name, options, text_layers=1)
        theirs = theirs_of(config, options)
        with tempfile.TemporaryDirectory() as folder:
            path = written(config, Path(folder))
            memory = 64 * 2**20 if options.tiny else 2**30
            with LLM(path, settings(options, kv_cache_memory=memory)) as llm:
                runner: Any = llm.engine.core.executor.runner
                media = runner._media

                def ours(items: list[Any], media: Any = media) -> list[torch.Tensor]:
                    given = None if media.graphs is None else media.graphs.run("image", items)
                    if given is None:
                        given = media._forward.embed_media("image", [media._sent(i) for i in items])
                    return list(given)

                for side in sides(options):
                    (picture,) = pictures(draw, side, 1)
                    item = features_of(config, picture)
                    for batch in options.batches:
                        figures = alternated(ours, theirs, runner, item, batch, options)
                        if "grid_thw" in item:
                            segments = [int(item["grid_thw"].prod())]
                        else:
                            patch = config["vision_config"]["patch_size"][0]
                            tile = item["pixel_values"].shape[1]
                            segments = [(tile // patch) ** 2 + 1] * len(item["pixel_values"])
                        works = [tower_work(config, size) for size in segments]
                        flops = sum(work[0] for work in works) / options.tflops / 1e12
                        nbytes = works[0][1] / batch / options.bandwidth / 1e12
                        yield [name, side, batch, *figures, 1 / max(flops, nbytes)]


def alternated(
    ours: Callable[[list[Any]], object],
    theirs: Callable[[list[Any]], object],
    runner: Any,
    item: Any,
    batch: int,
    options: argparse.Namespace,
) -> list[Any]:
    """Pictures a second of both, in turn, their ratio, and of our graph by itself."""
    items = [item] * batch
    for _ in range(2):
        ours(items)
        theirs(items)
    while runner.capture_next():
        pass
    rounds = 1 if options.tiny else 3
    taken = [
        (seconds_of(lambda: ours(items), options, options.seconds),
         seconds_of(lambda: theirs(items), options, options.seconds))
        for _ in range(rounds)
    ]  # fmt: skip
    mine, other = (batch / statistics.median(each) for each in zip(*taken, strict=True))
    alone: Any = "none"
    graphs = runner._media.graphs
    if graphs is not None and graphs.run("image", items) is not None:
        graph = next(reversed(graphs._graphs.values())).graph
        alone = batch / seconds_of(graph.replay, options, options.seconds)
    return [mine, other, mine / other, alone]


class Prompts:
    """Prompts with pictures, and texts that are as long."""

    def __init__(self, config: Any, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self._token = config["image_token_id"]
        self._most = min(config.get("text_config", config)["vocab_size"], 50000)

    def text(self, count: int) -> list[int]:
        return [int(token) for token in self._draw.integers(10, self._most, count)]

    def shown(self, picture: Any, before: int, after: int) -> dict[str, Any]:
        ids = [*self.text(before), self._token, *self.text(after)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}}

    def pictures(self, side: int | tuple[int, int], count: int) -> list[Any]:
        return pictures(self._draw, side, count)


def length_of(config: Any, prompt: dict[str, Any]) -> int:
    """Tokens of a prompt with its pictures."""
    return len(processed(config, prompt).token_ids)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def models(options: argparse.Namespace, **more: Any) -> Iterator[tuple[str, Any, LLM]]:
    for name in options.shapes:
        config = shape_of(name, options)
        with (
            tempfile.TemporaryDirectory() as folder,
            LLM(written(config, Path(folder)), settings(options, **more)) as llm,
        ):
            llm.warmup()
            yield name, config, llm


def first(options: argparse.Namespace) -> None:
    rows = []
    words, turns = (20, 2) if options.tiny else (1000, 7)
    for name, config, llm in models(options):
        prompts = Prompts(config)

        def wait(prompt: Any, llm: LLM = llm) -> float:
            begin = time.perf_counter()
            llm.generate(prompt, greedy(1))
            return 1000 * (time.perf_counter() - begin)

        for side in sides(options):
            shown = prompts.pictures(side, turns + 2)
            size = length_of(config, prompts.shown(shown[0], words // 2, words // 2))
            taken: dict[str, list[float]] = {"new": [], "again": [], "text": []}
            for turn, picture in enumerate(shown):
                # Behind another text each time: no block of the cache is taken.
                new = wait(prompts.shown(picture, words // 2, words // 2))
                again = wait(prompts.shown(picture, words // 2, words // 2))
                text = wait(prompts.text(size))
                if turn >= 2:
                    for key, value in (("new", new), ("again", again), ("text", text)):
                        taken[key].append(value)
            medians = [statistics.median(values) for values in taken.values()]
            rows.append([name, side, size, *medians, medians[1] / medians[2]])
    print_table(
        f"Milliseconds to the first token of a picture and {words} tokens",
        ("shape", "side", "tokens", "new", "shown before", "text alone", "ratio"),
        rows,
    )


def streams(options: argparse.Namespace) -> None:
    print_table(
        "Tokens a second of requests with a picture each",
        ("shape", "side", "requests", "prompt", "output", "pictures", "texts as long", "ratio"),
        streams_rows(options),
    )


def streams_rows(options: argparse.Namespace) -> Iterator[list[Any]]:
    """A row of the table for each shape and side."""
    count, words, out = (4, 10, 4) if options.tiny else (64, 100, 128)
    for name, config, llm in models(options, enable_prefix_caching=False):
        prompts = Prompts(config)
        for side in sides(options):
            shown = [prompts.shown(p, words, words) for p in prompts.pictures(side, 2 * count)]
            size = length_of(config, shown[0])
            texts = [prompts.text(size) for _ in range(2 * count)]
            each = []
            for kind in (shown, texts):
                llm.generate(kind[:count], greedy(out))
                begin = time.perf_counter()
                llm.generate(kind[count:], greedy(out))
                each.append(count * out / (time.perf_counter() - begin))
            yield [name, side, count, size, out, *each, each[0] / each[1]]


async def _gaps(path: str, config: Any, name: str, options: argparse.Namespace) -> None:
    count, rate = (3, 4.0) if options.tiny else (72, options.rate)
    seconds = options.seconds
    side = (112, 84) if options.tiny else LARGE
    engine = await AsyncEngine.start(
        path, settings(options, enable_prefix_caching=False), warm_up=not options.tiny
    )
    spans: list[tuple[str, float, float]] = []
    if options.trace is not None:
        engine.start_trace()
    try:
        prompts = Prompts(config)
        shown = prompts.pictures(side, 4 if options.tiny else 16)
        size = length_of(config, prompts.shown(shown[0], 10, 10))
        for kind in ("texts", "pictures", "texts", "pictures"):
            gaps: list[float] = []
            waits: list[float] = []
            ended = asyncio.Event()

            async def stream(gaps: list[float] = gaps, ended: asyncio.Event = ended) -> None:
                while not ended.is_set():
                    given = await engine.add_request(prompts.text(64), greedy(400))
                    before = None
                    async for output in given:
                        del output
                        now = time.perf_counter()
                        if before is not None:
                            gaps.append(now - before)
                        before = now
                        if ended.is_set():
                            await given.abort()
                            break

            async def arrival(number: int, kind: str = kind, waits: list[float] = waits) -> None:
                prompt: Any = prompts.text(size)
                if kind == "pictures":
                    # Another picture each time, as its first pixel says.
                    picture = shown[number % len(shown)].copy()
                    picture[0, 0] = number >> 16 & 255, number >> 8 & 255, number & 255
                    prompt = prompts.shown(picture, 10, 10)
                begin = time.perf_counter()
                async for _ in await engine.add_request(prompt, greedy(2)):
                    waits.append(time.perf_counter() - begin)
                    break

            readers = [asyncio.create_task(stream()) for _ in range(count)]
            await asyncio.sleep(seconds / 8)
            gaps.clear()
            draw, begin, due, number = random.Random(1), time.perf_counter(), 0.0, 0
            tasks = []
            while (due := due + draw.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
                number += 1
                tasks.append(asyncio.create_task(arrival(number + len(spans) * 100000)))
            await asyncio.gather(*tasks)
            spans.append((kind, begin, time.perf_counter()))
            seen = sorted(1000 * gap for gap in gaps)
            ended.set()
            await asyncio.gather(*readers)
            p50, p99 = (seen[min(len(seen) - 1, int(part * len(seen)))] for part in (0.5, 0.99))
            mean = 1000 * statistics.mean(waits) if waits else math.nan
            print_row([name, kind, size, number, len(seen), p50, p99, seen[-1], mean])
        if options.trace is not None and (trace := await engine.take_trace()) is not None:
            print_steps(trace, spans)
            write_trace(options.trace, trace)
    finally:
        await engine.close()


def print_steps(trace: EngineTrace, spans: Sequence[tuple[str, float, float]]) -> None:
    """Times of steps in which streams decoded, by what these held, and the longest of each span."""
    records = [*trace.steps]
    for kind, begin, end in spans:
        taken: dict[str, list[float]] = {}
        longest = []
        for before, record in itertools.pairwise(records):
            if not (begin <= before.done and record.done <= end and record.decode_rows):
                continue
            tokens = sum(count for _, _, count in record.prompts)
            held = "prompts" if tokens > 1 else ""
            if record.media:
                edges = ("begun" if each[0] == 0 else "" for each in record.media)
                edges = (*edges, *("ended" if each[1] == each[2] else "" for each in record.media))
                held = ", ".join(filter(None, (held, "pictures", *sorted({*edges}))))
            gap = 1000 * (record.done - before.done)
            taken.setdefault(held or "nothing", []).append(gap)
            longest.append((gap, record, tokens))
        head = ("beside", "steps", "p50 ms", "p90 ms", "p99 ms", "largest ms")
        rows = []
        for held, each in sorted(taken.items()):
            each.sort()
            quantiles = [each[int(part * (len(each) - 1))] for part in (0.5, 0.9, 0.99, 1)]
            rows.append([held, len(each), *quantiles])
        print_table(f"Steps of streams beside {kind}", head, rows)
        longest.sort(key=lambda each: -each[0])
        head = ("ms", "way", "prompt tokens", "embeddings", "encoder ms", "host ms", "early")
        rows = [
            [
                gap,
                record.way,
                tokens,
                " ".join(f"{first}-{last}" for first, last, _ in record.media),
                1000 * record.encoded,
                1000 * (record.submitted - record.begun),
                record.early,
            ]
            for gap, record, tokens in longest[:12]
        ]
        print_table(f"The longest of {len(longest)} steps beside {kind}", head, rows)


def gaps(options: argparse.Namespace) -> None:
    head = ("shape", "beside", "tokens each", "arrivals", "gaps", "p50 ms", "p99 ms", "largest ms")
    print_table("Gaps between tokens of text streams", (*head, "first token, mean ms"), [])
    for name in options.shapes:
        config = shape_of(name, options)
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(_gaps(written(config, Path(folder)), config, name, options))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with commas between them")
    parser.add_argument("--batches", default="1,8", help="pictures that are encoded at once")
    parser.add_argument("--seconds", type=float, default=None, help="of each measurement")
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals a second beside streams")
    parser.add_argument("--tflops", type=float, default=700.0, help="that are attainable")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that are attainable")
    parser.add_argument("--trace", type=Path, help="of gaps: a file; long steps are printed")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    options.shapes = options.shapes.split(",")
    options.batches = [int(part) for part in options.batches.split(",")]
    own_process.claim()
    given = options.seconds
    for part in options.parts or PARTS:
        usual = 40.0 if part == "gaps" else 2.0
        if options.tiny:
            usual = 1.0 if part == "gaps" else 0.01
        options.seconds = usual if given is None else given
        {"attention": attention, "encoder": encoder, "first": first, "streams": streams}.get(
            part, gaps
        )(options)


if __name__ == "__main__":
    main()
