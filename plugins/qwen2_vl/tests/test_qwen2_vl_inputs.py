"""Pixels, placeholders and positions; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocated import Allocated
from golden_fixtures import GOLDEN
from numpy.typing import NDArray
from PIL import Image

from engine_core.configs import HFConfig
from engine_core.errors import ConfigError, RequestError
from engine_core.inputs import MediaProcessor
from engine_core.runtime.loader import build_on_meta, dummy_weights
from engine_core.step_context import BuildContext
from engine_core_qwen2_vl.config import Qwen2VLConfigBuilder, Qwen25VLConfigBuilder
from engine_core_qwen2_vl.inputs import Qwen2VLProcessor
from engine_core_qwen2_vl.model import (
    PixelNorm,
    Qwen2VLForConditionalGeneration,
    Qwen25VLForConditionalGeneration,
)

FOLDER = GOLDEN / "qwen2vl-tiny"
IMAGE, VIDEO = 304, 305
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def processor(folder: Path | None = None, **changes: Any) -> Qwen2VLProcessor:
    config = HFConfig.from_folder(FOLDER).replace(**changes)
    return Qwen2VLProcessor(Qwen2VLConfigBuilder.build(config, folder))


def normalised(pixels: NDArray[np.uint8], kind: str = "image") -> NDArray[np.float32]:
    """The model's own result for patches."""
    config = Qwen2VLConfigBuilder.build(HFConfig.from_folder(FOLDER), None).hf_config
    norm = PixelNorm(HFConfig(config.vision_config), config.preprocessor[kind])
    made: NDArray[np.float32] = norm(torch.from_numpy(pixels)).numpy()
    return made


