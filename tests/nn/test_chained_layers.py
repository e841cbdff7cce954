"""Layers whose rest is one operation, up to the next queries, keys and values, or the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine_core.kernels import GPU, Fp8Weight
from engine_core.nn import DecoderLayer, GatedMLP, LayerNorm, PreNormed, RMSNorm, SelfAttention
from engine_core.nn import linear as linears
from engine_core.nn.blocks import Attended, agree, link_layers
from engine_core.nn.decoder import Decoder
from engine_core.nn.epilogue import Call, Epilogue
from engine_core.nn.fusions import fusions
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.fp8 import Fp8LinearMethod
from engine_core.nn.quantization.groups import (
    GroupAtLoadMethod,
    GroupLayout,
    GroupLinearMethod,
)
from engine_core.step_context import AttentionMetadata, BuildContext, GroupMetadata, building

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 96
TOKENS = 3


def layout(
    zeros: torch.dtype | None = None,
    scales: torch.dtype = torch.float16,
    *,
    ordered: bool = False,
) -> GroupLayout:
    """4 bits in groups of 128, as checkpoints have them."""
    return GroupLayout(4, 128, zeros, ordered, scales)


class KeptCodes(Fp8LinearMethod):
    """8-bit floats that stay codes on a CPU too."""

    def pack(self, weight: Tensor) -> Fp8Weight:
        return Fp8Weight.quantized(weight)


def layers(
    count: int = 3,
    mlp: type[GatedMLP] = GatedMLP,
    norms: Callable[[], RMSNorm] = lambda: RMSNorm(HIDDEN, 1e-5),
    **options: Any,
) -> list[DecoderLayer]:
    """Linked layers of random numbers in 8-bit floats."""
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
        made = [
            DecoderLayer(
                SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, qkv_bias=True),
                mlp(HIDDEN, INTERMEDIATE),
                norms,
                **options,
            )
            for _ in range(count)
        ]
    draw = torch.Generator().manual_seed(0)
    for layer in made:
        for name, param in layer.named_parameters():
            values = torch.randn(param.shape, generator=draw)
            scaled = 1 + 0.2 * values if "norm" in name else values / param.shape[-1] ** 0.5
            param.data.copy_(scaled.to(torch.bfloat16))
        for module in layer.modules():
            if isinstance(module, Linear):
                module.method = KeptCodes()
                module.method.process_after_load(module)
    link_layers(made)
    return made


@pytest.fixture
def _chains_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is chained wherever it runs: one by one, as without a kernel."""

    def declined(rows: int, *_: object) -> str | None:
        return None if rows == 1 else "many rows"

    monkeypatch.setattr(linears, "chain_declined", declined)


def tokens() -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], AttentionMetadata]]:
    """Each token, its angles and its step's metadata."""
    draw = torch.Generator().manual_seed(1)
    for position in range(TOKENS):
        x = torch.randn(1, 1, HIDDEN, generator=draw).to(torch.bfloat16)
        angles = torch.rand(1, HEAD_DIM // 2, generator=draw)
        table, slots = torch.tensor([[1]], dtype=torch.int32), torch.tensor([16 + position])
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_lens=torch.tensor([position + 1], dtype=torch.int32),
            max_query_len=1,
            max_kv_len=position + 1,
            num_decode_rows=1,
            groups=(GroupMetadata(table, slots),),
        )
        yield x, (angles.cos(), angles.sin()), metadata


