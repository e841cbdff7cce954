"""Caches of 8 bits: what is stored, and attention over it, against dequantised numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE as KERNEL_TOLERANCE
from kernel_cases import Paged, error, make_paged
from torch import Tensor

from engine_core.kernels import paged_attention, rotary_store, store_kv
from engine_core.kernels.attention import hopper as attention_hopper
from engine_core.kernels.attention import reference
from engine_core.kernels.attention.call import Call
from engine_core.kernels.codes import cache_parts, dequantized

CODES = [torch.int8, torch.float8_e4m3fn]
# Half of the distance of neighbouring codes at the greatest number, as a part of it.
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}


def empty(num_blocks: int, block_size: int, heads: int, width: int, code: torch.dtype) -> Tensor:
    """A cache of codes that are NaN, or -1, and scales of NaN, in a wider buffer."""
    bits = torch.full((num_blocks, block_size * heads * (width + 4) + 16), 255, dtype=torch.uint8)
    return bits[:, :-16].view(code).view(num_blocks, block_size, heads, width + 4)


def numbers(cache: Tensor) -> Tensor:
    """``[num_blocks * block_size, heads, D]`` float32."""
    codes, scales = cache_parts(cache)
    assert scales is not None
    return dequantized(codes, scales.transpose(1, 2), torch.float32).flatten(0, 1)


def heads_of(tokens: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Heads of very different sizes: zeros, nearly zeros, large ones."""
    x = torch.randn(tokens, heads, width)
    x *= 10.0 ** torch.randint(-4, 4, (tokens, heads, 1))
    if tokens > 2:
        x[0], x[1, 0] = 0, 1e-16
    return x.to(dtype)


