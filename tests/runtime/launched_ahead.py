"""Kernels compiled ahead by processes, and then launched as by an engine that finds them.

Run by itself, since Triton's interpreter takes the compiler's place in the other tests. It prints
JSON: what was compiled, what was loaded from Triton's cache before a launch, and for each later
launch that looked there whether its kernel was in it.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

from engine_core.kernels import GPU, choose_greedy
from engine_core.kernels.greedy import triton as greedy
from engine_core.kernels.norm import triton as norms
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import (
    Compilers,
    Module,
    Part,
    Variant,
    load,
    packed,
    recording,
    target_of,
)

HOPPER = GPU.of_capability((9, 0))


def normalise(rows: int, offset: int, device: str) -> None:
    """RMSNorm of rows that begin ``offset`` numbers into an allocation."""
    room = torch.zeros(rows * 512 + offset, dtype=torch.bfloat16, device=device)
    weight = torch.ones(512, dtype=torch.bfloat16, device=device)
    x = room[offset:].view(rows, 512)
    norms.norm(x, weight, None, 1e-5, residual=None, centred=False)


def main() -> None:
    compilers, launches = Compilers(2), 0

    def note(part: Part) -> None:
        nonlocal launches
        launches += isinstance(part, Variant)
        compilers.add(part)

    with absent_gpu(HOPPER, 1 << 30), recording(target_of(HOPPER.capability), note):
        for rows in (1, 7, 64):
            normalise(rows, 0, "cuda")
        choose_greedy(torch.zeros(2, 1000, dtype=torch.bfloat16, device="cuda"))
    ends = []
    while compilers.busy:
        ends += compilers.poll(wait=True)

    made = 0
    if launched := [part for part in compilers.done if isinstance(part, Module)]:
        known = {part.key for part in launched}

        def make(src: str, name: str, **_: Any) -> Any:
            nonlocal made
            made += Module.of(name, src).key not in known
            return SimpleNamespace(launch=None)

        nvidia.compile_module_from_src, nvidia.library_dirs = make, list
        for part in compilers.done:
            if isinstance(part, Variant):
                metadata = compile_kernel(part.source, target=part.target, options=part.options)
                nvidia.CudaLauncher(part.source, metadata.metadata)

    # An engine's launches, of real tensors, up to the kernel's start.
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = listen
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    for module in (norms, greedy):
        module.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()
    # Of the kernels' handles the device's driver has a part, and there is no device.
    handles: list[str] = []
    CompiledKernel._init_handles = lambda self: handles.append(self.name)
    texts = [
        text for part in compilers.done if isinstance(part, Variant) and (text := packed(part))
    ]
    for text in texts * 2:
        load(text)
    loaded, hits[:] = list(hits), []
    normalise(3, 0, "cpu")
    greedy.choose_greedy(torch.zeros(5, 1000, dtype=torch.bfloat16), None, None, None)
    normalise(3, 1, "cpu")
    sys.stdout.write(
        json.dumps(
            {
                "launches": launches,
                "compiled": sorted(end.part.name for end in ends if isinstance(end.part, Variant)),
                "errors": [end.error for end in ends if end.error],
                "loaded": loaded,
                "handles": sorted(handles),
                "hits": hits,
                "modules_made": made,
                "summary": compilers.summary(),
            }
        )
    )


if __name__ == "__main__":
    main()
