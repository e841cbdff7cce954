"""Pictures and videos through the whole engine, against outputs of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    check_output,
    golden_llm,
    golden_prompts,
    greedy_params,
)
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from engine_core import LLM, RequestOutput, SamplingParams
from engine_core.errors import EngineDeadError

NAME = "qwen2vl-tiny"
IMAGE, VIDEO = 304, 305
SETTINGS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    # Chunks end inside of pictures.
    "chunks-of-5": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "room-for-one-picture": {"encoder_cache_tokens": 12},
}


@cache
def images(index: int) -> list[dict[str, Any]]:
    """The features of each image of a prompt of the fixture."""
    folder = GOLDEN / NAME
    prompt = json.loads((folder / "expected.json").read_text())["prompts"][index]
    if "pixel_values" not in prompt:
        return []
    tensors = load_file(folder / "expected.safetensors")
    grids = tensors[prompt["image_grid_thw"]]
    pixels = tensors[prompt["pixel_values"]].split(grids.prod(-1).tolist())
    return [
        {"pixel_values": values, "image_grid_thw": grid}
        for values, grid in zip(pixels, grids, strict=True)
    ]


def every_prompt() -> list[Any]:
    return [
        {"prompt_token_ids": prompt.input_ids, "multi_modal_data": {"image": images(index)}}
        for index, prompt in enumerate(golden_prompts(NAME))
    ]


def check(outputs: list[RequestOutput]) -> None:
    for output, prompt in zip(outputs, golden_prompts(NAME), strict=True):
        check_output(output, prompt)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_and_logits_are_those_of_the_original_code(
    settings: dict[str, Any], device: str
) -> None:
    with golden_llm(NAME, device=device, **settings) as llm:
        check(llm.generate(every_prompt(), greedy_params(NAME, with_prompt=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 13])
def test_on_a_gpu_a_chunk_may_end_anywhere(budget: int) -> None:
    """Steps whose logits of the prompt nobody wants are captured."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
    with golden_llm(NAME, device="cuda", **sizes) as llm:
        check(llm.generate(every_prompt(), greedy_params(NAME)))


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_on_a_gpu_graphs_take_pictures_and_change_nothing(eager: bool) -> None:
    """Cold, from the encoder cache, and with encoders that are captured after they came twice."""
    prompts = [each for each in every_prompt() if each["multi_modal_data"]["image"]]
    expected = [p.new_tokens for i, p in enumerate(golden_prompts(NAME)) if images(i)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    # So little room that each of the pictures is computed anew.
    small = {"enable_prefix_caching": False, "encoder_cache_tokens": 24}
    with golden_llm(NAME, device="cuda", eager=eager, **small) as llm:
        runner = llm.engine.core.executor.runner
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected, strict=True):
                (first,) = llm.generate(prompt, params.replace(max_tokens=1))
                assert runner._ran[0] == ("eager" if eager else "graph")
                assert first.outputs[0].token_ids == tokens[:1]
            outputs = llm.generate(prompts * 2, params)
            assert [each.outputs[0].token_ids for each in outputs] == expected * 2
            llm.warmup()
        assert eager or len(runner._media.graphs._graphs) > 0


def test_prompts_by_themselves_are_the_same_cold_and_from_the_prefix_cache() -> None:
    with golden_llm(NAME, block_size=4) as llm:
        for cached in (False, True):
            for given, prompt in zip(every_prompt(), golden_prompts(NAME), strict=True):
                (output,) = llm.generate(given, greedy_params(NAME))
                check_output(output, prompt)
                expected = (len(prompt.input_ids) - 1) // 4 * 4 if cached else 0
                assert output.metrics.num_cached_tokens == expected, prompt.name


def test_another_picture_in_its_place_is_not_taken_from_the_prefix_cache() -> None:
    index = next(i for i, prompt in enumerate(golden_prompts(NAME)) if images(i))
    given, prompt = every_prompt()[index], golden_prompts(NAME)[index]
    (image,) = images(index)
    other = {**image, "pixel_values": -image["pixel_values"]}
    with golden_llm(NAME, block_size=4) as llm:
        (first,) = llm.generate(
            {**given, "multi_modal_data": {"image": other}}, greedy_params(NAME)
        )
        (output,) = llm.generate(given, greedy_params(NAME))
    assert first.outputs[0].token_ids != prompt.new_tokens
    check_output(output, prompt)