def steps(made: list[DecoderLayer]) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """Steps of one token each: what layers gave at the last, streams of each, and caches."""
    agree(nn.ModuleList(made), torch.device("cpu"))
    caches = [
        torch.zeros(2, 2, 16, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(len(made))
    ]
    given: list[Any] = []
    streams = []
    for token, cos_sin, metadata in tokens():
        x: Any = token
        residual, given = None, []
        for layer, cache in zip(made, caches, strict=True):
            inputs = cos_sin, (cache[0], cache[1]), metadata
            x, residual = layer(x, residual, *inputs)
            given.append(x)
        assert residual is not None
        streams.append((x + residual).float())
    return given, streams, caches


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_layer_leaves_its_rest_to_the_next_one() -> None:
    given, streams, caches = steps(layers())
    assert [type(each) for each in given] == [Attended, Attended, Tensor]
    apart = layers()
    for layer in apart:
        # A watched layer gives what it says that it gives.
        layer.register_forward_hook(lambda module, args, output: None)
    plain, wanted, stored = steps(apart)
    assert [type(each) for each in plain] == [Tensor] * 3
    for found, expected in zip(streams + caches, wanted + stored, strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.usefixtures("_chains_on_cpu")
def test_attention_hears_of_the_chain_that_follows() -> None:
    """With the bits of its codes; but a family's own, which may not know the word."""
    made, heard = layers(), []

    def attend(inner: Any, *args: Any, chained: int = 0) -> Tensor:
        heard.append(chained)
        return inner(*args, chained=chained)

    for layer in made:
        own = layer.self_attn.attend
        vars(own)["attend"] = partial(attend, own.attend)
    given, streams, _ = steps(made)
    assert [type(each) for each in given] == [Attended, Attended, Tensor]
    assert heard == [8, 8, 0] * TOKENS

    def old(inner: Any, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Tensor:
        return inner(q, k, v, metadata)

    made = layers()
    for layer in made:
        own = layer.self_attn.attend
        vars(own)["attend"] = partial(old, own.attend)
    given, same, _ = steps(made)
    assert [type(each) for each in given] == [Attended, Attended, Tensor]
    assert all(torch.equal(a, b) for a, b in zip(streams, same, strict=True))


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_hook_on_either_layer_ends_the_chain_between_them() -> None:
    made = layers()
    watched = []
    made[1].mlp.down_proj.register_forward_hook(lambda *_: watched.append(1))
    given, streams, _ = steps(made)
    assert [type(each) for each in given] == [Tensor] * 3
    assert len(watched) == TOKENS
    _, expected, _ = steps(layers())
    for found, wanted in zip(streams, expected, strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def decoder(norm: nn.Module | None = None, count: int = 2, **options: Any) -> Decoder:
    """Layers under a final norm, of random numbers unless it is given."""
    config: Any = SimpleNamespace(vocab_size=8, hidden_size=HIDDEN, rms_norm_eps=1e-5)
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
        made = Decoder(config, [*layers(count, **options)], norm=norm)
    if norm is None:
        numbers = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
        made.norm.weight.data.copy_(1 + 0.2 * numbers)
    return made


def states(made: Decoder, *, chosen: bool = False) -> tuple[list[Tensor], list[type]]:
    """Hidden states of each token, and what the last layer gave; of those ``chosen`` by themselves.

    Then nothing is told of the layer.
    """
    agree(made, torch.device("cpu"))
    count, given = len(made.layers), []
    caches = torch.zeros(count, 2, 2, 16, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    last = made.layers[-1]
    forward = last.forward

    def told(*args: Any) -> Any:
        out = forward(*args)
        given.append(type(out[0]))
        return out

    if not chosen:
        vars(last)["forward"] = told
    wanted = torch.tensor([0]) if chosen else None
    found = [
        made(x, [cos_sin] * count, [(each[0], each[1]) for each in caches], metadata, wanted)
        for x, cos_sin, metadata in tokens()
    ]
    return found, given


@pytest.mark.usefixtures("_chains_on_cpu")
@pytest.mark.parametrize("count", [1, 3])
def test_the_last_layers_rest_is_one_operation_to_the_final_norm(count: int) -> None:
    """The first of one layer is the last, which no chain comes before."""
    found, given = states(decoder(count=count))
    assert given == [PreNormed] * TOKENS
    chosen, _ = states(decoder(count=count), chosen=True)
    apart = decoder(count=count)
    apart.norm.register_forward_hook(lambda *_: None)
    for layer in apart.layers:
        layer.register_forward_hook(lambda *_: None)
    plain, each = states(apart)
    assert each == [Tensor] * TOKENS
    for got, one, want in zip(found, chosen, plain, strict=True):
        assert got.shape == one.shape == want.shape == (1, 1, HIDDEN)
        assert (got - want).norm() < 0.02 * want.norm()
        assert (one - want).norm() < 0.02 * want.norm()


@pytest.mark.usefixtures("_chains_on_cpu")
def test_norms_of_a_chain_are_as_they_are_apart() -> None:
    """Their offset and eps are taken, each by itself."""

    def own(number: int) -> RMSNorm:
        return RMSNorm(HIDDEN, float(number) ** 2, offset=float(number))

    def made() -> Decoder:
        numbers = iter(range(1, 9))
        with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
            final = own(9)
        final.weight.data.fill_(-1.0)
        return decoder(final, norms=lambda: own(next(numbers)))

    found, given = states(made())
    assert given == [PreNormed] * TOKENS
    apart = made()
    for part in (*apart.layers, apart.norm):
        part.register_forward_hook(lambda *_: None)
    plain, each = states(apart)
    assert each == [Tensor] * TOKENS
    for got, want in zip(found, plain, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


class Own(GatedMLP):
    """A family's own feed-forward."""

    def forward(self, x: Any, *then: Any) -> Any:
        halved: Any = x / 2 if isinstance(x, Tensor) else x
        return super().forward(halved, *then)


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_familys_own_feed_forward_is_run() -> None:
    found, given = states(decoder(mlp=Own))
    assert given == [Tensor] * TOKENS
    watched = decoder(mlp=Own)
    for layer in watched.layers:
        layer.register_forward_hook(lambda *_: None)
    for got, want in zip(found, states(watched)[0], strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_hook_on_the_final_norm_sees_what_it_makes() -> None:
    made, seen = decoder(), []
    made.norm.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    found, given = states(made)
    assert given == [Tensor] * TOKENS
    assert all(torch.equal(got, own) for got, own in zip(found, seen, strict=True))


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_norm_that_took_the_final_ones_place_is_run() -> None:
    made = decoder()
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
        made.norm = RMSNorm(HIDDEN, 1e-5)
    made.norm.weight.data.fill_(3.0)
    found, _ = states(made)
    for part in (*made.layers, made.norm):
        part.register_forward_hook(lambda *_: None)
    for got, want in zip(found, states(made)[0], strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.usefixtures("_chains_on_cpu")
def test_a_caller_that_does_not_look_is_given_no_final_norm() -> None:
    """Whoever linked the layers before."""
    made, again = decoder(), decoder()
    link_layers(made.layers)
    assert states(made)[1] == [Tensor] * TOKENS
    link_layers(again.layers)
    link_layers(again.layers, again.norm)
    del made
    assert states(again)[1] == [PreNormed] * TOKENS


class Halved(RMSNorm):
    """A family's own norm."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        normed, total = super().forward(x, residual)
        return normed / 2, total


@pytest.mark.usefixtures("_chains_on_cpu")
@pytest.mark.parametrize("norm", [Halved, LayerNorm, None])
def test_another_norm_than_an_rms_norm_is_run(norm: type[nn.Module] | None) -> None:
    """And any is where the last layer has another form."""

    def under_it() -> Decoder:
        with building(BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))):
            own: Any = None if norm is None else norm(HIDDEN, 1e-5)
        for param in () if own is None else own.parameters():
            param.data.fill_(1)
        return decoder(own, residual_after_norm=norm is None)

    found, given = states(under_it())
    assert given == [Tensor] * TOKENS
    watched = under_it()
    watched.norm.register_forward_hook(lambda *_: None)
    for got, want in zip(found, states(watched)[0], strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


class Doubled(nn.Module):
    """Twice a linear's product: an adapter that fuses nothing."""

    def __init__(self, inner: Linear) -> None:
        super().__init__()
        self.inner, self.dtype = inner, inner.dtype

    def declined(self, epilogue: Epilogue, call: Call) -> str:
        return "its product is its own"

    def forward(self, x: Any, epilogue: Epilogue | None = None, *operands: Any) -> Any:
        like_a_linear: Any = self
        if epilogue is None:
            return 2 * self.inner(x)
        return epilogue.plain(like_a_linear, x, *operands)


@pytest.mark.usefixtures("_chains_on_cpu")
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "self_attn.qkv_proj"])
def test_what_stands_in_for_a_linear_is_run(name: str) -> None:
    """The second of three layers is in both chains: in one it is the next layer."""
    made, wanted = layers(), layers()
    branch, _, linear = name.partition(".")
    place = made[1].get_submodule(branch)
    inner: Any = getattr(place, linear)
    if linear == "qkv_proj":
        # Attention asks it for more than a product, so that it has another forward alone.
        inner.forward = partial(doubled, inner)
    else:
        setattr(place, linear, Doubled(inner))
    weight: Any = wanted[1].get_submodule(name).packed
    weight.scales.mul_(2)
    bias: Any = wanted[1].get_submodule(name).bias
    if bias is not None:
        bias.data.mul_(2)
    given, streams, _ = steps(made)
    assert [type(each) for each in given].count(Attended) < 2
    _, expected, _ = steps(wanted)
    for found, want in zip(streams, expected, strict=True):
        assert (found - want).norm() < 0.02 * want.norm()


def doubled(layer: Linear, x: Any, epilogue: Epilogue | None = None, *operands: Any) -> Any:
    """Twice the product of a linear, and then the epilogue by itself."""
    if epilogue is None:
        return 2 * type(layer).forward(layer, x)
    return epilogue.plain(layer, x, *operands)


@pytest.mark.usefixtures("_chains_on_cpu")
@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.gate_up_proj", "self_attn.qkv_proj"])
def test_a_weight_that_stayed_plain_is_in_no_chain(name: str) -> None:
    """As of a layer whose bias another one shares."""
    made = layers()
    layer: Any = made[1].get_submodule(name)
    numbers = layer.packed.dense()
    layer.packed = None
    layer.weight = nn.Parameter(numbers, requires_grad=False)
    given, streams, _ = steps(made)
    assert [type(each) for each in given].count(Attended) < 2
    _, expected, _ = steps(layers())
    for found, want in zip(streams, expected, strict=True):
        assert (found - want).norm() < 0.02 * want.norm()


@pytest.mark.usefixtures("_chains_on_cpu")
@pytest.mark.parametrize("option", ["sandwich", "residual_after_norm"])
def test_layers_of_another_form_have_none(option: str) -> None:
    given, _, _ = steps(layers(**{option: True}))
    assert not any(isinstance(each, Attended) for each in given)


@pytest.mark.usefixtures("_chains_on_cpu")
def test_layers_that_may_not_wait_for_one_another_have_none() -> None:
    made = layers()
    for layer in made:
        layer.may_chain = False
    given, _, _ = steps(made)
    assert not any(isinstance(each, Attended) for each in given)


def test_ranks_and_deterministic_mode_decline() -> None:
    (layer, _) = wide_layers()
    agree(nn.ModuleList([layer]), torch.device("meta"))
    project = layer.self_attn.o_proj
    chain = layer._chain()
    call = Call(1, torch.bfloat16, GPU.of_capability((9, 0)))
    assert chain is not None
    assert project.declined(chain, call) is None
    for context in (
        replace(project.context, tp_size=2),
        replace(project.context, deterministic=True),
    ):
        project.context = context
        assert project.method.declined(project, chain, call) is not None


def test_a_gpu_that_has_the_kernel_chains_one_row_and_the_list_says_so() -> None:
    def chained(gpu: GPU | None) -> dict[str, tuple[str, str | None]]:
        return {
            fusion.linear: (fusion.rows, fusion.reason)
            for fusion in fusions(nn.ModuleList(made), gpu, torch.bfloat16)
            if "to the" in fusion.linear
        }

    made = wide_layers()
    (answer,) = chained(GPU.of_capability((9, 0))).values()
    assert answer == ("1", "for so many rows the linears are faster one by one")
    assert chained(GPU.of_capability((8, 0))) == {}
    assert chained(None) == {}
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("meta"))):
        link_layers(made, RMSNorm(2048, 1e-5))
    answers = chained(GPU.of_capability((9, 0)))
    assert [*answers] == [f"self_attn.o_proj to the {end}" for end in ("next linear", "final norm")]
    assert [*answers.values()] == [answer] * 2


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        ([GroupAtLoadMethod(4, 128)], None),
        ([GroupLinearMethod(layout(zeros=torch.uint8), False)], None),
        ([GroupLinearMethod(layout(scales=torch.bfloat16), False)], None),
        ([GroupAtLoadMethod(4, 32)], "not all of"),
        ([GroupAtLoadMethod(8, 128)], "not all of"),
        ([GroupLinearMethod(layout(scales=torch.float32), False)], "not all of"),
        ([GroupLinearMethod(layout(ordered=True), False)], "put into the order"),
        # One of them is of another form.
        ([GroupAtLoadMethod(4, 128)] * 3 + [GroupLinearMethod(layout(), False)], "not all of"),
        ([Fp8LinearMethod()] * 3 + [GroupAtLoadMethod(4, 128)], "not all of"),
    ],
)
def test_4_bits_are_chained_where_all_linears_have_one_form(
    methods: list[LinearMethod], why: str | None
) -> None:
    made = wide_layers(methods)
    agree(nn.ModuleList(made[:1]), torch.device("meta"))
    project, chain = made[0].self_attn.o_proj, made[0]._chain()
    assert chain is not None
    declined = project.declined(chain, Call(1, torch.bfloat16, GPU.of_capability((9, 0))))
    assert declined is None if why is None else why in (declined or "")
    if why is None:
        made[0].join(GPU.of_capability((9, 0)), settled=True)
        # What attention is told.
        assert made[0].chained is not None
        assert made[0]._tells == 4


class Taking(LinearMethod):
    """Another's method, which does all that may follow."""

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        return None


def test_attention_is_not_told_of_a_chain_without_a_weight_of_ours() -> None:
    first = wide_layers()[0]
    project = first.self_attn.o_proj
    project.method = Taking()
    del project.weight
    first.join(GPU.of_capability((9, 0)), settled=True)
    assert first.chained is not None
    assert first._tells == 0


def wide_layers(methods: Sequence[LinearMethod] = (Fp8LinearMethod(),)) -> list[DecoderLayer]:
    """Two layers on meta of a size that the kernel takes; their linears have methods in turn."""
    with building(BuildContext(dtype=torch.bfloat16, device=torch.device("meta"))):
        made = [
            DecoderLayer(
                SelfAttention(2048, 16, 4, 128),
                GatedMLP(2048, 12288),
                lambda: RMSNorm(2048, 1e-5),
            )
            for _ in range(2)
        ]
    for layer in made:
        within = [module for module in layer.modules() if isinstance(module, Linear)]
        for module, method in zip(within, cycle(methods), strict=False):
            module.method = method
    link_layers(made)
    return made


def test_without_a_kernel_layers_are_as_before() -> None:
    given, _, _ = steps(layers())
    assert not any(isinstance(each, Attended) for each in given)
    assert isinstance(given[0], Tensor | PreNormed)


@pytest.mark.usefixtures("_chains_on_cpu")
def test_one_model_of_a_process_has_chains_at_a_time() -> None:
    """Programs of two chains that run at once could wait for one another for ever."""

    def chained(model: nn.ModuleList) -> list[bool]:
        agree(model, torch.device("cpu"))
        return [getattr(layer, "chained", None) is not None for layer in model]

    first, second = nn.ModuleList(layers(2)), nn.ModuleList(layers(2))
    first.itself = [first]
    assert chained(first) == [True, False]
    assert chained(second) == [False, False]
    assert chained(first) == [True, False]
    del first
    assert chained(second) == [True, False]
