"""Tiles, placeholders, options and configs; and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocated import Allocated
from golden_fixtures import GOLDEN
from numpy.typing import NDArray
from PIL import Image

from engine_core.check import check_model
from engine_core.configs import EngineConfig, HFConfig, ModelConfig
from engine_core.errors import ConfigError, RequestError, UnknownArchitectureError
from engine_core.inputs import MediaProcessor
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, dummy_weights
from engine_core.step_context import BuildContext
from engine_core_internvl.config import InternVLChatConfigBuilder, InternVLConfigBuilder
from engine_core_internvl.inputs import InternVLProcessor
from engine_core_internvl.model import InternVLModel
from engine_core_internvl.pixels import Tiler

CHAT, NATIVE = GOLDEN / "internvl-chat-qwen2", GOLDEN / "internvl-hf-qwen2"
CONTEXT, START, END = 300, 301, 302


def chat_config(folder: Path = CHAT, **changes: Any) -> ModelConfig:
    config = HFConfig.from_folder(CHAT).replace(**changes)
    return InternVLChatConfigBuilder.build(config, folder)


def processor(**changes: Any) -> InternVLProcessor:
    return InternVLProcessor(chat_config(**changes))


def with_labels() -> InternVLProcessor:
    """As in an engine whose tokenizer has a token for each label: 100 for the first frame's."""
    config = chat_config()
    return InternVLProcessor(
        config.replace(texts={text: (100 + at,) for at, text in enumerate(config.texts)})
    )


def picture(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def tiles(count: int, size: int = 56) -> dict[str, Any]:
    return {"pixel_values": np.zeros((count, 3, size, size), np.float32)}


def normalised(values: NDArray[np.uint8], mean: Any, std: Any) -> NDArray[np.float32]:
    pixels = values.astype(np.float32) / 255
    out: NDArray[np.float32] = (pixels - np.float32(mean)) / np.float32(std)
    return out.transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (picture(60, 90, 3), {}),
        (Image.fromarray(picture(448, 700, 3)), {}),
        (picture(300, 100, 3), {"max_dynamic_patch": 4}),
        (picture(20, 20, 3), {"min_dynamic_patch": 3}),
        (picture(56, 56, 3), {}),
        (Image.fromarray(picture(90, 84)), {}),  # grey
        (Image.fromarray(picture(70, 140, 4), "RGBA"), {}),
    ],
    ids=["wide", "pil", "high", "at least", "one tile", "grey", "alpha"],
)
def test_tiles_are_those_of_transformers(image: Any, options: dict[str, int]) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
    )

    limits = {"min_patches": 1, "max_patches": 12}
    limits |= {key.replace("dynamic_patch", "patches"): n for key, n in options.items()}
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, **limits
    )
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    expected = theirs(images=[image], image_mean=mean, image_std=std, return_tensors="np")
    prompt = processor().process_media([1, CONTEXT, 2], {"image": [image]}, options)
    (item,) = prompt.media
    values = item.features["pixel_values"]
    assert values.dtype == np.uint8
    np.testing.assert_allclose(
        normalised(values, mean, std), expected["pixel_values"], atol=1e-5, rtol=0
    )
    count = 4 * len(values)
    assert item.span == (2, 2 + count)
    assert list(prompt.token_ids) == [1, START, *[CONTEXT] * count, END, 2]


def test_grids_are_those_of_transformers_and_of_the_original_code() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    draw = random.Random(0)
    for _ in range(400):
        height, width = draw.choice(
            [(448, 448), (draw.randrange(1, 3000), draw.randrange(1, 3000))]
        )
        fewest = draw.randrange(1, 4)
        most = draw.randrange(fewest, 13)
        grid = Tiler(448).grid(height, width, fewest, most)
        assert grid == get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)
    # By hand: 2 x 1 and 4 x 2 are equally near; the second only if it is half full.
    assert Tiler(448).grid(448, 896, 1, 12) == (2, 1)
    assert Tiler(448).grid(898, 1796, 1, 12) == (4, 2)


