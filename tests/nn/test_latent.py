"""The block of latent attention against transformers', its cache and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from engine_core.configs import CacheTensor
from engine_core.errors import OptionError
from engine_core.nn import LatentAttention, LatentSelfAttention, build_rotary_embedding
from engine_core.nn.latent import HeadsProjection
from engine_core.nn.quantization import Int8Scheme
from engine_core.nn.quantization.fp8_checkpoint import Fp8CheckpointMethod, Fp8Layout
from engine_core.nn.quantization.int8 import Int8Matrix
from engine_core.runtime.packing import weight_bytes
from engine_core.step_context import (
    AttentionMetadata,
    BuildContext,
    GroupMetadata,
    building,
)

HIDDEN, HEADS = 48, 4
SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def theirs(**changes: Any) -> tuple[DeepseekV3Attention, DeepseekV3Config]:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attn_implementation="eager",
        **SIZES,
        **changes,
    )
    torch.manual_seed(0)
    block = DeepseekV3Attention(config, 0).eval()
    for param in block.parameters():
        param.copy_(torch.randn(param.shape) * param.shape[-1] ** -0.5 + (param.dim() == 1))
    return block, config


def metadata(count: int, length: int, block_size: int) -> AttentionMetadata:
    """The last ``count`` tokens of one sequence, in blocks from 1 on."""
    at = torch.arange(length - count, length)
    table = torch.arange(1, 2 + length // block_size, dtype=torch.int32)[None]
    group = GroupMetadata(table, block_size + at)
    starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [length]))
    return AttentionMetadata(starts, lens, count, length, int(count == 1), (group,))


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_transformers_whatever_the_chunks(rank: int | None, interleaved: bool) -> None:
    block, config = theirs(q_lora_rank=rank, rope_interleave=interleaved, attention_bias=True)
    x = torch.randn(1, 21, HIDDEN)
    places = torch.arange(21)[None]
    mask = torch.full((21, 21), -torch.inf).triu(1)[None, None]
    expected = block(x, DeepseekV3RotaryEmbedding(config)(x, places), mask)[0]
    ours = LatentSelfAttention(
        HIDDEN, HEADS, **SIZES, q_lora_rank=rank, bias=True, interleaved_rope=interleaved
    )
    ours.load_state_dict(block.state_dict())
    (tensor,) = ours.attend.cache_spec().tensors(4)
    assert tensor == CacheTensor(name="latents", shape=(4, 40), dtype="float32")
    cache = torch.full((8, 4, 40), torch.nan)
    rotary = build_rotary_embedding(8)
    begin = 0
    for end in (9, 10, 18, 21):
        given = metadata(end - begin, end, 4)
        out = ours(x[:, begin:end], rotary(places[:, begin:end]), (cache,), given)
        torch.testing.assert_close(out, expected[:, begin:end], atol=2e-6, rtol=0)
        begin = end
    # Nothing else was written.
    assert cache[0].isnan().all()
    assert int(cache.isfinite().all(-1).sum()) == 21


def test_the_projection_of_heads_stays_numbers() -> None:
    block = LatentSelfAttention(HIDDEN, HEADS, **SIZES, q_lora_rank=32)
    scheme = Int8Scheme("int8")
    scheme.check_device(torch.device("cpu"))
    taken = scheme.give_methods(block)
    assert block.q_b_proj in taken
    assert block.kv_b_proj not in taken
    projection: HeadsProjection = block.kv_b_proj
    weight = nn.Parameter(torch.randn(HEADS * 40, 32), requires_grad=False)
    projection.weight = weight
    projection.method.process_after_load(projection)
    assert projection.weight is weight
    # As the method of a checkpoint that is quantised does.
    packed = Int8Matrix(weight)
    projection.set_packed(packed, "weight")
    assert projection.packed is None
    assert torch.equal(projection.heads, packed.dense().view(HEADS, 40, 32))


def test_the_plan_of_memory_counts_its_numbers_whatever_the_checkpoint_has() -> None:
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("meta"))):
        projection = HeadsProjection(32, HEADS, 40)
    assert weight_bytes(projection) == HEADS * 40 * 32 * 2
    layout = Fp8Layout("weight_scale_inv", True, None, True)
    projection.set_method(Fp8CheckpointMethod(layout, on_cpu=False))
    assert weight_bytes(projection) == HEADS * 40 * 32 * 2


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (BuildContext(kv_cache_dtype="int8"), "kv_cache_dtype 'int8': a cache of latent vectors"),
        (BuildContext(kv_cache_dtype="fp8"), "kv_cache_dtype 'fp8': a cache of latent vectors"),
        (BuildContext(deterministic=True), "deterministic: latent attention has no"),
    ],
)
def test_options_that_are_refused(context: BuildContext, message: str) -> None:
    with building(context), pytest.raises(OptionError, match=message):
        LatentAttention(HEADS, 32, 24, 8)


def test_ranks_that_the_heads_cannot_be_shared_by_are_refused() -> None:
    context = BuildContext(tp_size=3)
    with building(context), pytest.raises(ValueError, match="number of query heads"):
        LatentSelfAttention(HIDDEN, HEADS, **SIZES)


def test_a_bidirectional_prefix_is_refused() -> None:
    layer = LatentAttention(HEADS, 32, 24, 8)
    given = metadata(1, 1, 4)
    whole = AttentionMetadata(
        given.query_start, given.kv_lens, 1, 1, 1, given.groups, torch.tensor([1])
    )
    x: Tensor = torch.zeros(1, HEADS, 32)
    with pytest.raises(ValueError, match="no bidirectional prefix"):
        layer(x, x[:, 0], x[:, 0, :8], torch.zeros(HEADS, 40, 32), torch.zeros(2, 4, 40), whole)
