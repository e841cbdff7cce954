"""Places, paths and salts; and what is refused."""

from __future__ import annotations

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
from engine_core.inputs import InputProcessor, MediaProcessor
from engine_core.runtime.loader import build_on_meta, dummy_weights
from engine_core.step_context import BuildContext
from engine_core.text.chat_template import render_chat_template
from engine_core_qwen_vl.config import QWenConfigBuilder
from engine_core_qwen_vl.inputs import QWenProcessor, QWenVLProcessor
from engine_core_qwen_vl.model import QWenLMHeadModel

BEGIN, END, PAD = 300, 301, 302
PIXELS = {"pixel_values": np.zeros((3, 96, 96), np.float32)}


def build(**changes: Any) -> Any:
    config = HFConfig.from_folder(GOLDEN / "qwenvl1-ntk-logn").replace(**changes)
    return QWenConfigBuilder.build(config)


def processor(**changes: Any) -> QWenVLProcessor:
    return QWenVLProcessor(build(**changes))


def picture(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def test_places_are_filled_with_pads() -> None:
    path = list(b"img0.png")
    ids = [5, BEGIN, END, 6, BEGIN, *path, END, 7, BEGIN, *path, *[PAD] * 248, END]
    prompt = processor().process_media(ids, {"image": [PIXELS] * 3}, {})
    named = [BEGIN, *path, *[PAD] * 248, END]
    assert list(prompt.token_ids) == [5, BEGIN, *[PAD] * 256, END, 6, *named, 7, *named]
    assert [item.span for item in prompt.media] == [(2, 258), (261, 517), (520, 776)]


def test_prompts_of_equal_bases_have_equal_salts() -> None:
    """The base changes behind 128, 256 and 512 tokens."""

    def salts(length: int, **changes: Any) -> Any:
        return processor(**changes).process([5] * length).cache_salts

    assert salts(1) == salts(128) == ()
    assert salts(129) == salts(256) != ()
    assert salts(257) == salts(512) == (2,)
    assert salts(513) == (3,)
    assert salts(513, use_dynamic_ntk=False) == ()
    # An image's pads count.
    prompt = processor().process_media([BEGIN, END], {"image": [PIXELS]}, {})
    assert prompt.cache_salts == (2,)


def test_files_are_named_by_the_bytes_of_their_paths() -> None:
    named = processor().named_media
    assert named([5, 6]) == {}
    assert named([BEGIN, *b"a/b.png", PAD, PAD, END, 5, BEGIN, *"ü".encode(), END]) == {
        "image": ["a/b.png", "ü"]
    }
    # Pads alone, of one of two: the pictures come with the prompt.
    assert named([BEGIN, *b"a", END, BEGIN, PAD, END]) == {}


def test_digests_tell_what_differs() -> None:
    def digest(item: Any) -> bytes:
        (one,) = processor().process_media([BEGIN, END], {"image": [item]}, {}).media
        return one.digest

    image = picture(84, 56, 3)
    assert digest(image) == digest(Image.fromarray(image))
    others = [digest(image), digest(picture(56, 84, 3)), digest(PIXELS)]
    assert len(set(others)) == len(others)


def test_an_item_is_taken_again() -> None:
    first = processor().process_media([BEGIN, END], {"image": [picture(30, 30, 3)]}, {}).media
    again = processor().process_media([7, BEGIN, END, BEGIN, END], {"image": [*first, PIXELS]}, {})
    assert again.media[0].span == (2, 258)
    assert again.media[0].digest == first[0].digest
    assert again.media[0].features is first[0].features
    twice = processor().process_media([BEGIN, END] * 2, {"image": [PIXELS, PIXELS]}, {}).media
    assert twice[0].features is twice[1].features


def test_without_visual_it_takes_text_alone() -> None:
    values = build().hf_config.to_dict()
    del values["visual"]
    config = QWenConfigBuilder.build(HFConfig(values))
    assert (QWenProcessor.condition(config), QWenVLProcessor.condition(config)) == (True, False)
    assert (QWenProcessor.condition(build()), QWenVLProcessor.condition(build())) == (False, True)
    text = QWenProcessor(config)
    assert isinstance(text, InputProcessor)
    assert not isinstance(text, MediaProcessor)
    assert text.process([BEGIN] * 129).cache_salts == (1,)
    assert isinstance(processor(), MediaProcessor)


def test_a_chat_has_the_originals_form() -> None:
    template = build().default_chat_template
    assert template is not None
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}]},
    ]
    prompt = render_chat_template(
        template, messages, add_generation_prompt=True, tools=None, variables={}
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nPicture 1: <img></img>\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nAnd Picture 2: <img></img>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([BEGIN, END], [], "places of 1 images .* 300 and 301.*, and there are 0 images"),
        ([1], [PIXELS], "places of 0 images .*, and there are 1 images"),
        ([BEGIN, 1], [PIXELS], "300 and 301 must stand in pairs"),
        ([END, BEGIN], [PIXELS], "must stand in pairs"),
        ([1, PAD, 2], [], r"302 \(<imgpad>\) stands for .* only between the tokens 300 and 301"),
        ([BEGIN, PAD, END, PAD], [PIXELS], "only between the tokens 300 and 301"),
        ([BEGIN, BEGIN, END, END], [PIXELS], "must stand in pairs"),
        ([BEGIN, *[PAD] * 257, END], [PIXELS], "are 257 tokens, 256 at most"),
        ([BEGIN, END], [picture(30, 30)], r"image 0: .* got ndarray of uint8 \[30, 30\]"),
        ([BEGIN, END], ["cat.png"], "image 0: an image must be a PIL image or an array"),
        ([BEGIN, END], [{"pixels": 1}], "features of an image are pixel_values, got pixels"),
        ([BEGIN, END], [{"pixel_values": np.zeros((3, 9, 9))}], r"must be \[3, 96, 96\], got \[3"),
        ([BEGIN, END], [{"pixel_values": np.full((3, 96, 96), np.nan)}], "not finite"),
    ],
)
def test_what_is_refused(ids: list[int], images: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor().process_media(ids, {"image": images}, {})


def test_what_is_no_path_is_refused() -> None:
    for between in ([280], [0xFF], [*b"a", 5000, PAD]):
        with pytest.raises(RequestError, match="no bytes of a path in UTF-8"):
            processor().named_media([BEGIN, *between, END])


def test_other_kinds_and_options_are_refused() -> None:
    with pytest.raises(RequestError, match="of the kind image, not video"):
        processor().process_media([1], {"video": [0]}, {})
    with pytest.raises(RequestError, match="no options of images, got 'max_pixels'"):
        processor().process_media([BEGIN, END], {"image": [PIXELS]}, {"max_pixels": 2})


def test_a_broken_file_is_refused(tmp_path: Any) -> None:
    Image.fromarray(picture(300, 300, 3)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content[: len(content) // 2])
    said = r"image 0: an image cannot be read: .*truncated"
    with Image.open(tmp_path / "a.png") as image, pytest.raises(RequestError, match=said):
        processor().process_media([BEGIN, END], {"image": [image]}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_pct": 0.5}, "rotary_pct 0.5 is not supported, only 1.0"),
        ({"no_bias": False}, "no_bias False is not supported"),
        ({"kv_channels": 16}, r"hidden_size \(128\) must be num_attention_heads \(4\) times kv_ch"),
        ({"seq_length": 1}, "seq_length must be 2 or more"),
        ({"visual": 1}, "visual must be an object"),
        ({"visual": {"output_dim": 64}}, "visual: output_dim 64 is not supported, only 128"),
        ({"visual": {"output_dim": 128, "n_queries": 64}}, "n_queries 64 is not supported"),
        ({"visual": {"output_dim": 128, "layers": 0}}, "visual: layers must be a positive"),
        ({"visual": {"output_dim": 128, "image_size": 450}}, r"image_size \(450\) is not div"),
        ({"visual": {"output_dim": 128}}, r"image_start_id \(151857\) and the two tokens after"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_published_checkpoints_end_their_turns() -> None:
    config = build(vocab_size=151936, visual=None)
    assert config.eos_token_ids == (151643, 151645)
    assert build(vocab_size=151936, eos_token_id=7).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("grid", "as_bytes", "dtype"),
    [
        (16, False, torch.bfloat16),
        (32, False, torch.float32),
        (32, True, torch.bfloat16),
        pytest.param(16, False, torch.float32, marks=pytest.mark.long),
        pytest.param(32, False, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(32, True, torch.float32, marks=pytest.mark.long),
    ],
)
def test_the_tower_takes_no_more_memory_than_is_said(
    grid: int, as_bytes: bool, dtype: torch.dtype
) -> None:
    """With about the proportions of the published one."""
    visual = {"width": 208, "heads": 4, "layers": 2, "patch_size": 6, "image_size": 6 * grid}
    visual |= {"output_dim": 512, "image_start_id": BEGIN, "mlp_ratio": 4.9231}
    config = build(visual=visual, hidden_size=512, kv_channels=128)
    model: Any = build_on_meta(QWenLMHeadModel, config, BuildContext(dtype=dtype))
    dummy_weights(model, torch.device("cpu"), 0)
    with torch.inference_mode(), Allocated() as allocated:
        pixels = torch.zeros(3, 6 * grid, 6 * grid)
        if as_bytes:
            pixels = torch.zeros(6 * grid, 6 * grid, 3, dtype=torch.uint8)
        images = [{"pixel_values": pixels.clone()} for _ in range(2)]
        model.embed_media("image", images)
    measured = allocated.peak / (2 * 256) / dtype.itemsize
    limit = QWenVLProcessor(config).media_limits({})["image"]
    assert limit.num_embeddings == 256
    assert measured <= limit.activations <= 1.6 * measured


def test_an_outline_is_what_becomes_of_a_picture() -> None:
    made = processor()
    begin = made._begin
    ids = [5, begin, begin + 1, 6]
    whole = made.process_media(ids, {"image": [picture(30, 50, 3)]}, {})
    again = made.process_media(ids, {"image": [made.picture_outline(30, 50, {})]}, {})
    assert list(again.token_ids) == list(whole.token_ids)
    assert [item.span for item in again.media] == [item.span for item in whole.media]