def test_one_tile_where_the_checkpoint_cuts_none() -> None:
    image = picture(100, 300, 3)
    made = processor(dynamic_image_size=False)
    (item,) = made.process_media([CONTEXT], {"image": [image]}, {}).media
    expected = np.asarray(Image.fromarray(image).resize((56, 56), Image.Resampling.BICUBIC))
    assert np.array_equal(item.features["pixel_values"], expected[None])
    settings = {"dynamic_image_size": True, "use_thumbnail": False, "max_dynamic_patch": 3}
    (item,) = made.process_media([CONTEXT], {"image": [image]}, settings).media
    assert item.features["pixel_values"].shape == (3, 56, 56, 3)


def test_a_video_has_its_frames_under_numbers() -> None:
    frames = picture(3, 60, 90, 3)
    for given in (frames, [Image.fromarray(frame) for frame in frames]):
        prompt = with_labels().process_media([7, START, END, 8], {"video": [given]}, {})
        (item,) = prompt.media
        frame = [START, *[CONTEXT] * 4, END]
        assert list(prompt.token_ids) == [7, *frame, 101, *frame, 102, *frame, 8]
        assert (item.kind, item.span) == ("video", (1, 21))
        assert list(item.features["token_ids"]) == [*frame, 101, *frame, 102, *frame]
        assert item.features["places"].tolist() == [1, 2, 3, 4, 8, 9, 10, 11, 15, 16, 17, 18]
        tile = Image.fromarray(frames[1]).resize((56, 56), Image.Resampling.BICUBIC)
        assert np.array_equal(item.features["pixel_values"][1], np.asarray(tile))


def test_a_token_for_videos_has_the_first_label_too() -> None:
    config = InternVLConfigBuilder.build(HFConfig.from_folder(NATIVE), NATIVE)
    values = config.hf_config.replace(video_token_id=303)
    texts = {text: (100 + at,) for at, text in enumerate(config.texts)}
    made = InternVLProcessor(config.replace(hf_config=values, texts=texts))
    media = {"video": [picture(2, 56, 56, 3)], "image": [tiles(1)]}
    prompt = made.process_media([303, 9, CONTEXT], media, {})
    frame = [START, *[CONTEXT] * 4, END]
    assert list(prompt.token_ids) == [100, *frame, 101, *frame, 9, *frame]
    assert [(item.kind, item.span) for item in prompt.media] == [
        ("video", (1, 14)),
        ("image", (16, 20)),
    ]


def test_items_that_were_made_before_are_taken() -> None:
    media: dict[str, Any] = {"image": [picture(60, 90, 3)], "video": [picture(2, 56, 56, 3)]}
    ids = [CONTEXT, 5, START, END]
    first = with_labels().process_media(ids, media, {})
    items = {item.kind: [item] for item in first.media}
    again = with_labels().process_media([9, 9, *ids], items, {})
    assert list(again.token_ids) == [9, 9, *first.token_ids]
    for item, other in zip(again.media, first.media, strict=True):
        assert item.digest == other.digest
        assert item.span == (other.span[0] + 2, other.span[1] + 2)
    twice = [media["image"][0], picture(9, 9, 3), media["image"][0]]
    one, _, two = with_labels().process_media([CONTEXT] * 3, {"image": twice}, {}).media
    assert one.features is two.features


def test_digests_tell_what_differs() -> None:
    def digest(item: Any, **options: Any) -> bytes:
        (one,) = processor().process_media([CONTEXT], {"image": [item]}, options).media
        return one.digest

    image = picture(84, 56, 3)
    assert digest(image) == digest(Image.fromarray(image))
    others = [
        digest(image),
        digest(image, use_thumbnail=False),
        digest(picture(56, 84, 3)),
        digest(tiles(1)),
        digest(tiles(2)),
    ]
    assert len(set(others)) == len(others)