def check_stored(cache: Tensor, x: Tensor, slots: Tensor, code: torch.dtype) -> None:
    """Each number within half a step of its head's greatest, and of its own in e4m3."""
    got, kept = numbers(cache), slots >= 0
    untouched = torch.ones(len(got), dtype=torch.bool).index_fill(0, slots[kept], 0)
    assert got[untouched].isnan().all()
    got, x = got[slots[kept]], x[kept].float()
    most = x.abs().amax(dim=-1, keepdim=True)
    assert ((got - x).abs() <= 1.01 * HALF_STEP[code] * most + 1e-18).all()
    if code == torch.float8_e4m3fn:
        normal = x.abs() > most * 2.0**-14
        assert ((got - x).abs() <= 1.001 * x.abs() / 16)[normal].all()


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (torch.int8, torch.float32),
        (torch.int8, torch.float16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_stores(code: torch.dtype, dtype: torch.dtype) -> None:
    for tokens, head_dim, v_head_dim in [(9, 64, 64), (1, 8, 6)]:
        k, v = (heads_of(tokens, 3, n, dtype) for n in (head_dim, v_head_dim))
        caches = [empty(2, 8, 3, n, code) for n in (head_dim, v_head_dim)]
        slots = torch.randperm(16)[:tokens]
        slots[3:4] = -1  # not stored
        store_kv(k, v, *caches, slots)
        check_stored(caches[0], k, slots, code)
        check_stored(caches[1], v, slots, code)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_stays_so(code: torch.dtype) -> None:
    k = torch.randn(3, 2, 16)
    k[0, 0, 3], k[1, 1, 4] = torch.nan, torch.inf
    caches = [empty(1, 4, 2, 16, code) for _ in range(2)]
    store_kv(k, k, *caches, torch.arange(3))
    spoilt = torch.tensor([[True, False], [False, True], [False, False]])
    assert torch.equal(numbers(caches[0])[:3].isnan().all(dim=-1), spoilt)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (torch.int8, {}),
        (torch.int8, {"norm": True}),
        (torch.float8_e4m3fn, {"half": 16}),
        (torch.float8_e4m3fn, {"interleaved": True}),
    ],
    ids=str,
)
def test_rotation_and_storing(
    code: torch.dtype, options: dict[str, Any], cpu_path: str, launch_device: str
) -> None:
    """The kernels store what storing after norms and rotation stores, nearly always bit for bit."""
    tokens, half = 6, options.get("half", 32)
    q, k, v = torch.randn(tokens, 8, 64).bfloat16().split((4, 2, 2), dim=1)
    angles = torch.rand(tokens, half) * 6
    norms: dict[str, Any] = {}
    if "norm" in options:
        norms = {"q_weight": torch.rand(64).bfloat16(), "k_weight": torch.rand(64).bfloat16()}
        norms["eps"] = 1e-5
    slots = torch.tensor([3, 0, -1, 9, 15, 8])
    given = (v, angles.cos(), angles.sin())
    plain = [torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    interleaved = "interleaved" in options
    rotary_store(q.clone(), k, *given, *plain, slots, **norms, interleaved=interleaved)
    kept = slots[slots >= 0]
    k_turned = torch.zeros(tokens, 2, 64, dtype=torch.bfloat16)
    k_turned[slots >= 0] = plain[0].flatten(0, 1)[kept]
    expected, got = ([empty(2, 8, 2, 64, code) for _ in range(2)] for _ in range(2))
    launched = [empty(2, 8, 2, 64, code).to(launch_device) for _ in range(2)]
    store_kv(k_turned, v, *expected, slots)
    rotary_store(q.clone(), k, *given, *got, slots, **norms, interleaved=interleaved)
    from engine_core.kernels.rotary_store import triton

    norms = {"q_weight": None, "k_weight": None, "eps": 0.0} | norms
    for name in ("q_weight", "k_weight"):
        norms[name] = None if norms[name] is None else norms[name].to(launch_device)
    moved = (x.to(launch_device) for x in (q.clone(), k, *given))
    triton.rotary_store(
        *moved, *launched, slots.to(launch_device), **norms, interleaved=interleaved
    )
    for wanted, *others in zip(expected, got, launched, strict=True):
        for other in others:
            difference = (numbers(other.cpu()) - numbers(wanted))[kept].abs()
            assert (difference > 0.01).float().mean() < 0.01, (cpu_path, difference.max())


@pytest.mark.parametrize(
    ("code", "block_n", "norm", "interleaved"),
    [
        # Tiles that are a head, several, and a part of one.
        (torch.int8, 32, False, False),
        (torch.float8_e4m3fn, 64, True, True),
        (torch.int8, 16, True, False),
        (torch.float8_e4m3fn, 16, False, True),
    ],
    ids=str,
)
def test_linear_that_stores(
    code: torch.dtype, block_n: int, norm: bool, interleaved: bool, launch_device: str
) -> None:
    """As the linear, then norms, rotation and storing one after another."""
    from engine_core.kernels.linear import triton
    from engine_core.kernels.rotary_store import triton as apart

    rows, dim, heads, kv_heads = 19, 32, 3, 2
    dtype = torch.float16
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(7 * dim, 48).to(dtype) / 7
    angles = torch.rand(rows, dim // 2) * 6
    slots = torch.randperm(24)[:rows]
    slots[1::3] = -1
    norms: dict[str, Any] = {"q_weight": None, "k_weight": None, "eps": 0.0}
    if norm:
        norms = {"q_weight": torch.rand(dim).to(dtype), "k_weight": torch.rand(dim).to(dtype)}
        norms["eps"] = 0.1
    expected, got = ([empty(3, 8, kv_heads, dim, code) for _ in range(2)] for _ in range(2))
    to = lambda *given: [t.to(launch_device) if isinstance(t, Tensor) else t for t in given]  # noqa: E731
    norms = dict(zip(norms, to(*norms.values()), strict=True))
    x, weight, cos, sin, slots, *caches = to(
        x, weight, angles.cos(), angles.sin(), slots, *expected, *got
    )
    qkv = (x.float() @ weight.float().T).to(dtype).view(rows, -1, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q = q.clone()
    apart.rotary_store(q, k, v, cos, sin, *caches[:2], slots, **norms, interleaved=interleaved)
    tile = triton.Tile(block_n=block_n, block_k=32, most_rows=16)
    for _ in range(2):  # the second launch finds the counts of the first
        stored = triton.Stored.of(
            len(weight), cos, sin, *caches[2:], slots, interleaved, **norms, dtype=dtype
        )
        out = triton.linear(x, triton.DenseWeight(weight), stored, tile)
    assert error(out, q.float()) < 0.01
    kept = slots[slots >= 0].cpu()
    step = HALF_STEP[code]
    for mine, wanted in zip(caches[2:], caches[:2], strict=True):
        a, b = numbers(mine.cpu()), numbers(wanted.cpu())
        assert torch.equal(a.isnan(), b.isnan())
        most = b[kept].abs().amax(dim=-1, keepdim=True)
        assert ((a - b)[kept].abs() <= 2.2 * step * most).all()
        # Sums in another order may round to a neighbouring code, now and then.
        assert ((a - b)[kept].abs() > 0.3 * step * most).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_store_kernel(code: torch.dtype, dtype: torch.dtype, launch_device: str) -> None:
    from engine_core.kernels.kv_store import triton

    k, v = heads_of(7, 3, 40, dtype), heads_of(7, 3, 64, dtype)
    k[5, 1, 2] = torch.nan
    slots = torch.tensor([3, 0, -1, 9, 15, 8, 4])
    caches = [empty(2, 8, 3, n, code).to(launch_device) for n in (40, 64)]
    triton.store_kv(k.to(launch_device), v.to(launch_device), *caches, slots.to(launch_device))
    assert numbers(caches[0].cpu())[8, 1].isnan().all()
    k[5, 1, 2] = 0
    whole = slots.clone()
    whole[5] = -1
    _, scales = cache_parts(caches[0])
    assert scales is not None
    scales[1, :, 0] = torch.nan
    check_stored(caches[0].cpu(), k, whole, code)
    check_stored(caches[1].cpu(), v, slots, code)


def coded(paged: Paged, code: torch.dtype) -> tuple[Paged, Paged]:
    """The batch with a cache of codes, and with the numbers in float32 that they stand for."""
    caches, plain = [], []
    for cache in (paged.k_cache, paged.v_cache):
        num_blocks, block_size, heads, width = cache.shape
        held = empty(num_blocks, block_size, heads, width, code)
        slots = torch.arange(num_blocks * block_size)
        tokens = cache.flatten(0, 1).cpu()
        slots[tokens[:, 0, 0].isnan()] = -1
        store_kv(tokens, tokens, held, held, slots)
        caches.append(held.to(cache.device))
        plain.append(numbers(held).view(cache.shape).to(cache.device))
    return (
        replace(paged, k_cache=caches[0], v_cache=caches[1]),
        replace(paged, k_cache=plain[0], v_cache=plain[1], q=paged.q.float()),
    )


def expect(paged: Paged, **options: Any) -> Tensor:
    out = paged.poisoned_out()
    reference.paged_attention(
        paged.q, paged.k_cache, paged.v_cache, out, scale=0.2, **paged.metadata(), **options
    )
    return out


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PREFIX = torch.tensor([3, 2, 0, 1, 6, 20], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window": 40},
    "softcap": {"softcap": 1.5},
    "prefix": {"prefix_lens": PREFIX},
    "window-prefix": {"window": 40, "prefix_lens": PREFIX},
}
ROWS = [(1, 1), (1, 33), (1, 0), (1, 150), (70, 70), (3, 130)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 0.01}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    ("name", "code", "dtype"),
    [
        ("plain", torch.int8, torch.float32),
        ("plain", torch.float8_e4m3fn, torch.float16),
        ("window", torch.int8, torch.float32),
        ("window", torch.float8_e4m3fn, torch.bfloat16),
        ("prefix", torch.float8_e4m3fn, torch.bfloat16),
        ("window-prefix", torch.int8, torch.float32),
        ("alibi", torch.int8, torch.float32),
        ("softcap", torch.float8_e4m3fn, torch.bfloat16),
        # Each is a kernel that takes seconds to compile.
        pytest.param("alibi", torch.int8, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("softcap", torch.float8_e4m3fn, torch.float32, marks=pytest.mark.long),
    ],
)
def test_attention(code: torch.dtype, name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    paged, plain = coded(make_paged(ROWS, head_dim=32, v_head_dim=24, dtype=dtype), code)
    got = paged_attention(
        paged.q, paged.k_cache, paged.v_cache, scale=0.2, **paged.metadata(), **paged.sizes(),
        **options,
    )  # fmt: skip
    assert error(got, expect(plain, **options)) < TOLERANCE[dtype]


# Each option, code, dtype and kind of block at least once with each other.
KERNELS = [
    ("plain", torch.int8, torch.bfloat16, {"block_size": 64}),
    ("plain", torch.float8_e4m3fn, torch.float16, {"block_size": 16}),
    ("alibi", torch.float8_e4m3fn, torch.float32, {"block_size": 64, "head_dim": 80}),
    ("window", torch.float8_e4m3fn, torch.bfloat16, {"block_size": 64}),
    ("window", torch.int8, torch.float32, {"block_size": 16}),
    ("softcap", torch.int8, torch.float16, {"block_size": 64, "head_dim": 128}),
    ("softcap", torch.float8_e4m3fn, torch.bfloat16, {"block_size": 16}),
    ("prefix", torch.int8, torch.bfloat16, {"block_size": 16, "v_head_dim": 40}),
    ("window-prefix", torch.float8_e4m3fn, torch.float32, {"block_size": 64}),
]


@pytest.mark.parametrize(("name", "code", "dtype", "shape"), KERNELS)
def test_attention_kernel(
    name: str, code: torch.dtype, dtype: torch.dtype, shape: dict[str, Any], launch_device: str
) -> None:
    from engine_core.kernels.attention import triton

    options = {
        key: value.to(launch_device) if isinstance(value, Tensor) else value
        for key, value in OPTIONS[name].items()
    }
    made = make_paged(ROWS, device=launch_device, dtype=dtype, **shape)
    paged, plain = coded(made, code)
    call = replace(call_of(paged), **options)
    triton.paged_attention(call)
    # A GPU's powers of 2 are approximate: in float32 what kernels of numbers are held to.
    limit = max(TOLERANCE[dtype], KERNEL_TOLERANCE[torch.float32])
    assert error(call.out, expect(plain, **options)) < limit


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device of another size is interpreted")
@pytest.mark.parametrize("longest", [40, 700])
def test_programs_are_shared_out_evenly(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of narrow heads come to all multiprocessors alike, with splits last."""
    from engine_core.kernels.attention import triton

    monkeypatch.setattr(triton, "num_multiprocessors", lambda _: 20)
    rows = [(1, length) for length in (33, 1, longest, 0, 64, 65, 40, 3, 90, 17, 28, 5, 70)]
    made = make_paged(rows, heads=6, kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    paged, plain = coded(made, torch.int8)
    memo: dict[Any, Any] = {}
    call = call_of(paged, max_kv_len=4096)
    triton.paged_attention(replace(call, memo=memo))
    (((_, _, cut), items),) = memo.items()
    assert (cut.even, cut.last_from, cut.shared) == (True, 5, 0)
    assert bool((items[items[:, 0] >= 0][:, 4] > 1).any()) == (longest > 40)
    assert error(call.out, expect(plain)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("widths", [(1, 0), (0, 1), (0, 0)])
def test_queries_that_lie_at_odd_numbers(widths: tuple[int, int], launch_device: str) -> None:
    """Two of them are no word of 32 bits there: with odd strides, and where the first is one."""
    from engine_core.kernels.attention import triton

    made = make_paged(ROWS, device=launch_device, dtype=torch.bfloat16)
    paged, plain = coded(made, torch.int8)
    tokens, heads, dim = paged.q.shape
    sizes = (tokens, heads * (dim + widths[1]) + widths[0])
    memory = torch.zeros(sizes[0] * sizes[1] + 1, dtype=torch.bfloat16, device=launch_device)
    rows = memory[1:].view(sizes)[:, : heads * (dim + widths[1])]
    q = rows.unflatten(1, (heads, dim + widths[1]))[..., :dim].copy_(paged.q)
    assert q.data_ptr() % 4 == 2
    call = call_of(replace(paged, q=q))
    triton.paged_attention(call)
    assert error(call.out, expect(plain)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("code", "heads"), [(CODES[0], 4), (CODES[1], 32)], ids=str)
def test_blocks_that_were_given_back_before_a_window(
    code: torch.dtype, heads: int, launch_device: str
) -> None:
    """The null block of zeros is in their place, and may be in the first tile."""
    from engine_core.kernels.attention import triton

    made = make_paged(ROWS, heads=heads, device=launch_device, dtype=torch.bfloat16, block_size=16)
    paged, plain = coded(made, code)
    expected = expect(plain, window=40)
    used = {*paged.block_tables.flatten().tolist()}
    null = next(block for block in range(len(paged.k_cache)) if block not in used)
    for cache in (paged.k_cache, paged.v_cache):
        cache.view(torch.uint8)[null] = 0
    tables = paged.block_tables.clone()
    for table, (queries, tokens) in zip(tables, paged.rows, strict=True):
        table[: max(0, tokens - queries + 1 - 40) // 16] = null
    assert (tables == null).sum() == 6 + 5
    call = replace(call_of(replace(paged, block_tables=tables)), window=40)
    triton.paged_attention(call)
    assert error(call.out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("code", CODES)
def test_attention_with_heads_as_rows(
    code: torch.dtype, launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some numbers of rows have them, where few heads are columns of products otherwise."""
    from engine_core.kernels.attention import decode, triton

    choose = decode.launch
    assert choose(4, 2, 2, 64, 64, 1, 8).block_g == 8

    def as_rows(*given: Any) -> decode.Launch:
        return choose(*given)._replace(block_g=16)

    monkeypatch.setattr(decode, "launch", as_rows)
    made = make_paged(ROWS, device=launch_device, dtype=torch.bfloat16, block_size=64)
    paged, plain = coded(made, code)
    call = call_of(paged)
    triton.paged_attention(call)
    assert error(call.out, expect(plain)) < TOLERANCE[torch.bfloat16]


# Bytes of a block of 16 slots of 2 heads of 64 for keys and values in 16 bits.
BLOCK_BYTES = 16 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        (torch.int8, {"block_size": 16, "head_dim": 24, "v_head_dim": 16}),
        (torch.float8_e4m3fn, {"block_size": 64, "head_dim": 64}),
    ],
)
@pytest.mark.parametrize("room", [1, 2, 4, 5], ids="{} rows".format)
def test_codes_become_numbers_of_a_cache_of_their_own(
    room: int, code: torch.dtype, shape: dict[str, Any], launch_device: str
) -> None:
    """Those of the rows behind the first one, of as many as there is room for."""
    from engine_core.kernels.attention.unpack import triton

    paged, plain = coded(make_paged(ROWS, device=launch_device, dtype=torch.float16, **shape), code)
    call = call_of(paged, num_decode_rows=1)
    size = shape["block_size"]
    blocks = sum(-(-tokens // size) for _, tokens in ROWS[1 : 1 + room])
    # A byte less than one block more, which the next row with tokens would need at least.
    block_bytes = size * 2 * (shape["head_dim"] + shape.get("v_head_dim", shape["head_dim"])) * 2
    given = (blocks + 1) * block_bytes - 1 if room < 5 else 1 << 30
    made, num_fitting = triton.unpacked(call, given)
    assert made.k_scales is None
    assert made.k_cache.nbytes + made.v_cache.nbytes <= given
    # A row without tokens needs no room.
    rows = 2 if room == 1 else room
    if room == 5:
        assert num_fitting is None
    else:
        assert num_fitting is not None
        assert num_fitting.item() == rows
    lengths = [tokens if row < rows else 0 for row, (_, tokens) in enumerate(ROWS[1:])]
    assert made.kv_lens[1:].tolist() == lengths
    compared = 0
    for row, tokens in enumerate(lengths, 1):
        for position in range(tokens):
            block, slot = position // size, position % size
            source, target = call.block_tables[row, block], made.block_tables[row, block]
            for cache, numbers_of in ((made.k_cache, plain.k_cache), (made.v_cache, plain.v_cache)):
                expected = numbers_of[source, slot].half()
                assert torch.equal(cache[target, slot], expected)
                compared += 1
    assert compared == 2 * sum(lengths)


def call_of(paged: Paged, **sizes: int) -> Call:
    """Attention over a cache of codes."""
    (k, k_scales), (v, v_scales) = cache_parts(paged.k_cache), cache_parts(paged.v_cache)
    out = paged.q.new_full((*paged.q.shape[:2], v.shape[3]), torch.nan)
    given = paged.metadata() | paged.sizes() | sizes
    return Call(paged.q, k, v, out, scale=0.2, k_scales=k_scales, v_scales=v_scales, **given)


class OnNumbers:
    """The reference in the place of the kernel for Hopper; it counts the rows with tokens."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def takes(self, *_: object) -> bool:
        """Any."""
        return True

    fits = is_trusted = takes

    def groups_for(self, *_: object) -> int:
        """Two, as for heads of any size."""
        return 2

    def prefill(self, call: Call, *_: object) -> None:
        """Attend to the rows behind those that decode; rows without tokens get zeros."""
        first = call.num_decode_rows
        begin = int(call.query_start[first])
        self.rows.append(int((call.kv_lens[first:] > 0).sum()))
        reference.paged_attention(
            call.q[begin:], call.k_cache, call.v_cache, call.out[begin:],
            block_tables=call.block_tables[first:], query_start=call.query_start[first:] - begin,
            kv_lens=call.kv_lens[first:], scale=call.scale,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("room", "rows"), [(0, 0), (1, 0), (5, 1), (14, 2), (15, 3), (1 << 20, 3)], ids=str
)
@pytest.mark.parametrize("code", CODES)
def test_rows_without_room_for_their_numbers_are_attended_to_by_codes(
    code: torch.dtype,
    room: int,
    rows: int,
    launch_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever room there is, every row has its attention, and those with room have it by numbers.

    Rows take 5, 9 and 1 blocks; one of padding is behind them, and one without queries.
    """
    from engine_core.kernels.attention import triton

    made = make_paged(
        [(1, 20), (1, 0), (70, 70), (3, 130), (4, 9), (2, 0), (0, 0)],
        device=launch_device,
        dtype=torch.bfloat16,
    )
    paged, plain = coded(made, code)
    hopper = OnNumbers()
    monkeypatch.setitem(sys.modules, "engine_core.kernels.attention.hopper.triton", hopper)
    monkeypatch.setattr(attention_hopper, "triton", hopper, raising=False)
    monkeypatch.setattr(triton, "runs_gluon", lambda device: True)
    monkeypatch.setattr(triton, "_MOST_UNPACKED", room * BLOCK_BYTES)
    call = call_of(paged)
    triton.paged_attention(call)
    assert hopper.rows == [rows]
    assert error(call.out, expect(plain)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("room", [0, 5, 13, 60], ids=str)
def test_hoppers_kernel_and_that_of_the_rows_left(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, where lengths are known to the device alone, with room for longer rows."""
    from engine_core.kernels.attention import triton

    rows = [(1, 700), (1, 0), (300, 300), (64, 500), (130, 2000), (2, 0), (0, 0)]
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 64}
    paged, plain = coded(
        make_paged(rows, device="cuda", dtype=torch.bfloat16, **shape), torch.float8_e4m3fn
    )
    monkeypatch.setattr(triton, "_MOST_UNPACKED", room * 64 * 2 * 256 * 2)
    call = call_of(paged, max_query_len=512)
    triton.paged_attention(call)
    eager = call.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton.paged_attention(call)
    call.out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(call.out, eager, rtol=0, atol=0)
    assert error(eager, expect(plain)) < KERNEL_TOLERANCE[torch.bfloat16]


def test_preconditions() -> None:
    k = torch.randn(2, 3, 8)
    caches = [empty(1, 4, 3, 8, torch.int8) for _ in range(2)]
    with pytest.raises(ValueError, match="one dtype, or the caches that of codes"):
        store_kv(k, k, caches[0], empty(1, 4, 3, 8, torch.float8_e4m3fn), torch.arange(2))
    with pytest.raises(ValueError, match="the caches must be"):
        store_kv(k, k, *(cache[..., :8] for cache in caches), torch.arange(2))
    with pytest.raises(ValueError, match="no multiples of 4; take a block size"):
        cache_parts(empty(1, 3, 1, 5, torch.int8))
    paged, _ = coded(make_paged([(1, 3)], head_dim=8), torch.int8)
    given = (paged.q, paged.k_cache, paged.v_cache)
    sizes = paged.metadata() | paged.sizes()
    with pytest.raises(ValueError, match="batch invariance is not for codes"):
        paged_attention(*given, scale=1.0, **sizes, deterministic=True)
    with pytest.raises(ValueError, match="one dtype"):
        paged_attention(given[0], given[1], given[2].view(torch.uint8), scale=1.0, **sizes)


GIVEN = (0.03, 0.5)


def by_given_scale(x: Tensor, scale: float, code: torch.dtype) -> Tensor:
    """The numbers that are kept of ``x`` where the scale is fixed."""
    codes = (x.float() * (1 / torch.tensor(scale))).clamp(-TOP[code], TOP[code])
    codes = codes.round() if code == torch.int8 else codes.to(code).float()
    return codes * scale


TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("code", CODES)
def test_scales_that_are_given(code: torch.dtype, launch_device: str) -> None:
    """By every kernel that stores; what they do not reach is the greatest code."""
    from engine_core.kernels.kv_store import triton
    from engine_core.kernels.rotary_store import triton as rotary

    k, v = torch.randn(5, 2, 32) * 4, torch.randn(5, 2, 32) * 90
    v[2, 1, 7] = torch.inf
    slots = torch.tensor([3, 0, 7, -1, 4])
    angles = torch.rand(5, 16)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat(
        [k[..., :16] * cos[:, None] - k[..., 16:] * sin[:, None],
         k[..., 16:] * cos[:, None] + k[..., :16] * sin[:, None]], -1)  # fmt: skip
    kept = slots >= 0
    for keys, turns in ((k, False), (turned, True)):
        caches = [[empty(2, 4, 2, 32, code) for _ in range(2)] for _ in range(2)]
        launched = [cache.to(launch_device) for cache in caches[1]]
        moved = [x.to(launch_device) for x in (k.clone(), k, v, cos, sin)]
        if turns:
            given = (k.clone(), k, v, cos, sin, *caches[0], slots)
            rotary_store(*given, kv_scales=GIVEN)
            rotary.rotary_store(
                *moved, *launched, slots.to(launch_device), q_weight=None, k_weight=None, eps=0.0,
                interleaved=False, kv_scales=GIVEN,
            )  # fmt: skip
        else:
            store_kv(k, v, *caches[0], slots, GIVEN)
            triton.store_kv(*moved[1:3], *launched, slots.to(launch_device), GIVEN)
        for pair in (caches[0], launched):
            for cache, x, scale in zip(pair, (keys, v), GIVEN, strict=True):
                got, expected = numbers(cache.cpu())[slots[kept]], by_given_scale(x, scale, code)
                expected = expected[kept]
                if x is v:
                    assert got[2, 1].isnan().all()
                    got[2, 1], expected[2, 1] = 0, 0
                step = scale if code == torch.int8 else expected.abs() / 8 + scale / 256
                assert ((got - expected).abs() <= 1.01 * step).all()
                assert ((got - expected).abs() > 1e-5 * scale).float().mean() < 0.02
                assert (got.abs() == TOP[code] * scale).any() or x is not v
    with pytest.raises(ValueError, match="kv_scales must be positive"):
        store_kv(k, v, *caches[0], slots, (0.0, 1.0))


@pytest.mark.parametrize("code", CODES)
def test_linear_that_stores_by_given_scales(code: torch.dtype, launch_device: str) -> None:
    from engine_core.kernels.linear import triton

    dim, rows = 32, 6
    x, weight = torch.randn(rows, 48).half(), torch.randn(7 * dim, 48).half()
    slots = torch.randperm(24)[:rows]
    caches = [empty(3, 8, 2, dim, code).to(launch_device) for _ in range(2)]
    stored = triton.Stored.of(
        len(weight), None, None, *caches, slots.to(launch_device), False, dtype=torch.float16,
        kv_scales=GIVEN,
    )  # fmt: skip
    tile = triton.Tile(block_n=64, block_k=32, most_rows=16)
    dense = triton.DenseWeight(weight.to(launch_device))
    triton.linear(x.to(launch_device), dense, stored, tile)
    qkv = (x.float() @ weight.float().T).half().view(rows, 7, dim)
    for cache, part, scale in zip(caches, (qkv[:, 3:5], qkv[:, 5:]), GIVEN, strict=True):
        got, expected = numbers(cache.cpu())[slots], by_given_scale(part, scale, code)
        assert ((got - expected).abs() > 1e-5 * scale).float().mean() < 0.02
