"""Kernels compiled for a CPU: their parts, how threads share them, and when they are taken."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forkserver
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import TOLERANCE, Paged, attend, error, make_paged
from random_examples import examples
from torch import Tensor
from transformers import LlamaConfig

from engine_core.kernels import (
    compiled,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    rotary_store,
    silu_and_mul,
)
from engine_core.kernels.attention import native, reference
from engine_core.kernels.compiled import Kernel, kept, threads

numbers: Any = pytest.importorskip(
    "engine_core.kernels.compiled.numbers", reason="numba is not installed", exc_type=ImportError
)
vectors: Any = importlib.import_module("engine_core.kernels.compiled.vectors")


def make_all_numbers(shift: float = 0.0) -> Callable[..., None]:
    """A body that applies each of the building blocks."""

    def body(arguments: Any) -> None:
        args = numbers.unpack(arguments)
        size = args[5]
        x = numbers.array(args[0], np.float32, size)
        narrowed = numbers.array(args[1], np.uint16, size)
        grown = numbers.array(args[2], np.float32, size)
        stored = numbers.array(args[3], np.uint16, size)
        widened = numbers.array(args[4], np.float32, size)
        part, parts = numbers.this_part(), numbers.all_parts()
        for i in range(size * part // parts, size * (part + 1) // parts):
            narrowed[i] = numbers.narrow(x[i], stored[i])
            grown[i] = numbers.exp(x[i] + numbers.float32(shift))
            widened[i] = numbers.widen(stored[i])

    return body


ALL_NUMBERS = Kernel(f"{__name__}:make_all_numbers", "6q")


def all_numbers(x: Tensor, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Apply narrow and exp to a float32 tensor, and widen to its high bits as bfloat16."""
    stored = (x.view(torch.int32) >> 16).to(torch.int16)
    narrowed, grown, widened = torch.zeros_like(stored), torch.zeros_like(x), torch.zeros_like(x)
    tensors = (x, narrowed, grown, stored, widened)
    ALL_NUMBERS.run((), parts, *(y.data_ptr() for y in tensors), x.numel())
    return narrowed.view(torch.bfloat16), grown, widened


def every_bfloat16() -> Tensor:
    """The float32 of all high halves with low halves at and beside ties, and with random ones."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = torch.cat([(high[:, None] + low).view(-1), high + torch.randint(2**16, high.shape)])
    return bits.to(torch.int32).view(torch.float32)


def test_rounding_to_bfloat16_is_torchs() -> None:
    x = every_bfloat16()
    got, _, widened = all_numbers(x)
    expected = x.to(torch.bfloat16)
    assert torch.equal(got.isnan(), x.isnan())
    real = ~x.isnan()
    assert torch.equal(got[real].view(torch.int16), expected[real].view(torch.int16))
    cut = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    # Bits: NaN is kept, and zero has a sign.
    assert torch.equal(widened.view(torch.int32), cut.float().view(torch.int32))


def test_exp_is_as_near_as_it_says() -> None:
    x = torch.cat([torch.linspace(-87.33, 88.72, 1_000_001), torch.linspace(-1, 1, 100_001)])
    _, got, _ = all_numbers(x)
    difference = (got.double() / x.double().exp() - 1).abs()
    assert (difference <= 2e-7 + 8e-8 * x.double().abs()).all()


def test_exp_beyond_its_range() -> None:
    x = torch.tensor([torch.nan, 88.8, 3e38, torch.inf, -87.4, -3e38, -torch.inf, -0.0])
    _, got, _ = all_numbers(x)
    largest, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    assert got[0].isnan()
    # Finite and not zero, so that quotients of them are numbers.
    assert ((got[1:4] > 0.99 * largest) & got[1:4].isfinite()).all()
    assert got[4:7].tolist() == [least] * 3
    assert got[7] == 1


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_side_by_side_do_what_one_does(
    parts: int, share_among: Callable[[int], None]
) -> None:
    x = every_bfloat16()[: 10**4 + 3].contiguous()
    alone = all_numbers(x)
    share_among(parts)
    for one, shared in zip(alone, all_numbers(x, parts), strict=True):
        torch.testing.assert_close(shared, one, rtol=0, atol=0, equal_nan=True)


def test_threads_are_not_more_than_torch_has_nor_than_there_is_work(
    share_among: Callable[[int], None],
) -> None:
    share_among(3)
    assert [threads(work, 10) for work in (0, 1, 19, 20, 29, 30, 1000)] == [1, 1, 1, 2, 2, 3, 3]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How many kernels were run with so many parts each."""
    runs: Counter[int] = Counter()
    run = Kernel.run

    def spy(self: Kernel, special: Any, parts: int, *arguments: float) -> None:
        runs[parts] += 1
        run(self, special, parts, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "run", spy)
        yield runs


