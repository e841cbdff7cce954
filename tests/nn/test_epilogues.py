"""Which operations a decoder layer asks for, with kernels that fuse and without; on a CPU.

A GPU is pretended: the methods of the linears are told of an H200, and the operations compute as
their references do. So the operations that a step on a GPU launches are counted without one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_core.kernels import GPU, CodedRows, Fp8Weight, GroupWeight
from engine_core.nn import (
    MLP,
    DecoderLayer,
    GatedMLP,
    LayerNorm,
    RMSNorm,
    SelfAttention,
    SiluAndMul,
    SparseMoE,
    build_down_linear,
    build_gateup_linear,
    build_qkv_proj,
)
from engine_core.nn.blocks import agree, link_layers
from engine_core.nn.epilogue import (
    Activated,
    AddNorm,
    Call,
    Divide,
    Epilogue,
    Quantized,
    RotateStore,
)
from engine_core.nn.fusions import fusions
from engine_core.nn.linear import Linear, LinearMethod, UnquantizedLinearMethod
from engine_core.nn.quantization.fp8 import Fp8LinearMethod
from engine_core.nn.quantization.fp8_checkpoint import Fp8CheckpointMethod, Fp8Layout
from engine_core.nn.quantization.groups import GroupAtLoadMethod
from engine_core.runtime.eager import ForwardPass
from engine_core.step_context import AttentionMetadata, BuildContext, GroupMetadata, building

H200 = GPU.of_capability((9, 0))
BF16 = torch.bfloat16
# So wide that what an H200 fuses for 65 to 128 rows is more than for 300, and other than for 64.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 896, 14, 2, 64, 2048
OPERATIONS = {
    "linear": ("linear", "linear_add", "linear_add_norm", "linear_rotary_store"),
    "epilogue": ("rotary_store", "store_kv"),
    "norm": ("rms_norm", "layer_norm", "rms_norm_codes", "layer_norm_codes"),
    "activation": ("silu_and_mul", "gelu_and_mul", "silu_and_mul_codes", "gelu_and_mul_codes"),
    "attention": ("paged_attention", "store_kv"),
    "experts": (
        *("route", "choose_experts", "run_experts"),
        *("run_experts_add", "run_experts_add_norm"),
    ),
}


def llama(**options: Any) -> DecoderLayer:
    attention = SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, **options)
    mlp = GatedMLP(HIDDEN, INTERMEDIATE)
    return DecoderLayer(attention, mlp, lambda: RMSNorm(HIDDEN, 1e-5))


def bloom(hidden: int = HIDDEN, **options: Any) -> DecoderLayer:
    heads = hidden // HEAD_DIM
    attention = SelfAttention(
        hidden, heads, heads, HEAD_DIM, qkv_bias=True, o_bias=True, alibi=True
    )
    mlp = MLP(hidden, 4 * hidden, "gelu_pytorch_tanh", bias=True)
    return DecoderLayer(attention, mlp, lambda: LayerNorm(hidden, 1e-5), **options)


def sparse(**options: Any) -> DecoderLayer:
    """Experts, of which each token takes a quarter."""
    attention = SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM)
    mlp = SparseMoE(HIDDEN, 64, 8, 2, renormalize=True, **options)
    return DecoderLayer(attention, mlp, lambda: RMSNorm(HIDDEN, 1e-5))


FAMILIES: dict[str, Callable[[], DecoderLayer]] = {
    "llama": llama,
    "qwen2": functools.partial(llama, qkv_bias=True),
    "qwen3": functools.partial(llama, qk_norm_eps=1e-5),
    "biases": functools.partial(llama, qkv_bias=True, o_bias=True),
    "bloom": bloom,
    "bloom after norm": functools.partial(bloom, residual_after_norm=True),
    "experts": sparse,
    "experts beside one": functools.partial(sparse, shared_size=128, shared_gate=True),
}


@functools.cache
def numbers() -> Tensor:
    """Random ones, of which each parameter takes a stretch that begins elsewhere."""
    most = max(2 * INTERMEDIATE * HIDDEN, 4 * HIDDEN * HIDDEN)
    return torch.randn(most + 2**18, generator=torch.Generator().manual_seed(0))


def stack(family: str, count: int = 3, ranks: int = 1) -> list[DecoderLayer]:
    """Linked layers with random numbers, the same whenever it is called."""
    device = torch.device("cpu")
    with building(BuildContext(dtype=torch.bfloat16, device=device, tp_size=ranks)):
        layers = [FAMILIES[family]() for _ in range(count)]
    start = 0
    for layer in layers:
        for name, param in layer.named_parameters():
            values = numbers()[start : start + param.numel()].view(param.shape)
            start = (start + 7_919) % 2**18
            near_one = "norm" in name and "weight" in name
            param.data.copy_(1 + 0.2 * values if near_one else values / param.shape[-1] ** 0.5)
    link_layers(layers)
    return layers


def inputs(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, HIDDEN, generator=generator).bfloat16()


def run(layers: list[DecoderLayer], rows: int, x: Any = None) -> Tensor:
    """The residual stream after the last layer, ``[rows, HIDDEN]`` float32."""
    generator = torch.Generator().manual_seed(rows)
    x = inputs(rows) if x is None else x
    angles = torch.rand(rows, HEAD_DIM // 2, generator=generator)
    metadata = AttentionMetadata(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        kv_lens=torch.ones(rows, dtype=torch.int32),
        max_query_len=1,
        max_kv_len=16,
        num_decode_rows=rows,
        groups=(
            GroupMetadata(torch.arange(rows, dtype=torch.int32)[:, None], 16 * torch.arange(rows)),
        ),
    )
    residual = None
    for layer in layers:
        attention: Any = layer.self_attn
        shape = (rows, 16, attention.qkv_proj.num_kv_heads, HEAD_DIM)
        cache = (torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16())
        turns = None if attention.attend.slopes is not None else (angles.cos(), angles.sin())
        x, residual = layer(x, residual, turns, cache, metadata)
    assert residual is not None
    total: Tensor = (x + residual)[0].float()
    return total


@pytest.fixture(autouse=True)
def quick_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16 as a matrix unit's: summed up in float32, and rounded once.

    Torch itself takes five times as long on a CPU that has no instructions for bfloat16.
    """
    plain = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = None if bias is None else bias.float()
        return plain(x.float(), weight.float(), wide).to(x.dtype)

    monkeypatch.setattr(nn.functional, "linear", linear)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("epilogue", "blocks"):
        monkeypatch.setattr(f"engine_core.nn.{module}.gpu_of", lambda device: H200)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations, as they are called; of one inside another only the outer's."""
    called: list[str] = []
    depth = [0]

    def counted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            activated = kwargs.get("gated") or kwargs.get("activation")
            if not depth[0]:
                called.append(name + "[activated]" * bool(activated))
            depth[0] += 1
            try:
                return operation(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for place, names in OPERATIONS.items():
        module = importlib.import_module(f"engine_core.nn.{place}")
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return called


# A layer in the middle of a stack.
FEW = ["linear_rotary_store", "paged_attention", "linear_add", "linear[activated]", "linear_add"]
MANY = [
    *("linear", "rotary_store", "paged_attention"),
    *("linear_add_norm", "linear", "silu_and_mul", "linear_add_norm"),
]
EXPERTS = ["linear_rotary_store", "paged_attention", "linear_add", "route", "run_experts_add"]
BLOOM = [
    *("linear", "store_kv", "paged_attention", "linear", "layer_norm"),
    *("linear[activated]", "linear_add_norm"),
]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("family", "rows", "expected"),
    [
        ("llama", 1, FEW),
        ("llama", 32, FEW),
        ("llama", 96, [*FEW[:4], "linear_add_norm"]),
        ("llama", 300, MANY),
        ("qwen2", 32, FEW),
        ("qwen3", 16, FEW),
        ("qwen3", 32, ["linear", "rotary_store", *FEW[1:]]),
        ("biases", 32, FEW),
        ("bloom", 96, BLOOM),
        ("experts", 1, EXPERTS),
        ("experts", 2, [*EXPERTS[:2], "linear", "rms_norm", "route", "run_experts_add_norm"]),
        ("experts", 300, [*MANY[:4], "route", "run_experts_add_norm"]),
    ],
)
def test_operations_of_a_layer_on_a_gpu(
    family: str, rows: int, expected: list[str], operations: list[str]
) -> None:
    layers = stack(family)
    agree(nn.ModuleList(layers), torch.device("cpu"))
    run(layers, rows)
    starts = [i for i, name in enumerate(operations) if name == "paged_attention"]
    # From one attention to the next, turned so that the layer comes first.
    between = operations[starts[1] : starts[2]]
    turn = expected.index("paged_attention")
    assert between == expected[turn:] + expected[:turn]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("family", "rows"),
    [
        # Llama's and two of the others for each number of rows.
        pytest.param(
            family, rows, marks=() if i % 3 == j or family == "llama" else pytest.mark.long
        )
        for i, family in enumerate(FAMILIES)
        for j, rows in enumerate((1, 96, 300))
    ],
)
def test_fused_is_as_plain(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = stack(family, 2)
    agree(nn.ModuleList(fused), torch.device("cpu"))
    got = run(fused, rows)
    watched = stack(family, 2)
    seen: list[str] = []
    for layer in watched:
        layer.o = layer.self_attn.o_proj.register_forward_hook(
            lambda module, args, output: seen.append(type(output).__name__)
        )
    plain = run(watched, rows)
    assert seen == ["Tensor"] * len(watched)
    assert float((got - plain).norm() / plain.norm()) < 0.02


CODED = [
    *("linear_rotary_store", "paged_attention", "linear_add_norm"),
    *("linear", "silu_and_mul_codes", "linear_add_norm"),
]
# Where the scales of a product are applied by its kernel, what follows has none to apply.
MANY_CODED = [
    *("linear", "rotary_store", "paged_attention", "linear", "rms_norm_codes"),
    *("linear", "silu_and_mul_codes", "linear", "rms_norm_codes"),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Multiplies rows by 8-bit floats as a GPU does; the kinds of rows that came, one by one."""
    kinds: list[str] = []

    def product(weight: Fp8Weight, x: Tensor | CodedRows, bias: Tensor | None) -> Tensor:
        kinds.append(type(x).__name__)
        coded = x if isinstance(x, CodedRows) else CodedRows.of(x, weight.row_form)
        wide = None if bias is None else bias.float()
        rows = coded.numbers().float()
        return nn.functional.linear(rows, weight.numbers(torch.float32), wide).to(x.dtype)

    monkeypatch.setattr(Fp8Weight, "product", product)
    return kinds


def quantize(layers: list[DecoderLayer], scale: Tensor | None = None) -> list[DecoderLayer]:
    """The same with 8-bit floats, of calibrated activations if there is a scale."""
    for layer in layers:
        for linear in [each for each in layer.modules() if isinstance(each, Linear)]:
            made = Fp8Weight.quantized(linear.weight.data)
            linear.method = Fp8LinearMethod()
            form = (made.codes, made.scales, made.dtype, scale)
            linear.set_packed(Fp8Weight(*form), "weight")
    return layers


@pytest.mark.usefixtures("pretended", "products")
@pytest.mark.parametrize(("rows", "expected"), [(65, CODED), (300, MANY_CODED)])
def test_operations_of_a_layer_whose_rows_are_quantised(
    rows: int, expected: list[str], operations: list[str]
) -> None:
    layers = quantize(stack("llama"))
    agree(nn.ModuleList(layers), torch.device("cpu"))
    run(layers, rows)
    ends = [i for i, name in enumerate(operations) if name == "paged_attention"]
    turn = expected.index("paged_attention")
    assert operations[ends[1] : ends[2]] == expected[turn:] + expected[:turn]
    # A norm whose division is left out has no rows to be quantised.
    operations.clear()
    run(layers, 3)
    assert not [name for name in operations if name.endswith("codes")]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("family", "static", "rows"),
    [
        *[("llama", False, 300), ("biases", True, 65)],
        *[("bloom", False, 65), ("bloom after norm", True, 65)],
    ],
)
def test_rows_in_codes_are_those_of_numbers(
    family: str, static: bool, rows: int, products: list[str]
) -> None:
    """Bit for bit what layers give whose parts are watched, each of which takes numbers."""
    scale = torch.tensor(0.02) if static else None
    coded, watched = (quantize(stack(family, 2), scale) for _ in range(2))
    for layers in (coded, watched):
        agree(nn.ModuleList(layers), torch.device("cpu"))
    for layer in watched:
        for part in (layer, layer.mlp.act):
            part.register_forward_hook(lambda module, args, output: None)
    plain = run(watched, rows)
    assert set(products) == {"Tensor"}
    products.clear()
    torch.testing.assert_close(run(coded, rows), plain, rtol=0, atol=0)
    # Of q, k and v's linear, o's, the first and the last of the feed-forward; in the first layer a
    # norm stands alone.
    kinds = [product == "CodedRows" for product in products]
    norms = family != "bloom after norm"
    gated = family in ("llama", "biases")
    assert kinds[:4] == [False, False, norms, gated]
    assert kinds[4:8] == [norms, False, norms, gated]


@pytest.mark.usefixtures("pretended")
def test_ranks_quantise_their_parts_of_rows(
    products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank's terms are the same."""
    monkeypatch.setattr("engine_core.nn.linear.all_reduce", lambda x, _: 2 * x)
    coded, watched = (quantize(stack("llama", 2, ranks=2)) for _ in range(2))
    for layers in (coded, watched):
        agree(nn.ModuleList(layers), torch.device("cpu"))
    for layer in watched:
        for part in (layer, layer.mlp.act):
            part.register_forward_hook(lambda module, args, output: None)
    plain = run(watched, 96)
    products.clear()
    torch.testing.assert_close(run(coded, 96), plain, rtol=0, atol=0)
    assert products[4:8] == ["CodedRows", "Tensor", "CodedRows", "CodedRows"]


def test_which_linears_take_rows_in_codes() -> None:
    def refusal(
        method: LinearMethod, rows: int = 96, gpu: GPU | None = H200, **options: Any
    ) -> str:
        with building(context(**options)):
            linear = build_down_linear(4096, 512)
        linear.method = method
        call = Call(rows, torch.bfloat16, gpu)
        return linear.declined(Quantized(None), call) or ""

    assert refusal(Fp8LinearMethod()) == refusal(Fp8LinearMethod(), tp_size=2) == ""
    assert "few rows" in refusal(Fp8LinearMethod(), 64)
    assert "device" in refusal(Fp8LinearMethod(), gpu=None)
    assert "matrix units" in refusal(Fp8LinearMethod(), gpu=GPU.of_capability((8, 0)))
    assert "batch-invariant" in refusal(Fp8LinearMethod(), deterministic=True)
    assert "keep their bits" in refusal(UnquantizedLinearMethod())
    blocks = Fp8Layout("weight_scale_inv", True, None, True)
    assert "blocks" in refusal(Fp8CheckpointMethod(blocks, False))
    weights_alone = Fp8Layout("weight_scale", False, None, False)
    assert "no activations" in refusal(Fp8CheckpointMethod(weights_alone, False))
    assert refusal(Fp8CheckpointMethod(Fp8Layout("weight_scale", False, None, True), False)) == ""
    assert "fuses nothing" in refusal(OtherMethod())


@pytest.mark.usefixtures("pretended")
def test_a_hook_turns_fusions_off_and_its_removal_on_again(operations: list[str]) -> None:
    layers = stack("llama")
    agree(nn.ModuleList(layers), torch.device("cpu"))
    run(layers, 3)
    fused = list(operations)
    handle = layers[1].mlp.act.register_forward_hook(lambda module, args, output: None)
    operations.clear()
    run(layers, 3)
    assert "silu_and_mul" in operations
    assert "rms_norm" in operations
    handle.remove()
    # The layer before would have applied this norm.
    seen: list[None] = []
    handle = layers[1].input_layernorm.register_forward_hook(lambda *_: seen.append(None))
    run(layers, 3)
    assert len(seen) == 1
    handle.remove()
    operations.clear()
    run(layers, 3)
    assert operations == fused


class OwnLayer(DecoderLayer):
    """A layer that does more than :class:`DecoderLayer`."""

    def forward(self, x: Any, *args: Any) -> Any:
        assert isinstance(x, Tensor)
        out, residual = super().forward(x, *args)
        assert isinstance(out, Tensor)
        return 2 * out, residual


@pytest.mark.usefixtures("pretended")
def test_a_layer_with_a_forward_of_its_own_is_not_linked() -> None:
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
        own = OwnLayer(
            SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
            GatedMLP(HIDDEN, INTERMEDIATE),
            lambda: RMSNorm(HIDDEN, 1e-5),
        )
    (before,), (after,) = stack("llama", 1), stack("llama", 1)
    own.load_state_dict(before.state_dict())
    layers = [before, own, after]
    link_layers(layers)
    agree(nn.ModuleList(layers), torch.device("cpu"))
    assert run(layers, 3).isfinite().all()


class OwnMLP(GatedMLP):
    """Takes numbers alone, and so do the next ones."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x * 1)
        return out


class OwnExperts(SparseMoE):
    def forward(self, x: Tensor, attn_metadata: Any = None) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x * 1, attn_metadata)
        return out


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("family", "kind"), [("llama", OwnMLP), ("experts", OwnExperts)])
def test_a_branch_with_a_forward_of_its_own_gets_numbers(
    family: str, kind: type[nn.Module]
) -> None:
    layers, expected = stack(family), run(stack(family), 1)
    for layer in layers:
        layer.mlp.__class__ = kind
    link_layers(layers)
    agree(nn.ModuleList(layers), torch.device("cpu"))
    torch.testing.assert_close(run(layers, 1), expected, atol=0.05, rtol=0.05)
    reasons = [fusion.reason for fusion in fusions(layers[0], H200, torch.bfloat16)]
    assert "the next branch has a forward of its own" in reasons


class Stack(nn.Module):
    """Layers that a runner calls as a model."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def prepare_inputs_for_generation(self, *_: object) -> dict[str, Any]:
        return {}

    def forward(self) -> Tensor:
        return run(list(self.layers), 3)[None]


@pytest.mark.usefixtures("pretended")
def test_a_runner_tells_the_layers_of_hooks(operations: list[str]) -> None:
    layers = stack("llama")
    agree(nn.ModuleList(layers), torch.device("cpu"))
    forward = ForwardPass(Stack(layers), [])
    step: Any = SimpleNamespace(inputs_embeds=None, input_ids=torch.zeros(1, 3))

    def taken(call: Callable[[], object]) -> list[str]:
        operations.clear()
        call()
        return list(operations)

    fused = taken(lambda: forward.hidden(step))
    assert "silu_and_mul" not in fused
    handle = layers[1].mlp.act.register_forward_hook(lambda module, args, output: None)
    # Before the next step, too.
    unfused = taken(lambda: run(layers, 3))
    assert "silu_and_mul" in unfused
    assert taken(lambda: forward.hidden(step)).count("silu_and_mul") == 3
    handle.remove()
    assert taken(lambda: forward.hidden(step)) == fused


def context(**options: Any) -> BuildContext:
    return BuildContext(dtype=torch.bfloat16, device=torch.device("meta"), **options)


def declined(linear: Linear, epilogue: Epilogue, rows: int) -> str | None:
    return linear.declined(epilogue, Call(rows, torch.bfloat16, H200))


def test_a_gate_by_codes_is_activated_where_many_rows_are_multiplied_by_these() -> None:
    with building(context()):
        linear = build_gateup_linear(4096, [14336, 14336])
    activated = Activated(SiluAndMul())

    def fuses(weight: GroupWeight, bits: int, **options: Any) -> list[bool]:
        linear.method, linear.packed = GroupAtLoadMethod(bits, weight.group_size), weight
        for name, value in options.items():
            setattr(linear.method, name, value)
        return [declined(linear, activated, rows) is None for rows in (256, 300, 512, 1200)]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scales, zeros = empty(32, 28672, dtype=torch.float16), empty(32, 28672, dtype=torch.int8)
    words = empty(28672, 32, 32, dtype=torch.int16)
    of_groups = GroupWeight(words, scales, zeros, 4096, 128, torch.bfloat16)
    assert fuses(of_groups, 4) == [True, True, True, False]
    assert fuses(replace(of_groups, group_size=64), 4)[:2] == [True, False]
    rows = empty(28672, dtype=torch.float32)
    words = empty(28672, 32, 32, dtype=torch.int32)
    of_rows = GroupWeight(words, rows, None, 4096, 0, torch.bfloat16)
    assert fuses(of_rows, 8) == [True, True, True, False]
    assert fuses(replace(of_rows, quantizes_rows=True), 8, quantizes_rows=True)[1] is False


def test_what_does_not_agree_says_why() -> None:
    with building(context()):
        plain = llama()
    attention: Any = plain.self_attn
    add = AddNorm(plain.input_layernorm)
    assert declined(attention.o_proj, AddNorm(add.norm, deferred=True), 8) is None
    assert declined(attention.o_proj, AddNorm(add.norm, deferred=True), 4096) is not None
    centred = AddNorm(LayerNorm(HIDDEN), deferred=True)
    assert "LayerNorm" in str(declined(attention.o_proj, centred, 8))
    assert "norm of its own" in str(declined(attention.o_proj, AddNorm(add.norm, add.norm), 96))
    own = AddNorm(nn.Identity())
    assert "not a norm of a kernel" in str(declined(attention.o_proj, own, 96))
    assert "not an activation" in str(declined(attention.o_proj, Activated(nn.Tanh()), 8))
    assert "device" in str(attention.o_proj.declined(add, Call(8, torch.bfloat16, None)))
    first, epilogue, _ = attention.ends()
    assert declined(first, Divide(epilogue), 8) is None
    half = first.declined(Divide(epilogue), Call(8, torch.float16, H200))
    assert "could overflow" in str(half)
    with building(context()):
        narrow = build_qkv_proj(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, v_head_dim=32)
        after_norm = DecoderLayer(
            plain.self_attn, plain.mlp, lambda: RMSNorm(HIDDEN), residual_after_norm=True
        )
    assert "another size" in str(declined(narrow, epilogue, 8))
    reasons = [fusion.reason for fusion in fusions(after_norm, H200, torch.bfloat16)]
    assert "the residual is what the norm gives" in reasons
    with building(context(deterministic=True)):
        invariant = llama()
    attention = invariant.self_attn
    assert "batch-invariant" in str(declined(attention.o_proj, add, 96))
    deferred = AddNorm(add.norm, deferred=True)
    assert "batch-invariant" in str(declined(attention.o_proj, deferred, 8))
    head_norm = RMSNorm(HEAD_DIM)
    for norms in ((None, None), (head_norm, head_norm)):
        storing = RotateStore(attention.rotate, False, *norms)
        assert declined(attention.qkv_proj, storing, 8) is None
        assert declined(attention.qkv_proj, storing, 65) is not None
    with building(context(tp_size=2)):
        split = llama()
    attention = split.self_attn
    assert "ranks" in str(declined(attention.o_proj, add, 96))


def test_experts_that_do_not_agree_say_why() -> None:
    """For a norm that is left to divide, before them and after them, and for one that divides."""
    add = AddNorm(RMSNorm(HIDDEN))
    deferred = AddNorm(add.norm, deferred=True)

    def reasons(block: Any, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[str | None]:
        asked = (Divide(block.ends()[1]), deferred, add)
        return [block.declined(epilogue, Call(rows, dtype, H200)) for epilogue in asked]

    def blocks(build: BuildContext, **options: Any) -> Any:
        with building(build):
            return sparse(**options).mlp

    block = blocks(context())
    assert reasons(block, 1) == [None, None, "for so few rows the norm is left to divide, or alone"]
    grouped = reasons(block, 2)
    assert "grouped" in str(grouped[0])
    assert "whole norm" in str(grouped[1])
    assert grouped[2] is None
    assert "could overflow" in str(reasons(block, 1, torch.float16)[0])
    assert "device" in str(block.declined(add, Call(1, torch.bfloat16, None)))
    for norm, why in ((LayerNorm(HIDDEN), "LayerNorm"), (nn.Identity(), "not a norm of a kernel")):
        call = Call(1, torch.bfloat16, H200)
        assert why in str(block.declined(AddNorm(norm, deferred=True), call))
    assert "norm of its own" in str(block.declined(AddNorm(add.norm, add.norm), call))
    assert all("shared" in str(why) for why in reasons(blocks(context(), shared_size=64), 1))
    assert all("batch-inv" in str(why) for why in reasons(blocks(context(deterministic=True)), 1))
    assert all("ranks" in str(why) for why in reasons(blocks(context(tp_size=2)), 1)[1:])
    block.experts.down_proj.packed = object()
    assert None not in reasons(block, 1)[:2]
    block.gate.method = OtherMethod()
    assert "arithmetic" in str(reasons(block, 1)[0])


class Doubling(Epilogue):
    """An epilogue that no method of the core knows."""

    def plain(self, layer: Linear, x: Tensor) -> Tensor:
        out: Tensor = 2 * layer(x)
        return out


class DoublingMethod(UnquantizedLinearMethod):
    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        if isinstance(epilogue, Doubling) and call.rows < 3:
            return None
        return super().declined(layer, epilogue, call)

    def apply_with(self, layer: Linear, x: Any, epilogue: Epilogue, *operands: Any) -> Any:
        assert isinstance(epilogue, Doubling)
        return self.apply(layer, 2 * x, None)


class OverwritingMethod(UnquantizedLinearMethod):
    """Adds to the residual in place where it may, for any number of rows."""

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        return None if isinstance(epilogue, AddNorm) and not epilogue.deferred else "not this"

    def apply_with(self, layer: Linear, x: Any, epilogue: Epilogue, *operands: Any) -> Any:
        assert isinstance(epilogue, AddNorm)
        residual, may_overwrite = operands
        product = self.apply(layer, x, layer.bias)
        total = residual.add_(product) if may_overwrite else residual + product
        return epilogue.norm(total), total


@pytest.mark.parametrize("family", ["llama", "bloom after norm"])
def test_the_tensor_of_a_caller_is_not_written_to(family: str) -> None:
    layers, x = stack(family), inputs(3)
    expected = run(layers, 3, x)
    for layer in layers:
        branches: Any = (layer.self_attn, layer.mlp)
        for branch in branches:
            branch.ends()[2].method = OverwritingMethod()
    agree(nn.ModuleList(layers), torch.device("cpu"))
    got = run(layers, 3, x)
    torch.testing.assert_close(x, inputs(3), rtol=0, atol=0)
    assert float((got - expected).norm() / expected.norm()) < 0.02


class OtherMethod(LinearMethod):
    """A method that was written before there were epilogues."""

    def create_weights(self, layer: Linear, *sizes: Any) -> None:
        UnquantizedLinearMethod().create_weights(layer, *sizes)

    def apply(self, layer: Linear, x: Any, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


def test_a_method_and_an_epilogue_of_ones_own() -> None:
    parts = [(None, 4, 0, 4)]
    for method in (DoublingMethod(), OtherMethod()):
        linear = Linear(3, parts, bias=False, dtype=torch.float32, method=method)
        nn.init.normal_(linear.weight)
        for rows in (1, 2, 3):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(linear(x, Doubling()), 2 * x @ linear.weight.T)
    assert "fuses nothing" in str(linear.declined(Doubling(), Call.of(x)))


def test_fusions_are_listed_by_kind_of_layer() -> None:
    with building(context()):
        model = nn.Module()
        model.layers = nn.ModuleList(llama() for _ in range(4))
        link_layers(list(model.layers))
    rows = {(f.layers, f.linear, f.epilogue): f.rows for f in fusions(model, H200, torch.bfloat16)}
    kinds = ["layers.0-2", "layers.3"]
    assert list(dict.fromkeys(layers for layers, _, _ in rows)) == kinds
    for layers in kinds:
        assert rows[layers, "self_attn.qkv_proj", "rotation and storing"] == "1-256"
    with building(context()):
        normed, wide = FAMILIES["qwen3"](), bloom(2048)
        ragged = DecoderLayer(
            SelfAttention(HIDDEN, 8, 2, 112, qk_norm_eps=1e-5),
            GatedMLP(HIDDEN, INTERMEDIATE),
            lambda: RMSNorm(HIDDEN, 1e-5),
        )
    first, *_ = fusions(normed, H200, torch.bfloat16)
    assert (first.epilogue, first.rows) == ("norms, rotation and storing", "1-16")
    first, *_ = fusions(ragged, H200, torch.bfloat16)
    assert (first.rows, "do not make up a head" in str(first.reason)) == ("", True)
    first, *_, up = fusions(wide, H200, torch.bfloat16)
    assert (first.linear, first.rows) == ("self_attn.qkv_proj", "1-64")  # keys are stored
    assert (up.linear, up.reason) == ("mlp.up_proj", None)
    for layer in model.layers:
        for linear in [each for each in layer.modules() if isinstance(each, Linear)]:
            linear.method = Fp8LinearMethod()
    coded = {
        (f.linear, f.epilogue): (f.rows, f.reason)
        for f in fusions(model, H200, torch.bfloat16)
        if f.epilogue.startswith("rows quantised") and f.layers == "layers.0-2"
    }
    assert coded == {
        (linear, f"rows quantised by the {maker}"): (
            "65-8192",
            "so few rows keep their 16 bits",
        )
        for linear, maker in (
            ("self_attn.o_proj, next linear", "norm between them"),
            ("mlp.down_proj, next linear", "norm between them"),
            ("mlp.down_proj", "activation"),
        )
    }
    ends = [linear for layers, linear, _ in rows if layers == "layers.3"]
    assert "mlp.down_proj" not in ends
    assert all(f.rows == "" and f.reason for f in fusions(model, None, torch.bfloat16))


def test_a_quick_gelu_is_part_of_a_linear_for_many_rows() -> None:
    """As of CLIP's encoders, and not in float32."""
    device = torch.device("cpu")
    with building(BuildContext(dtype=torch.bfloat16, device=device)):
        mlp = MLP(1280, 5120, "quick_gelu", bias=True)
    up, epilogue, _ = mlp.ends()
    fused = [
        rows for rows in (256, 1024, 5476) if not up.declined(epilogue, Call(rows, BF16, H200))
    ]
    assert fused == [5476]
    assert up.declined(epilogue, Call(5476, torch.float32, H200))
    assert up.declined(epilogue, Call(5476, BF16, GPU.of_capability((10, 0))))
    assert up.declined(epilogue, Call(5476, BF16, None))