def test_what_the_text_model_does_with_prompts_is_done() -> None:
    """InternLM2 under dynamic scaling salts prompts beyond its trained length with theirs."""
    folder = GOLDEN / "internvl-chat-internlm2"
    values = HFConfig.from_folder(folder).to_dict()
    values["llm_config"]["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    made = InternVLProcessor(InternVLChatConfigBuilder.build(HFConfig(values), folder))
    image = {"pixel_values": np.zeros((1, 3, 56, 56), np.float32)}
    prompt = made.process_media([*[5] * 260, 190], {"image": [image]}, {})
    assert prompt.cache_salts == (266,)
    assert prompt.media[0].span == (261, 265)


def test_it_is_a_media_processor() -> None:
    assert isinstance(processor(), MediaProcessor)


@pytest.mark.parametrize(
    ("ids", "media", "options", "message"),
    [
        ([CONTEXT], {}, {}, "in 1 places, 1 in all, for a number of images of 0;"),
        ([1], {"image": [tiles(1)]}, {}, "in 0 places, .* of 1 with 4 embeddings"),
        ([CONTEXT, 1, CONTEXT], {"image": [tiles(1)]}, {}, "2 in all, .* of 1 with 4 embeddings"),
        ([START, END], {}, {}, "video placeholders .* in 1 places, for a number of videos of 0"),
        ([1], {"video": [picture(1, 9, 9, 3)]}, {}, "video 0: the text before|video placeholders"),
        ([1], {"audio": [0]}, {}, "image and video, not audio"),
        ([1], {}, {"max_tiles": 2}, "'max_tiles' is not one of dynamic_image_size"),
        ([1], {}, {"max_dynamic_patch": 0}, "max_dynamic_patch must be an integer from 1 to 64"),
        ([1], {}, {"use_thumbnail": 1}, "use_thumbnail must be true or false, got 1"),
        ([1], {}, {"min_dynamic_patch": 13}, r"\(13\) is more than max_dynamic_patch \(12\)"),
        ([CONTEXT], {"image": [tiles(1)]}, {"use_thumbnail": True}, "image 0: use_thumbnail have"),
        ([CONTEXT], {"image": [tiles(1, 28)]}, {}, r"tiles \[n, 3, 56, 56\], got \[1, 3, 28, 28\]"),
        ([CONTEXT], {"image": [{"pixels": 1}]}, {}, "features are pixel_values, got pixels"),
        ([CONTEXT], {"image": [{"pixel_values": "a"}]}, {}, "pixel_values must be an array"),
        ([CONTEXT], {"image": [{"pixel_values": np.full((1, 3, 56, 56), np.nan)}]}, {}, "finite"),
        ([CONTEXT], {"image": [picture(30, 30)]}, {}, r"image 0: .* ndarray of uint8 \[30, 30\]"),
        ([CONTEXT], {"image": ["cat.png"]}, {}, "an image must be a PIL image or an array"),
        ([START, END], {"video": [picture(30, 30, 3)]}, {}, "video 0: a video must be a list"),
        ([START, END], {"video": [[]]}, {}, "video 0: a video needs one or more frames"),
        ([START, END], {"video": [picture(2, 9, 9, 3)]}, {}, "video 0: .* needs the tokenizer"),
        ([START, END], {"video": [picture(257, 2, 2, 3)]}, {}, "257 frames, and 256 are taken"),
    ],
)
def test_what_is_refused(
    ids: list[int], media: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        processor().process_media(ids, media, options)


def test_ends_that_no_tokenizer_file_has_are_not_made_up(tmp_path: Path) -> None:
    made = InternVLProcessor(chat_config(tmp_path, image_token_id=CONTEXT))
    prompt = made.process_media([1, *[CONTEXT] * 4, 2], {"image": [tiles(1)]}, {})
    assert prompt.media[0].span == (1, 5)
    with pytest.raises(RequestError, match="no <img> and </img> to put around images"):
        made.process_media([1, CONTEXT, 2], {"image": [tiles(1)]}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ps_version": "v3"}, "ps_version 'v3' is not one of v1, v2"),
        ({"downsample_ratio": 0.3}, "downsample_ratio 0.3 is not one of"),
        ({"downsample_ratio": "half"}, "downsample_ratio must be a positive number"),
        ({"force_image_size": 60}, "60, is no multiple of the 28 pixels"),
        ({"select_layer": 3}, r"output 3 .* none of its 2 layers"),
        ({"pad2square": True}, "pad2square is not supported"),
        ({"max_dynamic_patch": "6"}, "max_dynamic_patch must be a positive integer"),
        ({"vision_config": {"hidden_act": "selu"}}, "vision_config: hidden_act 'selu' is not one"),
        ({"vision_config": {"norm_type": "batch"}}, "vision_config: norm_type 'batch' is not one"),
        ({"vision_config": {"num_channels": 1}}, "vision_config: num_channels 1 is not supported"),
        ({"vision_config": {"hidden_size": 110}}, r"hidden_size \(110\) is not divisible"),
        ({"vision_config": 1}, "vision_config must be an object"),
        ({"llm_config": 1}, "llm_config must be an object"),
        ({"llm_config": {"architectures": ["Qwen2ForCausalLM"]}}, "intermediate_size must"),
        ({"llm_config": {}}, "'architectures' must be a list that names the model class"),
        ({"image_token_id": 320}, "image_token_id must be a token of the 320, got 320"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_config(**changes)


@pytest.mark.parametrize(
    ("changes", "preprocessor", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, {}, "strategy 'full' is not supported"),
        ({"vision_config": {"use_mean_pooling": False}}, {}, "use_mean_pooling False is not supp"),
        ({}, {"do_resize": False}, "preprocessor_config.json: do_resize False is not supported"),
        ({}, {"size": {"height": 448}}, "size: height 448 is not supported, only 56"),
        ({}, {"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std must be three positive numbers"),
        ({}, {"max_patches": 0}, "max_dynamic_patch must be a positive integer"),
    ],
)
def test_native_configs_that_are_refused(
    changes: dict[str, Any], preprocessor: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    config = HFConfig.from_folder(NATIVE)
    vision = {**config.vision_config, **changes.pop("vision_config", {})}
    with pytest.raises(ConfigError, match=message):
        InternVLConfigBuilder.build(config.replace(vision_config=vision, **changes), tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<IMG_CONTEXT>": 300, "<img>": 301, "</img>": 302}},
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(number): {"content": text}
                    for number, text in ((300, "<IMG_CONTEXT>"), (301, "<img>"), (302, "</img>"))
                }
            }
        },
        {
            "tokenizer.json": {
                "added_tokens": [
                    {"id": 300, "content": "<IMG_CONTEXT>"},
                    {"id": 301, "content": "<img>"},
                    {"id": 302, "content": "</img>"},
                ]
            }
        },
    ],
    ids=lambda files: next(iter(files)),
)
def test_tokens_are_found_in_each_file_of_a_tokenizer(
    files: dict[str, Any], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = chat_config(tmp_path).hf_config
    found = [config.image_token_id, config.image_start_token_id, config.image_end_token_id]
    assert found == [300, 301, 302]


def test_a_checkpoint_without_the_tokens_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has the token <IMG_CONTEXT>.* hf_overrides"):
        chat_config(tmp_path)


def test_the_text_models_config_is_its_own(tmp_path: Path) -> None:
    built = chat_config()
    assert built.text_model is not None
    assert built.text_model.architecture == "Qwen2ForCausalLM"
    assert (built.vocab_size, built.num_layers, built.num_key_value_heads) == (320, 2, 2)
    assert built.eos_token_ids == (2,)
    tokens = json.loads((CHAT / "added_tokens.json").read_text()) | {"<|im_end|>": 303}
    (tmp_path / "added_tokens.json").write_text(json.dumps(tokens))
    assert chat_config(tmp_path).eos_token_ids == (2, 303)


def test_a_text_model_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib_metadata

    for file in CHAT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    report = check_model(tmp_path, EngineConfig(skip_tokenizer_init=True))
    assert report.will_run, report.problems
    whole = importlib_metadata.entry_points(group="engine_core")
    without = [point for point in whole if point.name != "qwen2"]
    said = "'Qwen2ForCausalLM', which no installed plugin knows; .* 'pip install engine-core-qwen2'"
    registry = build_registry(entry_points=without)
    with pytest.raises(UnknownArchitectureError, match=said):
        registry.model_config(HFConfig.from_folder(CHAT), CHAT)
    monkeypatch.setattr("engine_core.registry.registry.metadata.entry_points", lambda **_: without)
    monkeypatch.setattr("engine_core.registry.registry._seen", None)
    report = check_model(tmp_path, EngineConfig(skip_tokenizer_init=True))
    (problem,) = report.errors
    assert problem.code == "architecture-unknown"
    assert "pip install engine-core-qwen2" in problem.message


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ("300M", torch.float32),
        ("6B", torch.bfloat16),
        pytest.param("300M", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("6B", torch.float32, marks=pytest.mark.long),
    ],
)
def test_the_tower_takes_no_more_memory_than_is_said(size: str, dtype: torch.dtype) -> None:
    """With about the proportions of the published ones."""
    vision = HFConfig.from_folder(CHAT).vision_config
    vision = {**vision, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
    if size == "300M":
        vision |= {"hidden_size": 256, "intermediate_size": 1024, "image_size": 64}
        vision |= {"qk_normalization": False, "norm_type": "layer_norm", "qkv_bias": True}
    else:
        vision |= {"hidden_size": 320, "intermediate_size": 1280, "image_size": 64}
        vision |= {"qk_normalization": True, "norm_type": "rms_norm", "qkv_bias": False}
    config = chat_config(vision_config=vision, force_image_size=64)
    context = BuildContext(dtype=dtype, model_class=build_registry(()).model_class)
    model: Any = build_on_meta(InternVLModel, config, context)
    dummy_weights(model, torch.device("cpu"), 0)
    said = InternVLProcessor(config).media_limits({})["image"].activations
    for shape, kind in (((7, 64, 64, 3), torch.uint8), ((7, 3, 64, 64), torch.float32)):
        with torch.inference_mode(), Allocated() as allocated:
            model.embed_media("image", [{"pixel_values": torch.zeros(shape, dtype=kind)}])
        measured = allocated.peak / (7 * 64) / dtype.itemsize
        assert measured <= said <= 1.6 * measured


def test_the_largest_picture_is_as_large_as_is_said() -> None:
    for changes, tiles in (
        ({"dynamic_image_size": True, "max_dynamic_patch": 4, "use_thumbnail": True}, 5),
        ({"dynamic_image_size": True, "max_dynamic_patch": 4, "use_thumbnail": False}, 4),
        ({"dynamic_image_size": True, "max_dynamic_patch": 1, "use_thumbnail": True}, 1),
        ({"dynamic_image_size": False}, 1),
    ):
        made = processor(**changes)
        prompt = made.process_media([CONTEXT], {"image": [picture(900, 900, 3)]}, {})
        limit = made.media_limits({})["image"]
        assert limit.num_embeddings == prompt.media[0].num_embeddings == 4 * tiles


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_dynamic_patch": 3},
        {"use_thumbnail": False},
        {"dynamic_image_size": False},
    ],
)
def test_an_outline_is_what_becomes_of_a_picture(options: dict[str, Any]) -> None:
    """By its size alone it has as many embeddings, and makes as long a prompt."""
    chance, made = random.Random(0), processor()
    for _ in range(8):
        height, width = chance.randint(1, 400), chance.randint(1, 400)
        outline = made.picture_outline(height, width, options)
        ids = [5, CONTEXT, 6]
        whole = made.process_media(ids, {"image": [picture(height, width, 3)]}, options)
        assert outline.num_embeddings == whole.media[0].num_embeddings
        again = made.process_media(ids, {"image": [outline]}, options)
        assert list(again.token_ids) == list(whole.token_ids)
    with pytest.raises(RequestError, match="'colour' is not one of"):
        made.picture_outline(5, 5, {"colour": 1})