def attend_by_reference(paged: Paged, **options: Any) -> Tensor:
    out = paged.poisoned_out().float()
    reference.paged_attention(
        paged.q, paged.k_cache, paged.v_cache, out, scale=0.25, **paged.metadata(), **options
    )
    return out


def decode(lengths: list[int], **shape: Any) -> Paged:
    """Rows of one query; what lies beyond their lengths is NaN."""
    shape = {"head_dim": 16, "v_head_dim": 12, "block_size": 8, "fused": True} | shape
    return make_paged([(1, length) for length in lengths], **shape)


RAGGED = {
    "ragged": [5, 0, 300, 1, 33, 0, 64, 8],
    "one long": [1500],
    "one long among short ones": [3, 2, 900, 1],
    "fewer tokens than threads": [2],
    "nothing": [0, 0],
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
# Small heads share code that is given their sizes; larger ones have code of their own.
SMALL, LARGE = {"head_dim": 16, "v_head_dim": 12}, {"head_dim": 64, "v_head_dim": 48}
SHAPES = pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 37}, {"alibi_slopes": SLOPES, "softcap": 1.5, "window": 290}],
    ids=["plain", "window1", "window37", "everything"],
)
@SHAPES
def test_threads_share_rows_and_heads(
    shape: dict[str, int],
    options: dict[str, Any],
    lengths: list[int],
    count: int,
    share_among: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = decode(lengths, **shape)
    share_among(count)
    with counted(monkeypatch) as runs:
        # The longest may be far from what the caller says it is at most.
        got = [attend(paged, **options), attend(paged, **options, max_kv_len=4096)]
    assert runs[count] >= 2
    expected = attend_by_reference(paged, **options)
    assert max(error(x, expected) for x in got) < 2e-6


# Queries of a KV head in one share, in two, and in so many that they are a loop.
GROUPS = [(2, 5), (3, 3), (5, 7), (34, 2)]
# Each is a kernel, which takes seconds to compile. How a number is read has nothing to do with how
# many queries there are.
TOGETHER = [(*GROUPS[0], torch.float32), (*GROUPS[2], torch.bfloat16), (*GROUPS[3], torch.float32)]
MORE_TOGETHER = [
    (*group, dtype)
    for group in GROUPS
    for dtype in (torch.float32, torch.bfloat16)
    if (*group, dtype) not in TOGETHER
]
MORE_TOGETHER.append((1, 5, torch.float32))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dtype"),
    [*TOGETHER, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_TOGETHER)],
)
def test_kv_heads_are_attended_together(
    group: int,
    kv_heads: int,
    dtype: torch.dtype,
    count: int,
    share_among: Callable[[int], None],
) -> None:
    paged = decode(
        [5, 300, 0, 17, 530],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dtype=dtype,
        **LARGE,
    )
    share_among(count)
    bound = 2e-6 if dtype is torch.float32 else TOLERANCE[dtype]
    assert error(attend(paged), attend_by_reference(paged)) < bound


def test_code_does_not_grow_with_heads() -> None:
    """DeepSeek's latent vectors are one KV head: as code without loops LLVM takes minutes."""
    cpu = importlib.import_module("numba.core.registry").cpu_target
    ir, types = importlib.import_module("llvmlite.ir"), importlib.import_module("numba.types")

    def written(operation: Any, heads: int, count: int) -> int:
        """The lines of an operation of so many queries, and of this many more arguments."""
        sizes = [types.literal(number) for number in (heads, 512, 4)]
        signature, generate = operation._defn(cpu.typing_context, *sizes, *[types.int64] * count)
        module = ir.Module()
        kinds = [ir.IntType(64)] * len(signature.args)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "written")
        builder = ir.IRBuilder(function.append_basic_block())
        generate(cpu.target_context, builder, signature, function.args)
        return str(module).count("\n")

    for operation, count in ((vectors.dots, 8), (vectors.weigh, 7)):
        few, many = (written(operation, heads, count) for heads in (16, 128))
        assert max(few, many) < 2 * min(few, many)