def picture(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def features(*grid: int, kind: str = "image") -> dict[str, Any]:
    pixels = np.zeros((int(np.prod(grid)), 1176), np.float32)
    if kind == "video":
        return {"pixel_values_videos": pixels, "video_grid_thw": list(grid)}
    return {"pixel_values": pixels, "image_grid_thw": list(grid)}


@pytest.mark.parametrize(
    ("image", "limits"),
    [
        (Image.fromarray(picture(60, 90, 3)), {}),
        (picture(20, 33, 3), {}),  # enlarged
        (picture(200, 310, 3), {"max_pixels": 28 * 28 * 12}),  # made smaller
        (picture(56, 84, 3), {"min_pixels": 28 * 28 * 20}),
        (picture(10, 500, 3), {"min_pixels": 4, "max_pixels": 4000}),
        (Image.fromarray(picture(56, 84)), {}),  # grey
        (Image.fromarray(picture(70, 70, 4), "RGBA"), {}),
    ],
    ids=["pil", "small", "large", "min", "long", "grey", "alpha"],
)
def test_pixels_are_those_of_transformers(image: Any, limits: dict[str, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    expected = Qwen2VLImageProcessorPil(**limits)(images=[image], return_tensors="np")
    prompt = processor().process_media([1, IMAGE, 2], {"image": [image]}, limits)
    (item,) = prompt.media
    assert item.features["grid_thw"].tolist() == expected["image_grid_thw"][0].tolist()
    pixels = item.features["pixel_values"]
    assert pixels.dtype == np.uint8
    made = normalised(pixels)
    np.testing.assert_allclose(made, expected["pixel_values"], atol=1e-5)
    # Exactly what the host would compute, with each frame twice.
    mean, std = (np.array(expected, np.float32) for expected in (MEAN, STD))
    floats = pixels.reshape(-1, 3, 1, 196).astype(np.float32) * np.float32(1 / 255)
    floats = (floats - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_array_equal(made, np.repeat(floats, 2, axis=2).reshape(len(pixels), -1))
    assert item.span == (1, 1 + len(pixels) // 4)
    assert list(prompt.token_ids) == [1, *[IMAGE] * (len(pixels) // 4), 2]


def test_frames_of_a_video_are_patched_in_pairs() -> None:
    """Each pair has the patches that transformers makes of its frames as pictures, side by side."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    video = picture(5, 84, 56, 3)  # The last frame is repeated.
    sizes = {"min_pixels": 784, "max_pixels": 10000}
    made = Qwen2VLImageProcessorPil(**sizes)(images=list(video), return_tensors="np")
    one = made["pixel_values"].reshape(5, 24, 3, 2, 196)[:, :, :, 0]  # A picture is two frames.
    pairs = [(0, 1), (2, 3), (4, 4)]
    expected = np.concatenate([np.stack([one[a], one[b]], axis=2) for a, b in pairs])
    for given in (video, [Image.fromarray(frame) for frame in video]):
        prompt = processor().process_media([VIDEO], {"video": [given]}, sizes)
        (item,) = prompt.media
        assert (item.kind, item.span) == ("video", (0, 18))
        assert item.features["grid_thw"].tolist() == [3, 6, 4]
        pixels = normalised(item.features["pixel_values"], "video").reshape(72, 3, 2, 196)
        np.testing.assert_allclose(pixels, expected, atol=1e-5)


def test_a_video_of_one_frame_is_a_picture_of_it() -> None:
    frame, sizes = picture(56, 84, 3), {"min_pixels": 784, "max_pixels": 10000}
    (video,) = processor().process_media([VIDEO], {"video": [frame[None]]}, sizes).media
    (image,) = processor().process_media([IMAGE], {"image": [frame]}, sizes).media
    np.testing.assert_array_equal(video.features["pixel_values"], image.features["pixel_values"])
    assert image.features["pixel_values"].nbytes == 24 * 588


def test_text_has_positions_in_line() -> None:
    prompt = processor().process([5, 6, 7])
    assert list(prompt.token_ids) == [5, 6, 7]
    assert prompt.token_state["mrope_positions"].tolist() == [[0, 1, 2]] * 3
    assert prompt.row_state == {"mrope_delta": 0}
    assert prompt.media == ()


def test_positions_go_on_after_the_largest() -> None:
    """A video of more frames than it is high or wide; 4 frames of 2 x 1 embeddings."""
    ids = [5, VIDEO, 6, IMAGE, IMAGE]
    media = {"video": [features(4, 4, 2, kind="video")], "image": [features(1, 4, 2)]}
    prompt = processor().process_media(ids, media, {})
    assert list(prompt.token_ids) == [5, *[VIDEO] * 8, 6, IMAGE, IMAGE]
    assert prompt.token_state["mrope_positions"].tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6],
        [0, 1, 2, 1, 2, 1, 2, 1, 2, 5, 6, 7],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 5, 6, 6],
    ]
    assert prompt.row_state == {"mrope_delta": 8 - 12}
    assert [(item.kind, item.span) for item in prompt.media] == [
        ("video", (1, 9)),
        ("image", (10, 12)),
    ]


def test_digests_tell_what_differs() -> None:
    def digest(item: Any, **options: int) -> bytes:
        (one,) = processor().process_media([IMAGE], {"image": [item]}, options).media
        return one.digest

    image = picture(84, 56, 3)
    assert digest(image) == digest(Image.fromarray(image))
    others = [
        digest(image),
        digest(image, min_pixels=20000),
        digest(picture(56, 84, 3)),
        digest(features(1, 4, 4)),
        digest(features(1, 2, 8)),
    ]
    assert len(set(others)) == len(others)


def test_a_checkpoint_says_how_large_pictures_are(tmp_path: Path) -> None:
    size = {"size": {"shortest_edge": 784, "longest_edge": 4 * 784}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    media = {"image": [picture(280, 280, 3)], "video": [picture(2, 280, 280, 3)]}
    prompt = processor(tmp_path).process_media([IMAGE, VIDEO], media, {})
    assert [item.num_embeddings for item in prompt.media] == [4, 4]
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 784, "max_pixels": 9 * 784})
    )
    prompt = processor(tmp_path).process_media([IMAGE, VIDEO], media, {})
    assert [item.num_embeddings for item in prompt.media] == [4, 9]


def test_it_is_a_media_processor() -> None:
    assert isinstance(processor(), MediaProcessor)


@pytest.mark.parametrize(
    ("ids", "media", "options", "message"),
    [
        ([IMAGE], {}, {}, "in 1 places, 1 in all, for a number of images of 0;"),
        ([1], {"image": [features(1, 4, 4)]}, {}, "in 0 places, .* of 1 with 4 embeddings"),
        ([IMAGE, 1, IMAGE], {"image": [features(1, 4, 4)]}, {}, "2 in all, .* images of 1 with 4"),
        ([IMAGE, IMAGE, 1, IMAGE, IMAGE], {"image": [features(1, 4, 4)]}, {}, "in 2 places"),
        ([VIDEO], {"image": [features(1, 4, 4)]}, {}, "in 0 places"),
        ([1], {"audio": [0]}, {}, "image and video, not audio"),
        ([1], {}, {"fps": 2}, "'fps' is not one of min_pixels, max_pixels"),
        ([1], {}, {"min_pixels": 0}, "min_pixels must be a positive integer, got 0"),
        ([1], {}, {"max_pixels": 10**9}, "max_pixels may be 50000000 at most, got 1000000000"),
        ([IMAGE], {"image": [features(1, 4, 4)]}, {"min_pixels": 9}, "image 0: min_pixels have no"),
        ([IMAGE], {"image": [picture(30, 30, 3)]}, {"min_pixels": 9999999}, "more than max_pixels"),
        ([IMAGE], {"image": [picture(30, 30)]}, {}, r"image 0: .* got ndarray of uint8 \[30, 30\]"),
        ([IMAGE], {"image": ["cat.png"]}, {}, "image 0: an image must be a PIL image or an array"),
        ([IMAGE], {"image": [picture(2, 402, 3)]}, {}, "402 x 2 pixels is too long"),
        ([VIDEO], {"video": [picture(30, 30, 3)]}, {}, "video 0: a video must be a list"),
        ([VIDEO], {"video": [[]]}, {}, "one or more frames of one size, got 0"),
        (
            [VIDEO],
            {"video": [[picture(30, 30, 3), picture(30, 31, 3)]]},
            {},
            "sizes 30 x 30, 31 x 30",
        ),
        ([IMAGE], {"image": [features(1, 3, 4)]}, {}, "height and width multiples of 2"),
        ([IMAGE], {"image": [features(1, 4)]}, {}, r"must be three positive numbers"),
        ([IMAGE], {"image": [{"pixel_values": 1}]}, {}, "pixel_values and image_grid_thw, got pix"),
        (
            [IMAGE],
            {"image": [{**features(1, 4, 4), "pixel_values": np.full((16, 1176), np.nan)}]},
            {},
            "not finite",
        ),
    ],
)
def test_what_is_refused(
    ids: list[int], media: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        processor().process_media(ids, media, options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "a sliding window is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 6]}}, "three positive integers"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 7]}}, "half of the head size"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not one of mrope, default"),
        ({"image_token_id": 320}, "image_token_id must be a token of the 320, got 320"),
        ({"vision_config": {"depth": 0}}, "vision_config: depth must be a positive integer"),
        ({"vision_config": {"hidden_size": 32}}, "hidden_size 32 is not supported, only 64"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ({"vision_config": {"embed_dim": 60, "num_heads": 10}}, "not divisible by 4 x num_heads"),
        ({"vision_config": [1]}, "vision_config must be an object"),
        ({"text_config": 1}, "text_config must be an object"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor(**changes)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"do_resize": False}, "do_resize False is not supported"),
        ({"patch_size": 16}, "patch_size 16 is not supported, only 14"),
        ({"min_pixels": -1}, "min_pixels and max_pixels must be positive"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must be three positive numbers"),
    ],
)
def test_preprocessors_that_are_refused(
    stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=message):
        processor(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_tower_takes_no_more_memory_than_is_said(family: str, dtype: torch.dtype) -> None:
    """With the proportions of the published towers, where a layer is wider than a patch."""
    vision = {"depth": 2, "num_heads": 4, "patch_size": 4}
    builder: type[Qwen2VLConfigBuilder] = Qwen2VLConfigBuilder
    model_class: type[Qwen2VLForConditionalGeneration] = Qwen2VLForConditionalGeneration
    if family == "qwen2_vl":
        vision |= {"embed_dim": 256, "mlp_ratio": 4, "hidden_size": 64}
    else:
        builder, model_class = Qwen25VLConfigBuilder, Qwen25VLForConditionalGeneration
        vision |= {"hidden_size": 256, "intermediate_size": 684, "out_hidden_size": 64}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    stated = HFConfig.from_folder(FOLDER).to_dict()
    stated |= {"architectures": [builder.architecture], "vision_config": vision}
    config = builder.build(HFConfig(stated), None)
    model: Any = build_on_meta(model_class, config, BuildContext(dtype=dtype))
    dummy_weights(model, torch.device("cpu"), 0)
    grids = [(1, 16, 24), (1, 8, 8)]
    with torch.inference_mode(), Allocated() as allocated:
        items = [
            {"pixel_values": torch.zeros(math.prod(grid), 96), "grid_thw": torch.tensor(grid)}
            for grid in grids
        ]
        model.embed_media("image", items)
    embeddings = sum(math.prod(grid) for grid in grids) // 4
    said = Qwen2VLProcessor(config).media_limits({})["image"].activations
    measured = allocated.peak / embeddings / dtype.itemsize
    assert measured <= said <= 1.6 * measured


def test_the_largest_picture_is_as_large_as_is_said() -> None:
    limit = processor().media_limits({})["image"]
    prompt = processor().process_media([IMAGE], {"image": [picture(1120, 896, 3)]}, {})
    assert prompt.media[0].num_embeddings == limit.num_embeddings == 1280
    prompt = processor().process_media([IMAGE], {"image": [picture(1800, 1500, 3)]}, {})
    assert 0.95 * 1280 < prompt.media[0].num_embeddings <= 1280


@pytest.mark.parametrize("options", [{}, {"max_pixels": 9000}, {"min_pixels": 40_000}])
def test_an_outline_is_what_becomes_of_a_picture(options: dict[str, Any]) -> None:
    """By its size alone it has as many embeddings, and makes the same prompt."""
    chance, made = np.random.default_rng(0), processor()
    for height, width in chance.integers(1, 150, (8, 2)).tolist():
        outline = made.picture_outline(height, width, options)
        ids = [5, IMAGE, 6]
        whole = made.process_media(ids, {"image": [picture(height, width, 3)]}, options)
        assert outline.num_embeddings == whole.media[0].num_embeddings
        again = made.process_media(ids, {"image": [outline]}, options)
        assert list(again.token_ids) == list(whole.token_ids)
        assert again.token_state["mrope_positions"].tolist() == (
            whole.token_state["mrope_positions"].tolist()
        )
    with pytest.raises(RequestError, match="is too long"):
        made.picture_outline(1000, 1, options)
