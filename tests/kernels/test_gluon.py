"""Hopper's kernels are used with a release of Triton that ran them, or after a trial."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import forkserver
import pytest
import torch
import torch.nn.functional as F
from early_lines import STORES, early_lines
from kernel_cases import TOLERANCE
from torch import Tensor

from engine_core.kernels import (
    Chain,
    ChainNorm,
    DeferredRMSNorm,
    Fp8Weight,
    GroupWeight,
    gpu,
)
from engine_core.kernels.activation import silu_and_mul
from engine_core.kernels.block_linear import FORMS, group_weight
from engine_core.kernels.launch import gluon
from engine_core.kernels.launch.gluon import Family, Trial, runs_gluon, support
from engine_core.kernels.linear.tiles import (
    PartsTile,
    ProductTile,
    Tile,
    choose_blocks_tile,
    choose_bytes_tile,
    choose_codes_tile,
    choose_held_tile,
    choose_teams_tile,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 7)
HOPPER = gpu.GPU.of_capability((9, 0))
UNTRIED = "3.9.0"


class Fake:
    """A kernel that gives what it is told to, and counts its trials."""

    def __init__(self, family: Family, give: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.family, self.give = family, give
        self.trials = 0

    def made(self) -> Trial:
        self.trials += 1
        expected = torch.linspace(-3, 3, 1000)
        return Trial(lambda: self.give(expected.to(torch.bfloat16)), expected)

    def allowed(self, kind: str = "a", device: torch.device = CPU) -> bool:
        return self.family.allows(device, kind, self.made)


def fake(
    tmp_path: Path, give: Callable[[Tensor], Tensor] = lambda x: x, release: str = UNTRIED
) -> Fake:
    return Fake(Family("sums", "Sums take longer", release=release, notes=tmp_path), give)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_right_kernel_is_tried_once_of_each_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = fake(tmp_path)
    assert [kernel.allowed(kind) for kind in "aabab"] == [True] * 5
    assert kernel.trials == 2
    assert not warnings_of(caplog)
    assert "kernel of sums is right with Triton 3.9.0" in caplog.text


@pytest.mark.parametrize("given", [0.05, torch.nan, torch.inf])
def test_a_wrong_kernel_turns_its_family_off_with_one_warning(
    given: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def one_wrong(x: Tensor) -> Tensor:
        x[500] += given
        return x

    kernel = fake(tmp_path, one_wrong)
    assert [kernel.allowed(kind) for kind in "aab"] == [False] * 3
    assert kernel.trials == 1
    (warning,) = warnings_of(caplog)
    seen = "0.05" if given == 0.05 else "inf"
    assert warning.startswith("Hopper's kernels of sums are off with Triton 3.9.0: a small case is")
    assert f"off by {seen}, where 0.016 is allowed. Sums take longer." in warning


def test_a_kind_that_is_wrong_later_turns_off_those_that_were_right(tmp_path: Path) -> None:
    kernel = fake(tmp_path)
    assert kernel.allowed("a")
    kernel.give = torch.neg
    assert not kernel.allowed("b")
    assert not kernel.allowed("a")


def test_a_kernel_that_does_not_compile_turns_its_family_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(x: Tensor) -> Tensor:
        raise AttributeError("module 'gl' has no attribute 'thread_barrier'")

    kernel = fake(tmp_path, fail)
    assert [kernel.allowed() for _ in range(3)] == [False] * 3
    assert kernel.trials == 1
    (warning,) = warnings_of(caplog)
    assert "off with Triton 3.9.0: AttributeError: module 'gl' has no attribute" in warning


def test_with_a_release_that_ran_them_nothing_is_tried(tmp_path: Path) -> None:
    kernel = fake(tmp_path, torch.neg, release="3.6.1")
    assert kernel.allowed()
    assert kernel.trials == 0


def test_what_no_release_has_run_is_tried_with_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for give, right in ((torch.clone, True), (torch.neg, False)):
        family = Family("sums", "Sums take longer", ran=(), release="3.6.1", notes=tmp_path)
        kernel = Fake(family, give)
        assert [kernel.allowed() for _ in range(2)] == [right] * 2
        assert kernel.trials == 1
    assert warnings_of(caplog)[0].endswith("Sums take longer. No Triton has run them")


def test_without_memory_a_trial_is_made_again_later(tmp_path: Path) -> None:
    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel = fake(tmp_path, full)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.allowed()
    kernel.give = torch.clone
    assert kernel.allowed()


def test_nothing_is_tried_within_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = fake(tmp_path)
    assert not kernel.allowed(device=GPU)
    assert kernel.trials == 0


def test_a_kernel_that_hangs_ends_the_process_and_is_off_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = tmp_path / "not" / "there"
    with monkeypatch.context() as patch:
        patch.setattr(gluon, "_ends", lambda device, patience: False)
        with pytest.raises(RuntimeError, match=r"kernel of sums .* did not end in 30 s") as caught:
            fake(notes).allowed()
    assert "start it again, without them" in str(caught.value)
    # The next process.
    kernel = fake(notes)
    assert [kernel.allowed() for _ in range(2)] == [False] * 2
    assert kernel.trials == 0
    (warning,) = warnings_of(caplog)
    assert "a small case did not end in 30 s (delete '" in warning
    # With another release it is tried again, as is another operation.
    assert fake(notes, release="3.8.0").allowed()
    assert Fake(Family("products", "", release=UNTRIED, notes=notes)).allowed()


def test_a_kernel_that_breaks_the_context_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(gluon, "_is_broken", lambda device: True)
        with pytest.raises(RuntimeError, match=r"broke the GPU's context .*illegal memory access"):
            fake(tmp_path, fail).allowed()
    assert not fake(tmp_path).allowed()


@pytest.mark.parametrize(
    ("release", "begin"),
    [
        ("3.6.0", "on: Triton 3.6.0 ran them"),
        ("3.7.1", "on, if they prove right: Triton 3.7.1"),
        ("3.9.0+git1234", "on, if they prove right: Triton 3.9.0+git1234"),
        ("3.5.1", "off: Triton 3.5.1 was not tried, they are for 3.6, 3.7, 3.8, 3.9;"),
        ("3.10.0", "off: Triton 3.10.0 was not tried"),
        ("3.60.0", "off: Triton 3.60.0 was not tried"),
    ],
)
def test_a_line_says_whether_they_are_on(
    release: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert support([CPU], release) == "off: there is no GPU of compute capability 9.0"
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert support([CPU, GPU], release).startswith(begin)
    assert runs_gluon(GPU, release) == begin.startswith("on")
    capability = (10, 0)
    assert support([CPU, GPU], release) == "off: there is no GPU of compute capability 9.0"


def hopper(operation: str) -> ModuleType:
    """The module of Hopper's kernel for an operation; it can be imported anywhere."""
    return importlib.import_module(f"engine_core.kernels.{operation}.hopper.triton")


