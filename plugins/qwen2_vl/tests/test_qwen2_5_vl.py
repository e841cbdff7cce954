"""Qwen2.5-VL, with random weights, against transformers' class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import RequestError
from engine_core.inputs import Video
from engine_core.testing.reference import prepare
from engine_core_qwen2_vl.config import Qwen25VLConfigBuilder
from engine_core_qwen2_vl.conformance import CASES
from engine_core_qwen2_vl.inputs import Qwen2VLProcessor

IMAGE, VIDEO = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = (case for case in CASES if case.name == "qwen2.5-vl")
    return prepare(case, tmp_path_factory.mktemp("qwen2.5-vl")).folder


def test_pictures_and_videos_are_as_in_transformers(folder: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    theirs: Any = Qwen2_5_VLForConditionalGeneration
    model = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    draw = np.random.default_rng(0)
    # Windows are of 2 x 2 embeddings: some at the edges are smaller.
    image = {
        "pixel_values": draw.normal(size=(60, 96)).astype(np.float32),
        "image_grid_thw": np.array([[1, 6, 10]]),
    }
    video = {
        "pixel_values_videos": draw.normal(size=(80, 96)).astype(np.float32),
        "video_grid_thw": np.array([[2, 4, 10]]),
        "second_per_grid_ts": [1.0],
    }
    ids = [9, *[VIDEO] * 20, 5, 7, *[IMAGE] * 15, 8, 2]
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(i, 0) for i in ids]]),
            **{name: torch.as_tensor(value) for name, value in (image | video).items()},
        ).logits[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=160, prompt_logprobs=160)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16}
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": ids, "multi_modal_data": {"image": image, "video": video}}, params
        )
    assert output.prompt_logprobs is not None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ours = torch.tensor([[row[token].logprob for token in range(160)] for row in rows])
    torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_a_video_goes_on_in_seconds(folder: Path) -> None:
    """Of 3 pairs of frames, 1 x 2 embeddings each; a second is 4 positions."""
    processor = Qwen2VLProcessor(Qwen25VLConfigBuilder.build(HFConfig.from_folder(folder)))
    video = np.zeros((6, 8, 16, 3), np.uint8)
    sizes = {"min_pixels": 1, "max_pixels": 1000}
    for given, options, times, after in (
        (video, {}, [0, 4, 8], 9),  # Two frames a second.
        (video, {"fps": 3.0}, [0, 2, 5], 6),
        (Video(video, fps=3.0), {}, [0, 2, 5], 6),
        (Video(video), {}, [0, 4, 8], 9),
        (Video(video, fps=1.0), {"fps": 3.0}, [0, 2, 5], 6),
    ):
        prompt = processor.process_media([VIDEO, 7], {"video": [given]}, {**sizes, **options})
        positions = prompt.token_state["mrope_positions"]
        assert positions[0].tolist() == [*np.repeat(times, 2).tolist(), after]
        assert positions[1:].tolist() == [[0] * 6 + [after], [0, 1] * 3 + [after]]


@pytest.mark.parametrize("fps", [0, -1.0, 1e-5, 1e-300, float("nan"), float("inf"), "2", True])
def test_a_video_of_no_number_of_frames_a_second_is_refused(folder: Path, fps: Any) -> None:
    """Of so few a second its positions would be beyond all integers."""
    processor = Qwen2VLProcessor(Qwen25VLConfigBuilder.build(HFConfig.from_folder(folder)))
    frames = np.zeros((6, 8, 16, 3), np.uint8)
    for given, options in ((Video(frames, fps=fps), {}), (frames, {"fps": fps})):
        with pytest.raises(RequestError, match="fps"):
            processor.process_media([VIDEO, 7], {"video": [given]}, options)


def test_features_of_a_video_are_a_day_apart_at_most(folder: Path) -> None:
    processor = Qwen2VLProcessor(Qwen25VLConfigBuilder.build(HFConfig.from_folder(folder)))
    video = {"pixel_values_videos": np.zeros((32, 96), np.float32), "video_grid_thw": [2, 4, 4]}
    for seconds, refused in ((86_400.0, False), (1e300, True)):
        media = {"video": [{**video, "second_per_grid_ts": seconds}]}
        if refused:
            with pytest.raises(RequestError, match=r"second_per_grid_ts must be .* 86400 at most"):
                processor.process_media([VIDEO, 7], media, {})
        else:
            prompt = processor.process_media([VIDEO, 7], media, {})
            assert prompt.token_state["mrope_positions"][0].tolist()[4:8] == [4 * 86_400] * 4