def test_one_placeholder_stands_for_a_whole_picture() -> None:
    short = [
        [
            token
            for token, next_one in pairwise([*p.input_ids, 0])
            if (token, next_one) != (IMAGE, IMAGE)
        ]
        for p in golden_prompts(NAME)
    ]
    given = [{**p, "prompt_token_ids": ids} for p, ids in zip(every_prompt(), short, strict=True)]
    assert sum(map(len, short)) < sum(len(p.input_ids) for p in golden_prompts(NAME))
    with golden_llm(NAME) as llm:
        outputs = llm.generate(given, greedy_params(NAME, with_prompt=True))
    for output, prompt in zip(outputs, golden_prompts(NAME), strict=True):
        assert output.prompt_token_ids == prompt.input_ids
    check(outputs)


def test_preempted_requests_are_the_same() -> None:
    with golden_llm(NAME, block_size=4) as llm:
        plan = llm.engine.cache_plan
    memory = plan.bytes_per_block * (1 + plan.cache_config.max_blocks(160, 256))
    settings = {"block_size": 4, "kv_cache_memory": memory, "max_num_batched_tokens": 256}
    with golden_llm(NAME, **settings) as llm:
        outputs = llm.generate(every_prompt() * 3, greedy_params(NAME))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for start in (0, 5, 10):
        check(outputs[start : start + 5])


def picture(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), np.uint8)


@cache
def transformers_model() -> Any:
    from transformers import Qwen2VLForConditionalGeneration

    theirs: Any = Qwen2VLForConditionalGeneration
    return theirs.from_pretrained(GOLDEN / NAME, dtype=torch.float32).eval()


@torch.inference_mode()
def transformers_answer(ids: list[int], **inputs: Any) -> list[int]:
    """The answer of transformers' model to a prompt; it gives no heed to eos."""
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]], dtype=torch.int32)
    out = transformers_model().generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        mm_token_type_ids=kinds,
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        eos_token_id=None,
        pad_token_id=0,
        **{name: torch.as_tensor(value) for name, value in inputs.items()},
    )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def answer(llm: LLM, ids: list[int], media: Mapping[str, Any], **more: Any) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    given: Any = {"prompt_token_ids": ids, "multi_modal_data": media, **more}
    (output,) = llm.generate(given, params)
    return output.outputs[0].token_ids


def test_pictures_as_people_have_them() -> None:
    """Of PIL and of numpy, two in a prompt, beside what transformers makes of both."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pictures = [picture(60, 90), picture(84, 56)]
    made = Qwen2VLImageProcessorPil(max_pixels=4000)(images=pictures, return_tensors="np")
    counts = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
    ids = [301, *[IMAGE] * counts[0], 302, 5, 6, 301, *[IMAGE] * counts[1], 302, 7, 8]
    expected = transformers_answer(ids, **made)
    given = {"image": [Image.fromarray(pictures[0]), pictures[1]]}
    with golden_llm(NAME) as llm:
        short = [301, IMAGE, 302, 5, 6, 301, IMAGE, 302, 7, 8]
        options = {"max_pixels": 4000}
        assert answer(llm, short, given, mm_processor_kwargs=options) == expected
        assert answer(llm, short, given) != expected  # They are larger without the limit.


def test_a_video_and_a_picture() -> None:
    draw = np.random.default_rng(0)
    video = {
        "pixel_values_videos": draw.normal(size=(48, 1176)).astype(np.float32),
        "video_grid_thw": np.array([[2, 4, 6]]),
    }
    image = {
        "pixel_values": draw.normal(size=(16, 1176)).astype(np.float32),
        "image_grid_thw": np.array([[1, 4, 4]]),
    }
    ids = [9, 301, *[VIDEO] * 12, 302, 5, 301, *[IMAGE] * 4, 302, 7, 8]
    expected = transformers_answer(ids, **video, **image)
    with golden_llm(NAME, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        assert answer(llm, ids, {"image": image, "video": video}) == expected


def test_a_tower_that_gives_too_few_embeddings_is_named() -> None:
    def shorten(model: Any) -> None:
        whole = model.embed_media
        model.embed_media = lambda kind, items: [each[1:] for each in whole(kind, items)]

    said = r"Qwen2VLForConditionalGeneration\.embed_media gave 11 embeddings of image .* 12 pos"
    with golden_llm(NAME) as llm:
        llm.apply_model(shorten)
        with pytest.raises(EngineDeadError, match=said):
            llm.generate(every_prompt(), greedy_params(NAME, with_prompt=True))
