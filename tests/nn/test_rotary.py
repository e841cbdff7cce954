"""Rotary embeddings against those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from engine_core.configs import HFConfig
from engine_core.nn import build_rotary_embedding, build_rotary_embedding_from_config
from engine_core.nn.rotary import DynamicNTKRotaryEmbedding, rope_lengths
from engine_core.step_context import AttentionMetadata, StepContext

SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn ramp": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
}


def theirs(scaling: dict, positions: torch.Tensor, theta: float) -> tuple[torch.Tensor, ...]:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    # Theirs repeat the half for both parts of a head.
    return cos[0, :, :32], sin[0, :, :32]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_angles_are_those_of_transformers(scaling: dict, theta: float) -> None:
    positions = torch.tensor([[0, 1, 2, 63, 64, 200, 255]])
    rotary = build_rotary_embedding(64, base=theta, max_position_embeddings=256, scaling=scaling)
    for ours, expected in zip(rotary(positions), theirs(scaling, positions, theta), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [10, 64, 65, 100, 300])
def test_dynamic_scaling_is_that_of_transformers_for_a_prompt_of_any_length(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    positions = torch.arange(length).unsqueeze(0)
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        rope_parameters={**scaling, "rope_theta": 10000.0},
    )
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    rotary = build_rotary_embedding(64, max_position_embeddings=64, scaling=scaling)
    ours = rotary(positions, torch.full((length,), length))
    for own, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, other[0, :, :32], atol=2e-5, rtol=0)


def test_a_tokens_rope_length_is_that_of_its_prompt_or_its_own_position() -> None:
    context = StepContext(
        input_ids=torch.zeros(1, 4, dtype=torch.int64),
        position_ids=torch.tensor([[0, 1, 99, 5]]),
        row_ids=torch.tensor([0, 0, 1, 2]),
        attn_metadata=AttentionMetadata(
            torch.tensor([0, 2, 3, 4]), torch.tensor([2, 100, 6]), 2, 100, 0, ()
        ),
        row_state={"prompt_len": torch.tensor([80, 70, 3])},
    )
    assert rope_lengths(context).tolist() == [80, 80, 100, 6]


def test_dynamic_scaling_without_lengths_is_refused() -> None:
    rotary = build_rotary_embedding(8, scaling={"rope_type": "dynamic", "factor": 2.0})
    assert isinstance(rotary, DynamicNTKRotaryEmbedding)
    with pytest.raises(ValueError, match="needs rope_lengths"):
        rotary(torch.arange(3))


WRONG = {
    "zero": (
        {
            "rope_type": "llama3",
            "factor": 0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "needs a positive number 'factor', got 0",
    ),
    "unknown": ({"type": "longest"}, "'longest' is not one of default, linear"),
    "no factor": ({"rope_type": "linear"}, "needs a number 'factor', got None"),
    "fast": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0},
        "needs a positive number 'beta_fast', got 0",
    ),
    "slow": (
        {"rope_type": "yarn", "factor": 4.0, "beta_slow": "x"},
        "needs a number 'beta_slow', got 'x'",
    ),
    "attention": (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"},
        "needs a number 'attention_factor', got 'x'",
    ),
    "mscale": (
        {"rope_type": "yarn", "factor": 4.0, "mscale": "x", "mscale_all_dim": 1},
        "needs a number 'mscale', got 'x'",
    ),
    "truncate": ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "for 'truncate', got"),
    "text": ({"rope_type": "yarn", "factor": "4"}, "needs a number 'factor', got '4'"),
}


@pytest.mark.parametrize(("scaling", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_scaling_is_refused_by_name(scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_rotary_embedding(8, scaling=scaling)


def test_old_and_new_spellings_of_a_config_mean_the_same() -> None:
    old = HFConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=99,
        rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    new = HFConfig(
        hidden_size=1,
        num_attention_heads=1,
        head_dim=16,
        max_position_embeddings=99,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    )
    one, two = map(build_rotary_embedding_from_config, (old, new))
    assert torch.equal(one.inv_freq, two.inv_freq)
    assert one.inv_freq.shape == (8,)


@pytest.mark.parametrize(
    ("config_class", "embedding_class", "interleaved"),
    [
        (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, False),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, True),
    ],
    ids=["qwen2-vl", "qwen3-vl"],
)
@pytest.mark.parametrize("sections", [[16, 8, 8], [8, 12, 12], [12, 10, 10]])
def test_three_positions_a_token_are_those_of_transformers(
    config_class: type, embedding_class: type, interleaved: bool, sections: list[int]
) -> None:
    if interleaved and sections == [8, 12, 12]:
        sections = [11, 11, 10]  # the other would deal out more angles than there are
    scaling = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if interleaved:
        scaling["mrope_interleaved"] = True
    config = config_class(
        hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=dict(scaling)
    )
    positions = torch.randint(0, 500, (3, 17), generator=torch.Generator().manual_seed(0))
    theirs_cos, theirs_sin = embedding_class(config)(torch.zeros(1), positions[:, None])
    rotary = build_rotary_embedding(64, base=10000.0, scaling=scaling)
    cos, sin = rotary(positions)
    torch.testing.assert_close(cos, theirs_cos[0, :, :32])
    torch.testing.assert_close(sin, theirs_sin[0, :, :32])
    # Of text all three are equal.
    text = positions[:1]
    plain = build_rotary_embedding(64, base=10000.0)(text)
    for three in (rotary(text), rotary(text.expand(3, -1))):
        torch.testing.assert_close(three, plain)


def test_sections_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 32"):
        build_rotary_embedding(64, scaling={"rope_type": "mrope", "mrope_section": [16, 8, 4]})
    with pytest.raises(ValueError, match="mrope_section"):
        build_rotary_embedding(64, scaling={"rope_type": "mrope"})
