"""Kernels compiled for a GPU that is not there: machine code, without a launch.

Run by itself, since Triton's interpreter takes the compiler's place in the other tests. It prints a
line for each kind of weight, or fails as the compiler does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from early_lines import LOADS, STORES, early_lines
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine_core.kernels import DeferredRMSNorm, GroupWeight, Routing, Turns, row_codes
from engine_core.kernels.activation import triton as activations
from engine_core.kernels.block_linear import FORMS, group_weight
from engine_core.kernels.decode_inputs import triton as decode_inputs
from engine_core.kernels.embedding import triton as embedding
from engine_core.kernels.experts import triton as experts
from engine_core.kernels.gpu import GPU
from engine_core.kernels.greedy import triton as greedy
from engine_core.kernels.linear import triton as kernels
from engine_core.kernels.linear.groups import triton as groups
from engine_core.kernels.linear.readers.triton import GroupReader
from engine_core.kernels.norm import triton as norms
from engine_core.kernels.rank_sum import RankMemory
from engine_core.kernels.rank_sum import triton as rank_sums
from engine_core.kernels.rotary_store import triton as rotary_stores
from engine_core.kernels.sampling import Adjustments, SamplingState
from engine_core.kernels.sampling import triton as sampling

HOPPER = (9, 0)


class AbsentGPU:
    """Answers to all that Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * HOPPER[0] + HOPPER[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches() -> list[Any]:
    """From now on each launch only compiles; what it compiled is added to the list."""
    driver.set_active(AbsentGPU())
    rows = (row_codes.triton, norms, activations, rotary_stores)
    heads = (decode_inputs, embedding, greedy)
    for module in (kernels, groups, experts, experts.few, rank_sums, sampling, *rows, *heads):
        module.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
    sampling.num_multiprocessors = lambda device: GPU.of_capability(HOPPER).num_multiprocessors
    run, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    return found


def compile_experts(found: list[Any], *, every: bool) -> bool:
    """Whether there is machine code, whose tiles of weights come to shared memory by themselves.

    Of one token, with norms that are left to divide, and of as many as are grouped, whose sum ends
    with a norm. ``every``: without norms too, and with nothing that follows the sum.
    """
    begin = len(found)
    x, router = torch.zeros(1, 512).bfloat16(), torch.zeros(16, 512).bfloat16()
    gate_up, down = (torch.zeros(16, *shape).bfloat16() for shape in ((1024, 512), (512, 512)))
    undivided = DeferredRMSNorm(x, torch.zeros(1, 128), 1e-5)
    one = []
    for given in (x, undivided) if every else (undivided,):
        ids, weights = experts.route(given, router, None, Routing(8), None, None)
        if every:
            experts.run_experts(given, ids, weights, gate_up, down, "silu")
            one += found[-2:]
    matrices = (ids, weights, gate_up, down, "silu")
    experts.run_experts_add(undivided, *matrices, x, x[0], 1e-5, 0.0)
    one += found[-2:]
    x = x.repeat(256, 1)
    ids, weights = ids.repeat(256, 1), weights.repeat(256, 1)
    norm = {"norm_bias": None, "norm_offset": 0.0, "centred": False}
    experts.run_experts_add_norm(x, ids, weights, *matrices[2:], x, x[0], 1e-5, **norm)
    _, *many, _ = found[-4:]
    loads = [kernel.asm["ptx"].count("cp.async.commit_group") for kernel in one + many]
    return all(kernel.asm["cubin"] for kernel in found[begin:]) and all(loads)


def compile_rank_sums(found: list[Any], *, every: bool) -> bool:
    """Whether sums in each way, with and without a norm, and gathers become machine code.

    ``every``: in all of them of few ranks and of many. Terms and words are written and read 16
    bytes at a time. The next kernel is let go after the
    wait for the one before, and ahead of the first flag or word, which are seen at once.
    """
    made = True
    for size in (2, 8):
        addresses = torch.zeros(size, dtype=torch.int64)
        memory = RankMemory(0, size, addresses, addresses.int(), 1 << 23)
        for way in ("words", "one shot", "two shots"):
            if not every and (size, way) not in ((2, "words"), (2, "one shot"), (8, "two shots")):
                continue
            rank_sums.layout.way_of = lambda nbytes, size, way=way: way
            x = torch.zeros(8, 4096).bfloat16()
            begin = len(found)
            rank_sums.rank_sum(x, memory)
            rank_sums.rank_sum_add_norm(x, memory, x[0], x, x[0], 1e-5)
            if way == "one shot":
                rank_sums.rank_gather(x, memory)
            for kernel in found[begin:]:
                ptx = kernel.asm["ptx"]
                words = way == "words"
                told = ("st.global.wt.v2.b64", "ld.volatile.global.v2.b64")
                told = told if words else ("sys.release", "sys.acquire")
                order = [ptx.find(word) for word in (WAITS, LAUNCHES, *told)]
                made &= bool(kernel.asm["cubin"]) and order == sorted(order) and order[0] > 0
                made &= ptx.count("v2.b64" if words else ".v4.b32") >= (2 * size if words else 3)
    return made


def compile_row_codes(found: list[Any]) -> bool:
    """Whether norms and activations that quantise, and the rotation of a product without its
    scales, become machine code; codes are stored 16 bytes at a time."""
    begin, wide = len(found), []
    x, scale = torch.zeros(96, 4096).bfloat16(), torch.zeros(96)
    form = row_codes.RowForm(None, True)
    norms.norm(x, x[0], None, 1e-5, residual=x, centred=False, form=form)
    norms.sum_add_norm(x[None], None, x, x[0], 1e-5, scales=(scale, torch.zeros(4096)), form=form)
    activations.act_and_mul_codes(x, "silu", form)
    row_codes.triton.quantize_rows(x, pairs=True)
    for kernel in found[begin:]:
        ptx = kernel.asm["ptx"]
        wide.append("st.global.b8" not in ptx and "st.global.v4.b32" in ptx)
    q, k, v = x.view(96, 32, 128).split((24, 4, 4), 1)
    angles = torch.zeros(96, 64)
    cache = torch.zeros(8, 16, 4, 132, dtype=torch.float8_e4m3fn)
    slots = torch.zeros(96, dtype=torch.int64)
    rotary_stores.rotary_store(
        q, k, v, angles, angles, cache, cache, slots, q_weight=None, k_weight=None, eps=0.0,
        interleaved=False, scales=(scale, torch.zeros(4096)),
    )  # fmt: skip
    return all(wide) and len(wide) == 4 and all(kernel.asm["cubin"] for kernel in found[begin:])


def compile_head(found: list[Any]) -> bool:
    """Whether the head of a decode step becomes machine code, that lets the next kernel be launched
    and then waits before it reads or writes; ids are asserted to have rows, but for those of ranks.
    """
    begin, ids = len(found), torch.zeros(3, dtype=torch.int64)
    table, weight = torch.zeros(3, 16, dtype=torch.int32), torch.zeros(100, 896).bfloat16()
    decode_inputs.decode_inputs(ids, ids, ids, [table, table], [16, 16], ids[:1], 8)
    embedding.embed(ids, weight, None)
    for first in (0, 100):
        embedding.embed(ids, weight, first)
    of_head = found[begin:]
    made = [choice_is_made(found, rows) for rows in (3, 100)]
    for kernel in of_head:
        ptx = kernel.asm["ptx"]
        early = [early_lines(ptx, what) for what in (LOADS, STORES)]
        made.append(bool(kernel.asm["cubin"]) and early == [[], []] and ptx.count(LAUNCHES) == 1)
    asserted = ["__assertfail" in kernel.asm["ptx"] for kernel in of_head]
    return all(made) and asserted == [False, False, True, False, False]


def choice_is_made(found: list[Any], rows: int) -> bool:
    """Whether the greedy choice that ends such a step becomes machine code, in turns or not."""
    begin, logits = len(found), torch.zeros(rows, 151936).bfloat16()
    state = torch.zeros(rows, dtype=torch.int64)
    turns = Turns(state.repeat(8, 1), state.repeat(8, 1).to(torch.int8), state[:1])
    for given in (turns, None):
        greedy.choose_greedy(logits, state, state, state, given)
    greedy.choose_greedy(logits)
    return len(found) == begin + 3 and all(kernel.asm["cubin"] for kernel in found[begin:])


# Rows, tokens, and whether logits are adjusted. A row has eleven programs if there are 64, then
# three, then one.
CHOICES = [(1, 151936, False), *((rows, 128256, True) for rows in (64, 200, 1000))]


def compile_sampling(found: list[Any], choices: list[tuple[int, int, bool]]) -> bool:
    """Whether all choices become machine code, of few and of many rows, adjusted and not.

    Programs that read all logits exchange nothing before their end. Of many rows the kernels are
    the same, whatever part of a row a program has.
    """
    begin = len(found)
    for rows, vocab, adjusted in choices:
        logits = torch.zeros(rows, vocab).bfloat16()
        places = torch.zeros(rows, dtype=torch.int64)
        adjustments = None
        if adjusted:
            whole = torch.zeros(rows, vocab, dtype=torch.int32)
            few = torch.zeros(rows, 8, dtype=torch.int32)
            adjustments = Adjustments(
                places.int(),
                few,
                places,
                whole.float(),
                whole.to(torch.uint8),
                whole,
                whole,
                places.int(),
            )
        numbers = torch.zeros(rows, 7, dtype=torch.float64)
        state = SamplingState(numbers, places, adjustments)
        sampling.sample_tokens(logits, places, places, places, state)
    made = all(kernel.asm["cubin"] for kernel in found[begin:])
    if choices is CHOICES:
        # Three tokens are read by one program, which exchanges what all of it needs.
        made &= all(k.asm["ptx"].count("bar.sync") < 10 for k in found[begin + 2 :: 4])
        of_many = [k.hash for k in found[begin:]][4:]
        made &= of_many == of_many[:4] * 3
    return made


SAMPLING = {"sampling": CHOICES, "few_tokens": [(1, 3, True)], "plain_tokens": [(1, 3, False)]}

WAITS, LAUNCHES = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


MANY: dict[str, Callable[..., bool]] = {
    "experts": compile_experts,
    "rank_sums": compile_rank_sums,
}


def compile_weight(found: list[Any], name: str) -> bool:
    """Whether the product and the numbers of a weight become machine code, by its reader's way."""
    dtype = torch.float16 if name == "Q5_1" else torch.bfloat16
    if name in FORMS:
        form = FORMS[name]
        shape = (64, 512 // form.file_block, form.file_bytes)
        weight = group_weight(torch.zeros(shape, dtype=torch.uint8), name, dtype)
    else:
        weight = GroupWeight.quantized(torch.ones(64, 512, dtype=dtype), int(name[3:]), 64)
    tile = weight.tile(2, False, GPU.of_capability(HOPPER))
    assert tile is not None, "few rows have a kernel"
    x = torch.zeros(2, 512, dtype=dtype)
    reader = GroupReader.of(weight, native=True)
    kernels.linear(x, reader, kernels.Activated.of(x, 64), tile)
    groups.numbers(weight, dtype, torch.zeros(1, dtype=torch.int64))
    product, numbers = found[-2:]
    assert reader.ASM.value.split("\n")[1] in product.asm["ptx"]
    return all(kernel.asm["cubin"] for kernel in (product, numbers))


def main(names: list[str]) -> None:
    """Compile the products and the numbers of weights: block types, or bits such as "int4".

    "experts" are the kernels of a layer of experts for one token, "rank_sums" those of sums over
    ranks, "all_" before them more of their forms, "row_codes" those of rows that are quantised
    where they are made, "head" those that a decode step begins with, "sampling" those that choose
    tokens, "few_tokens" the same of three, and "plain_tokens" of three whose logits nothing
    adjusts.
    """
    found = compile_launches()
    for name in names:
        kind = name.removeprefix("all_")
        if kind in MANY:
            made = MANY[kind](found, every=kind != name)
        elif name in SAMPLING:
            made = compile_sampling(found, SAMPLING[name])
        elif name == "head":
            made = compile_head(found)
        elif name == "row_codes":
            made = compile_row_codes(found)
        else:
            made = compile_weight(found, name)
        sys.stdout.write(f"{name} {made}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