@pytest.mark.long
def test_code_of_latent_vectors_does_not_grow_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernel = Kernel("engine_core.kernels.attention.numba:make_vectors", native._ARGUMENTS)
    monkeypatch.setattr(native, "_VECTORS", kernel)
    for heads in (16, 128):
        paged = decode([5, 40], heads=heads, kv_heads=1, head_dim=576, v_head_dim=512)
        assert error(attend(paged), attend_by_reference(paged)) < TOLERANCE[torch.float32]
    few, many = (path.stat().st_size for path in tmp_path.glob("attention_make_vectors_*.code"))
    assert max(few, many) < 2 * min(few, many)


@pytest.mark.parametrize(
    "shape", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"]
)
def test_threads_share_rows_of_bfloat16(
    shape: dict[str, int], share_among: Callable[[int], None]
) -> None:
    paged = decode(RAGGED["ragged"], dtype=torch.bfloat16, **shape)
    share_among(5)
    assert error(attend(paged), attend_by_reference(paged)) < TOLERANCE[torch.bfloat16]


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=7),
    count=st.integers(1, 8),
    window=st.none() | st.integers(1, 60),
    block_size=st.sampled_from([1, 3, 16, 256]),
    more=st.integers(0, 2000),
)
@SHAPES
def test_any_rows_among_any_threads(
    lengths: list[int],
    count: int,
    window: int | None,
    block_size: int,
    more: int,
    shape: dict[str, int],
    share_among: Callable[[int], None],
) -> None:
    paged = decode(lengths, block_size=block_size, **shape)
    share_among(count)
    got = attend(paged, window=window, max_kv_len=max(lengths) + more)
    assert error(got, attend_by_reference(paged, window=window)) < 2e-6


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("options", [{}, {"alibi_slopes": SLOPES, "softcap": 1.5}], ids=str)
@SHAPES
def test_a_query_of_nan_gives_nan_to_its_head_alone(
    shape: dict[str, int],
    options: dict[str, Any],
    count: int,
    share_among: Callable[[int], None],
) -> None:
    paged = decode([5, 300, 40], **shape)
    paged.q[1, 2, 7] = torch.nan
    share_among(count)
    got = attend(paged, **options)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(got.isnan().all(-1), expected)
    assert torch.equal(got.isnan().any(-1), expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("logits", ["all", "some"])
@SHAPES
def test_logits_of_minus_infinity(
    shape: dict[str, int], logits: str, count: int, share_among: Callable[[int], None]
) -> None:
    paged = decode([5, 300, 40], **shape)
    paged.q.abs_()
    paged.k_cache[:, :: 1 if logits == "all" else 3] = -torch.inf
    share_among(count)
    got, expected = attend(paged), attend_by_reference(paged)
    assert bool(expected.isnan().all()) == (logits == "all")
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def run_all(dtype: torch.dtype) -> list[Tensor]:
    """Each operation that has a compiled kernel, once."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = randn(3, 128), randn(128)
    q, k, v = randn(3, 8, 16).split([4, 2, 2], dim=1)
    angles = torch.rand(3, 8, generator=generator)
    caches = torch.zeros(2, 2, 4, 2, 16, dtype=dtype)
    rotary_store(q, k, v, angles.cos(), angles.sin(), *caches, torch.tensor([5, -1, 0]))
    paged = decode([5, 0, 40], dtype=dtype)
    return [
        rms_norm(x, weight, 1e-5),
        layer_norm(x, weight, None, 1e-5),
        silu_and_mul(x),
        gelu_and_mul(x),
        q,
        caches,
        attend(paged),
    ]


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, 6), (torch.bfloat16, 6), (torch.float16, 0)]
)
def test_which_numbers_have_compiled_kernels(
    dtype: torch.dtype, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as runs:
        run_all(dtype)
    assert runs.total() == kernels


def test_tensors_without_numbers_have_shapes() -> None:
    with torch.device("meta"):
        x, weight = torch.empty(3, 128), torch.empty(128)
        normed, total = rms_norm(x, weight, 1e-5, residual=x)
        assert normed.shape == total.shape == x.shape
        assert layer_norm(x, weight, None, 1e-5).is_meta
        assert silu_and_mul(x).shape == gelu_and_mul(x).shape == (3, 64)


def test_pythons_threads_run_kernels_at_once(share_among: Callable[[int], None]) -> None:
    expected = run_all(torch.float32)
    share_among(2)

    def often() -> list[list[Tensor]]:
        torch.set_num_threads(2)  # OpenMP's number is one of each thread
        return [run_all(torch.float32) for _ in range(25)]

    with ThreadPoolExecutor(3) as pool:
        results = [future.result() for future in [pool.submit(often) for _ in range(3)]]
    for got in (tensors for result in results for tensors in result):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


KEPT = """
import sys
import torch
from engine_core.kernels import silu_and_mul

silu_and_mul(torch.ones(2, 4, dtype=torch.float16))
assert not {"numba", "llvmlite"} & set(sys.modules)
torch.manual_seed(1)
x = torch.randn(3, 64)
print(silu_and_mul(x).view(torch.int32).tolist())
assert "llvmlite" in sys.modules
print("numba" in sys.modules)
"""


# The system gives no more than two.
FEWER_THREADS = """
from engine_core.kernels import paged_attention
from engine_core.kernels.attention import native, reference

native._LEAST = 1
torch.set_num_threads(5)
torch.manual_seed(0)
q, cache = torch.randn(1, 4, 16), torch.randn(2, 6, 16, 2, 16)
rows = {
    "block_tables": torch.tensor([[3, 1, 5, 0]], dtype=torch.int32),
    "query_start": torch.tensor([0, 1], dtype=torch.int32),
    "kv_lens": torch.tensor([61], dtype=torch.int32),
}
sizes = {"max_query_len": 1, "max_kv_len": 61, "num_decode_rows": 1}
got = paged_attention(q, *cache, scale=0.25, **rows, **sizes)
expected = torch.empty_like(q)
reference.paged_attention(q, *cache, expected, scale=0.25, **rows)
torch.testing.assert_close(got, expected)
"""


def test_a_new_process_runs_kept_code_without_numba_and_on_the_threads_that_there_are(
    tmp_path: Path,
) -> None:
    """It gives the same bits. LLVM is imported where the first kernel runs.

    The first of the processes compiles the code, as users' do and tests' processes do sooner.
    """
    torch.manual_seed(1)
    numbers_here = silu_and_mul(torch.randn(3, 64)).view(torch.int32).tolist()
    given = {"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "2", "NUMBA_CACHE_DIR": str(tmp_path)}
    for compiles in (True, False):
        printed = _python(KEPT + FEWER_THREADS * (not compiles), **given).splitlines()
        assert printed == [str(numbers_here), str(compiles)]


def make_one_number(more: float = 0.0) -> Callable[..., None]:
    """A body that is compiled soon: it writes one number."""
    number = numbers.float32(2.0 + more)

    def body(arguments: Any) -> None:
        numbers.array(numbers.unpack(arguments)[0], np.float32, 1)[0] = number

    return body


def keeps(monkeypatch: pytest.MonkeyPatch, special: tuple[float, ...] = ()) -> bool:
    """Whether a new kernel finds its code on the disk."""
    compiled_now = []
    compile_entry = numbers.compile_entry

    def spy(*arguments: Any, **options: Any) -> Any:
        compiled_now.append(arguments)
        return compile_entry(*arguments, **options)

    kernel = Kernel(f"{__name__}:make_one_number", "1q")
    with monkeypatch.context() as patch:
        patch.setattr(numbers, "compile_entry", spy)
        x = torch.zeros(1)
        kernel.run(special, 1, x.data_ptr())
    assert x == sum(special, start=2.0)
    return not compiled_now


def test_code_is_kept_for_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for special in ((), (1.0,), (1.0000001,)):
        assert [keeps(monkeypatch, special) for _ in range(2)] == [False, True]
    for part in ("_sources", "_environment"):
        with monkeypatch.context() as patch:
            patch.setattr(kept, part, lambda *_: "0" * 64)
            assert not keeps(monkeypatch)
    assert keeps(monkeypatch)


def test_damaged_code_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not keeps(monkeypatch)
    [code] = tmp_path.glob("*.code")
    whole = code.read_bytes()
    for damaged in (b"", whole[:-1], whole[:99] + bytes(1000), bytes([whole[0] ^ 1]) + whole[1:]):
        code.write_bytes(damaged)
        assert not keeps(monkeypatch)
        assert keeps(monkeypatch)


def test_names_of_code_stand_for_sources_settings_and_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path, text in (("ops/numba.py", "1"), ("ops/other.py", "2"), ("ops/triton.py", "3")):
        tmp_path.joinpath(path).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def name() -> str:
        kept._sources.cache_clear()
        kept._environment.cache_clear()
        return kept.name_of("ops.numba", "make", (torch.float32, 3), exact=True)

    first = name()
    assert first == name() == name()
    assert first != kept.name_of("ops.numba", "make", (torch.bfloat16, 3), exact=True)
    assert first != kept.name_of("ops.numba", "make", (torch.float32, 3), exact=False)
    assert first != kept.name_of("ops.numba", "other", (torch.float32, 3), exact=True)
    (tmp_path / "ops/triton.py").write_text("another")
    assert name() == first
    (tmp_path / "ops/other.py").write_text("another")
    assert name() != first
    (tmp_path / "ops/other.py").write_text("2")
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_OPT", "1")
        assert name() != first
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        (tmp_path / ".numba_config.yaml").write_text("opt: 1")
        assert name() != first
    assert name() == first


@pytest.mark.parametrize("trouble", ["no folder", "full", "not linked"])
def test_code_that_cannot_be_kept(
    trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    if trouble == "full":
        monkeypatch.setattr(Path, "replace", fail)
    elif trouble == "not linked":
        monkeypatch.setattr(kept, "link", lambda *_: None)
    else:
        monkeypatch.setattr(Path, "mkdir", fail)
    x = torch.zeros(1)
    Kernel(f"{__name__}:make_one_number", "1q").run((), 1, x.data_ptr())
    assert x == 2
    assert not list(tmp_path.iterdir())


# None in sys.modules would make find_spec raise an error, which it does not where numba is missing.
WITHOUT_NUMBA = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *more):
        if name.split(".")[0] not in ("numba", "llvmlite"):
            return self.finder.find_spec(name, *more)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
ENGINE = """
import logging, sys
from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.kernels.compiled import Kernel

ran, run = [], Kernel.run
Kernel.run = lambda *given: ran.append(given[0]) or run(*given)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
config = EngineConfig(
    load_format="dummy", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, device="cpu"
)
with LLM(sys.argv[1], config) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    [output] = llm.generate([[3, 4, 5]], greedy)
assert len(output.outputs[0].token_ids) == 5
print(len(ran) > 0, any(name.startswith("llvmlite") for name in sys.modules))
"""


def test_an_engine_starts_without_numba_and_says_what_would_be_faster(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    # A fork would have modules that imported it.
    lines = _python(WITHOUT_NUMBA + ENGINE, str(tmp_path)).splitlines()
    assert lines[-1] == "False False"
    assert len([line for line in lines if "engine-core-llm[cpu]" in line]) == 1
    lines = _forked(ENGINE, str(tmp_path)).splitlines()
    assert lines[-1] == "True True"
    assert not [line for line in lines if "engine-core-llm[cpu]" in line]


def test_a_numba_that_cannot_be_imported_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def refuse(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "import_module", refuse)
    assert not compiled.available.__wrapped__()
    assert "NumPy 2.3" in caplog.text


def _python(program: str, *arguments: str, **environment: str) -> str:
    """Run a new Python in which warnings are errors and return what it prints."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ).stdout


def _forked(program: str, *arguments: str) -> str:
    """The same by a fork of a process that has imported torch, the engine and Numba."""
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    command = [sys.executable, "-c", strict + program, *arguments]
    return forkserver.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