class Tried:
    """The own trials of Hopper's kernels, with another kernel in the place of each."""

    def __init__(self, operation: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.module = hopper(operation)
        self._patch = patch
        self._notes = tmp_path

    def trusts(
        self, name: str, instead: Callable[..., Any], *arguments: Any, of: str = "_FAMILY"
    ) -> bool:
        family = Family(name, "", release=UNTRIED, notes=self._notes)
        self._patch.setattr(self.module, of, family)
        self._patch.setattr(self.module, name, instead)
        trusted: bool = self.module.is_trusted(*arguments)
        return trusted


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (2, 1, 64, 64, torch.bfloat16),
        (1, 1, 128, 256, torch.float16),
        (1, 1, 80, 64, torch.bfloat16),
    ],
)
def test_attention_is_tried_on_a_case_that_the_portable_kernel_solves(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    launch_device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    portable = importlib.import_module("engine_core.kernels.attention.triton")
    monkeypatch.setattr(portable, "runs_gluon", lambda device: False)
    tried = Tried("attention", tmp_path, monkeypatch)
    like = torch.empty((1, heads, head_dim), dtype=dtype, device=launch_device)

    def right(call: Any, *rest: Any) -> None:
        portable.paged_attention(call)

    def forgets_the_last_key(call: Any, *rest: Any) -> None:
        call.kv_lens[call.kv_lens > 0] -= 1
        portable.paged_attention(call)

    for instead in (right, forgets_the_last_key):
        trusted = tried.trusts("prefill", instead, like, kv_heads, block_size, False, 2)
        assert trusted == (instead is right)


def rounded_once(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Summed up in float32, and rounded once; torch itself takes five times as long."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "has_bias", "columns", "warp_groups"),
    [(torch.bfloat16, True, 64, 3), (torch.float16, False, 128, 2)],
)
def test_gate_and_up_are_tried_on_a_case_that_torch_solves(
    dtype: torch.dtype,
    has_bias: bool,
    columns: int,
    warp_groups: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = Tried("linear", tmp_path, monkeypatch)
    tile = columns, warp_groups

    def right(x: Tensor, weight: Tensor, bias: Tensor | None, *given: int) -> Tensor:
        assert (bias is not None) == has_bias
        assert given == tile
        return silu_and_mul(rounded_once(x, weight, bias))

    def leaves_the_last_row(x: Tensor, weight: Tensor, bias: Tensor | None, *given: int) -> Tensor:
        out = right(x, weight, bias, *given)
        out[-1] = 0
        return out

    given = (torch.empty((1, 64), dtype=dtype), has_bias, True, *tile)
    assert tried.trusts("gated_linear", right, *given)
    assert not tried.trusts("gated_linear", leaves_the_last_row, *given)


def test_parts_are_tried_on_a_case_that_torch_solves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried("linear.parts", tmp_path, monkeypatch)

    def right(x: Tensor, weight: Tensor, tile: PartsTile) -> Tensor:
        # A part of K for each, of whole steps of 64 columns.
        ends = [len(x[0]) // 64 * part // tile.parts * 64 for part in range(tile.parts)]
        pairs = zip(ends, [*ends[1:], len(x[0])], strict=True)
        return torch.stack([x[:, i:j].float() @ weight[:, i:j].float().T for i, j in pairs])

    def forgets_the_last_part(x: Tensor, weight: Tensor, tile: PartsTile) -> Tensor:
        return right(x, weight, tile)[:-1]

    given = torch.empty((1, 64), dtype=torch.bfloat16), PartsTile(64, 4)
    assert tried.trusts("partial_sums", right, *given)
    assert not tried.trusts("partial_sums", forgets_the_last_part, *given)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_quick_gelu_is_tried_on_a_case_that_torch_solves(
    has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried("linear", tmp_path, monkeypatch)

    def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert (bias is not None) == has_bias
        y = rounded_once(x, weight, bias)
        return y * torch.sigmoid(1.702 * y)

    def is_no_quick_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.gelu(rounded_once(x, weight, bias))

    given = (torch.empty((1, 64), dtype=torch.bfloat16), has_bias, False)
    name = "quick_gelu_linear"
    assert tried.trusts(name, right, *given, of="_UNGATED")
    assert not tried.trusts(name, is_no_quick_one, *given, of="_UNGATED")


@pytest.mark.parametrize(
    ("width", "longest", "dtype"),
    [(64, 300, torch.bfloat16), (64, 2000, torch.float16), (80, 2000, torch.bfloat16)],
)
def test_segments_are_tried_on_a_case_that_torch_solves(
    width: int, longest: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried("segments", tmp_path, monkeypatch)

    def right(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, most: int, scale: float, programs: int
    ) -> Tensor:
        assert (most >= 1024) == (longest >= 1024)
        out, bounds = torch.full_like(q, torch.nan), starts.tolist()
        for begin, end in pairwise(bounds):
            assert end - begin <= most
            parts = [part[begin:end].transpose(0, 1) for part in (q, k, v)]
            attended = F.scaled_dot_product_attention(*parts, scale=scale)
            out[begin:end] = attended.transpose(0, 1)
        return out

    def sees_a_neighbour(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *rest: Any) -> Tensor:
        return right(q, k, v, torch.cat([starts[:2], starts[3:]]), *rest)

    like = torch.empty((1, 2, width), dtype=dtype)
    assert tried.trusts("attend", right, like, longest)
    assert not tried.trusts("attend", sees_a_neighbour, like, longest)


ENDINGS = ("activated", "gated", "added", "stored")
PRODUCTS = (
    (20, ProductTile(64, 2, 4)),
    (96, ProductTile(128, 1, 3)),
    (160, ProductTile(256, 1, 4, 8)),
)


def of_bytes(dtype: torch.dtype, device: str) -> GroupWeight:
    """A weight ``[512, 4096]`` of 8 bits, whose form a trial's has."""
    words = torch.zeros(512, 32, 32, dtype=torch.int32, device=device)
    return GroupWeight(words, torch.zeros(512, device=device), None, 4096, 0, dtype)


def of_codes(dtype: torch.dtype, device: str, *, zeros: bool) -> GroupWeight:
    """A weight ``[512, 4096]``, whose form a trial's has."""
    words = torch.zeros(512, 32, 32, dtype=torch.int16, device=device)
    scales = torch.zeros(32, 512, dtype=torch.float16, device=device)
    return GroupWeight(words, scales, scales.to(torch.int8) if zeros else None, 4096, 128, dtype)


def of_blocks(name: str, dtype: torch.dtype, device: str) -> GroupWeight:
    """A weight ``[8, 4096]`` of a type of a GGUF file's blocks."""
    form = FORMS[name]
    raw = torch.zeros(8, 4096 // form.file_block, form.file_bytes, dtype=torch.uint8, device=device)
    return group_weight(raw, name, dtype)


class OfEndings:
    """A linear with each ending, by PyTorch; its last row is zeros in the part that is named."""

    def __init__(self, ending: str) -> None:
        self.ending, self.last = ending, ""

    @property
    def parts(self) -> list[str]:
        parts = {"added": ["out", "total", "squares"], "stored": ["out", "k_cache", "v_cache"]}
        return parts.get(self.ending, ["out"])

    def __call__(self, x: Tensor, weight: Any, epilogue: Any, *rest: Any) -> Tensor:
        numbers = weight if isinstance(weight, Tensor) else weight.dense()
        product = x.float() @ numbers.float().T
        if self.ending == "stored":
            rows, _, dim = epilogue.out.shape
            cos, sin = epilogue.cos[:, None], epilogue.sin[:, None]
            heads = product.to(x.dtype).float().view(rows, 4, dim)
            a, b = heads[:, :3].chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
            epilogue.out.copy_(turned[:, :2])
            epilogue.k_cache[epilogue.slots, 0] = turned[:, 2:]
            epilogue.v_cache[epilogue.slots, 0] = heads[:, 3:].to(x.dtype)
        elif self.ending == "added":
            total = (product.to(x.dtype) + epilogue.residual).float()
            epilogue.total.copy_(total)
            epilogue.squares.zero_()[:, 1] = total.square().sum(1)
            epilogue.out.copy_(total * epilogue.norm_weight.float())
        else:
            gate, up = product.chunk(2, -1)
            epilogue.out.copy_(F.silu(gate) * up if self.ending == "gated" else product)
        if self.last:
            getattr(epilogue, self.last)[-1] = 0
        out: Tensor = epilogue.out
        return out


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("module", "zeros"),
    [("groups", True), ("groups", False), ("teams", True), ("teams", None)],
)
def test_linears_by_codes_are_tried_on_a_case_that_torch_solves(
    ending: str,
    module: str,
    zeros: bool | None,
    launch_device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a word on zeros codes have 8 bits."""
    tried, right = Tried(f"linear.{module}", tmp_path, monkeypatch), OfEndings(ending)
    rows, choose = (20, choose_teams_tile) if module == "teams" else (5, choose_codes_tile)
    if zeros is None:
        choose, of = choose_bytes_tile, of_bytes(torch.bfloat16, launch_device)
    else:
        of = of_codes(torch.bfloat16, launch_device, zeros=zeros)
    tile = choose(rows, 4096, 4096, False, HOPPER)
    like = torch.empty((rows, 4096), dtype=torch.bfloat16, device=launch_device)
    family = "_OF_BYTES" if zeros is None else "_FAMILY"
    assert tried.trusts("linear", right, like, of, tile, ending, of=family)
    for part in right.parts:
        right.last = part
        assert not tried.trusts("linear", right, like, of, tile, ending, of=family), part


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("name", "rows", "module"),
    [
        ("Q4_K", 16, "blocks"),
        ("Q5_K", 32, "blocks"),
        ("Q4_K", 1, "integers"),
        ("Q5_K", 3, "integers"),
        ("Q6_K", 2, "integers"),
        ("Q4_1", 1, "integers"),
        ("Q8_0", 4, "integers"),
        ("Q5_0", 16, "blocks"),
        ("Q8_0", 32, "blocks"),
    ],
)
def test_linears_by_blocks_are_tried_on_a_case_that_torch_solves(
    ending: str,
    name: str,
    rows: int,
    module: str,
    launch_device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, right = Tried(f"linear.{module}", tmp_path, monkeypatch), OfEndings(ending)
    of = of_blocks(name, torch.bfloat16, launch_device)
    tile = choose_blocks_tile(rows, 4096, 4096, False, HOPPER, of.block_kind)
    like = torch.empty((rows, 4096), dtype=torch.bfloat16, device=launch_device)
    assert tried.trusts("linear", right, like, of, tile, ending)
    for part in right.parts:
        right.last = part
        assert not tried.trusts("linear", right, like, of, tile, ending), part


@pytest.mark.parametrize("ending", ENDINGS)
def test_linears_whose_weight_waits_are_tried_on_a_case_that_torch_solves(
    ending: str, launch_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, right = Tried("linear.held", tmp_path, monkeypatch), OfEndings(ending)
    tile = choose_held_tile(5, 896, 1152, False, HOPPER)
    like = torch.empty((5, 1152), dtype=torch.bfloat16, device=launch_device)
    assert tried.trusts("linear", right, like, tile, ending)
    for part in right.parts:
        right.last = part
        assert not tried.trusts("linear", right, like, tile, ending), part


@pytest.mark.parametrize("k", [1152, 1664])
def test_a_weight_that_waits_is_tried_with_as_many_columns_as_it_has(
    k: int, launch_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of its steps may have room at once: then some take the place of others."""
    tried, right = Tried("linear.held", tmp_path, monkeypatch), OfEndings("activated")
    seen: list[int] = []

    def noted(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(weight.shape[1])
        return right(x, weight, *rest)

    tile = Tile(64, 128, 1, "held", 4, 9, least_rows=8, most_rows=64)
    like = torch.empty((5, k), dtype=torch.bfloat16, device=launch_device)
    assert tried.trusts("linear", noted, like, tile, "activated")
    assert seen == [k]


def a_chain(has_bias: bool, bits: int = 8, linears: int = 4) -> Chain:
    """Linears from an attention to the next one, or the end, of which a trial asks the sizes.

    Those of 4 bits have zeros where they have a bias.
    """
    shapes = ((1024, 1024), (3072, 1024), (1024, 1536), (2048, 1024))[:linears]

    def made(n: int, k: int) -> Fp8Weight | GroupWeight:
        zeros = torch.zeros((n, k), dtype=torch.bfloat16, device="cuda")
        if bits == 8:
            return Fp8Weight.quantized(zeros)
        weight = GroupWeight.quantized(zeros, 4, 128)
        return weight if has_bias else replace(weight, zeros=None)

    weights: Any = tuple(made(*shape) for shape in shapes)
    biases: Any = tuple(
        torch.zeros(len(weight), dtype=torch.bfloat16, device="cuda") if has_bias else None
        for weight in weights
    )
    norm = ChainNorm(torch.ones(1024, dtype=torch.bfloat16, device="cuda"), 1e-5, float(has_bias))
    return Chain(weights, norm, norm, biases)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hoppers_own_kernels_pass_their_trials(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the release of Triton that is here; the log says how long each took."""

    def like(heads: int, width: int) -> Tensor:
        return torch.empty((1, heads, width), dtype=dtype, device="cuda")

    def few_of(rows: int, weight: GroupWeight) -> Tile | None:
        return choose_blocks_tile(rows, 4096, 4096, False, HOPPER, weight.block_kind)

    names = ("attention", "linear", "linear.groups", "linear.fp8", "linear.held", "segments")
    attention, linear, codes, products, held, segments = map(hopper, names)
    held_tile = choose_held_tile(2, 896, 1152, False, HOPPER)
    weight = of_codes(dtype, "cuda", zeros=True)
    tile = choose_codes_tile(1, 4096, 4096, False, HOPPER)
    blocks, integers = hopper("linear.blocks"), hopper("linear.integers")
    teams, parts = hopper("linear.teams"), hopper("linear.parts")

    def teams_of(rows: int, ending: str) -> Tile | None:
        gated = ending == "gated"
        return choose_teams_tile(rows, 28672 if gated else 4096, 4096, gated, HOPPER)

    def bytes_of(rows: int, ending: str) -> Tile | None:
        gated = ending == "gated"
        return choose_bytes_tile(rows, 37888 if gated else 4096, 4096, gated, HOPPER)

    squares = torch.ones((1, 14), device="cuda")
    undivided = DeferredRMSNorm(like(1, 64)[0], squares, 1e-5)
    cases: list[tuple[ModuleType, tuple[Any, ...]]] = [
        *(
            (attention, (like(32, 128), 8, size, pdl, 2))
            for size in (16, 64)
            for pdl in (True, False)
        ),
        *((attention, (like(14, 64), 2, 64, True, groups)) for groups in (2, 3)),
        (attention, (like(8, 128), 8, 256, True, 2)),
        *((attention, (like(6, width), 3, 64, True, 2)) for width in (72, 80, 96, 192, 256)),
        *((linear, (like(1, 64)[0], *kind)) for kind in product((False, True), repeat=2)),
        *((linear, (like(1, 64)[0], has_bias, True, 64)) for has_bias in (False, True)),
        *((linear, (undivided, False, True, *tile)) for tile in ((80, 2), (48, 3), (128, 2))),
        *((parts, (like(1, 64)[0], PartsTile(cols, 4))) for cols in (64, 128)),
        *((codes, (like(1, 4096)[0], weight, tile, ending)) for ending in ENDINGS),
        *(
            (teams, (like(rows, 4096)[0], weight, teams_of(rows, ending), ending))
            for ending in ENDINGS
            for rows in ((16, 32, 64, 72, 128) if ending == "gated" else (32, 100, 256))
        ),
        *(
            (teams, (like(rows, 4096)[0], of_bytes(dtype, "cuda"), bytes_of(rows, ending), ending))
            for ending in ENDINGS
            for rows in (1, 32, 64, 100, 256)
        ),
        *(
            (blocks, (like(rows, 4096)[0], weight, few_of(rows, weight), ending))
            for name in ("Q4_K", "Q6_K", "Q4_0", "Q5_1", "Q8_0")
            for weight in (of_blocks(name, dtype, "cuda"),)
            for rows in (16, 32)
            for ending in ENDINGS
        ),
        *(
            (integers, (like(rows, 4096)[0], weight, few_of(rows, weight), ending))
            for name in ("Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q8_0")
            for weight in (of_blocks(name, dtype, "cuda"),)
            for rows in (1, 4)
            for ending in ENDINGS
        ),
        *((products, (weight.words.device, torch.bfloat16, *of)) for of in PRODUCTS),
        *((held, (like(2, 1152)[0], held_tile, ending)) for ending in ENDINGS),
        *((segments, (like(16, width), 640)) for width in (64, 72, 80, 128)),
        (segments, (like(16, 64), 5000)),
    ]
    if dtype == torch.bfloat16:
        chain = hopper("linear.chain")
        cases += [(chain, (like(1, 1024)[0], a_chain(has_bias))) for has_bias in (False, True)]
        of_groups = hopper("linear.chain.groups")
        cases += [(of_groups, (like(1, 1024)[0], a_chain(zeros, 4))) for zeros in (False, True)]
        for module, bits in ((chain, 8), (of_groups, 4)):
            cases.append((module, (like(1, 1024)[0], a_chain(True, bits, linears=3))))
    for module, arguments in cases:
        family = Family(module.__name__, "", release=UNTRIED, notes=tmp_path)
        monkeypatch.setattr(module, "_FAMILY", family)
        for other in ("_UNGATED", "_OF_BYTES"):
            monkeypatch.setattr(module, other, family, raising=False)
        assert module.is_trusted(*arguments), arguments


def test_what_a_trial_allows_is_what_tests_allow() -> None:
    assert all(TOLERANCE[dtype] == allowed for dtype, allowed in gluon._TOLERANCE.items())


# Of each kernel the forms that differ most, each of which takes seconds.
EACH_KIND = (
    *("heads-48", "gated-bias", "gated-odd", "segments-64", "codes-gated-1", "blocks-gated-1"),
    *("teams-gated-32", "teams-gated-72", "bytes-gated-1"),
    *("floats-gated-1", "floats-gated-16"),
    *("products-parts-96", "held-gated-8", "parts", "chain", "chain-codes"),
)
MORE_FORMS = (
    *("8B", "0.5B", "1B-long", "heads-80", "heads-256", "quick-gelu-bias", "codes-gated-32"),
    *("codes-stored-32", "products-17", "gated-undivided", "gated-undivided-wide", "gated-three"),
    *("gated-narrow", "gated-odd-widest", "gated-widest", "gated-odd-three"),
    *("teams-gated-2", "teams-gated-64", "teams-added-32", "teams-stored-17"),
    *("teams-gated-128", "teams-added-100", "teams-added-256"),
    *("bytes-gated-64", "bytes-gated-80", "bytes-gated-128", "bytes-added-32"),
    *("bytes-added-160", "bytes-added-256", "bytes-stored-16", "bytes-waited-100"),
    *(
        "blocks-gated-8",
        "blocks-added-4",
        "blocks-gated-32",
        "blocks-added-16",
        "blocks-added-32",
        "blocks-stored-1",
        "blocks-stored-32",
    ),
    *("floats-added-3", "floats-stored-1", "floats-stored-16", "floats-gated-32"),
    *("codes-added-64", "segments-80", "segments-64-long", "products-wide-32"),
    *("products-wide-192", "held-added-8", "held-added-225", "held-stored-16", "chain-bias"),
    *("chain-codes-zeros", "chain-last", "chain-codes-last", "parts-wide"),
    *("codes-waited-32", "teams-waited-17", "blocks-waited-32", "blocks-waited-4"),
)


# Copies of tiles, as the code has them, before the kernel ahead is waited for: of attention none,
# of a weight one, or one of the gate's and one of up's, and as many of a tile's second product. Of
# each team's codes, scales and, if there are any, zeros one or two. None of them loads numbers, but
# for scales of whole rows.
EARLY_TILES = {
    **dict.fromkeys(("heads-48", "8B", "0.5B", "1B-long", "heads-80", "heads-256"), 0),
    **dict.fromkeys(("parts", "parts-wide"), 1),
    **dict.fromkeys(("teams-added-32", "teams-gated-128", "teams-added-256"), 4),
    **dict.fromkeys(("teams-gated-72", "teams-added-100"), 6),
    **dict.fromkeys(("teams-gated-32", "teams-stored-17", "teams-waited-17"), 6),
    "teams-gated-64": 8,
    "teams-gated-2": 12,
    **dict.fromkeys(("bytes-gated-1", "bytes-gated-64", "bytes-added-32", "bytes-added-256"), 2),
    **dict.fromkeys(("bytes-stored-16", "bytes-waited-100", "bytes-added-160"), 2),
    **dict.fromkeys(("bytes-gated-80", "bytes-gated-128"), 3),
    **dict.fromkeys(("gated-bias", "gated-narrow", "gated-undivided", "quick-gelu-bias"), 2),
    **dict.fromkeys(("gated-undivided-wide", "gated-three"), 2),
    **dict.fromkeys(("gated-odd", "gated-odd-widest", "gated-widest", "gated-odd-three"), 4),
}


DEALING = ("chain", "chain-bias", "chain-last")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [EACH_KIND, pytest.param(MORE_FORMS, marks=pytest.mark.long)],
    ids=["each kind", "more forms"],
)
def test_they_compile_for_a_hopper_gpu_that_is_not_there(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """By a child, for here kernels are interpreted, and with registers enough for their loops.

    Nothing is written before the kernel ahead was waited for, but for a count of tiles that chains
    deal out, which is theirs alone; and nothing is read but of weights. Where attention is launched
    once its linear has waited, that is so in all code that lets it be.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("compiled_gluon.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forkserver.run(
        [sys.executable, str(script), *names],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == list(names), done.stderr
    for name, shared, _, stack, stores, tiles, loads, early, launches in lines:
        assert int(shared) <= 227 * 1024, name
        # A tile of results in it, and not in registers, would take 256 or 512 bytes.
        assert int(stack) < 192, name
        assert stores == ("1" if name in DEALING else "0"), name
        if name in EARLY_TILES:
            # Two scales of a thread's rows, of each team, are of weights, too.
            of_rows = 2 * EARLY_TILES[name] if name.startswith("bytes") else 0
            assert (int(tiles), int(loads)) == (EARLY_TILES[name], of_rows), name
        if "-waited-" in name:
            of_teams = name.startswith(("teams", "bytes"))
            assert (early, launches) == ("0", "2" if of_teams else "1"), name


@pytest.mark.slow
def test_gate_and_up_wait_for_a_weight_whose_numbers_were_just_made(tmp_path: Path) -> None:
    """Any other is older than the kernel before, and begins to be read beside it."""
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("fresh_numbers.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forkserver.run(
        [sys.executable, str(script)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "nothing _linear_kernel False",
        "_numbers_kernel _linear_kernel True",
    ], done.stderr


@pytest.mark.parametrize(
    ("code", "stores"),
    [
        ("griddepcontrol.wait;\n st.global.b32 [%rd1], %r1;\n ret;", 0),
        ("st.global.b32 [%rd1], %r1;\n griddepcontrol.wait;\n ret;", 1),
        # One of two ways there has not waited.
        ("@%p1 bra $L__1;\n griddepcontrol.wait;\n$L__1:\n st.global.b32 [%rd1], %r1;\n ret;", 1),
        ("@%p1 bra $L__1;\n griddepcontrol.wait;\n bra.uni $L__2;\n$L__1:\n ret;\n$L__2:\n"
         " @%p2 red.release.gpu.global.add.u64 [%rd1], 1;\n ret;", 0),
        # Each of an indirect branch's warps waits for itself.
        ("bb: .branchtargets\n $L__1,\n $L__2;\n brx.idx %r1, bb;\n$L__1:\n griddepcontrol.wait;\n"
         " ret;\n$L__2:\n st.global.b32 [%rd1], %r1;\n ret;", 1),
        ("st.shared.b32 [%r1], %r2;\n ret;", 0),
    ],
)  # fmt: skip
def test_stores_before_a_wait_are_found(code: str, stores: int) -> None:
    assert len(early_lines(f".visible .entry kernel(\n)\n{{\n {code}\n}}\n", STORES)) == stores
