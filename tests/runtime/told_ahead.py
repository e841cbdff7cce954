"""Events of the process that compiles ahead, for a start that launches three kernels.

Run by itself, since Triton's interpreter takes the compiler's place in the other tests. One of the
kernels cannot be compiled. It prints JSON: for one rank, for one rank again, and for two, the
events in their order, each with the kernel's name.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine_core import EngineConfig
from engine_core.engine import rehearsal
from engine_core.engine.beside import Rehearsal
from engine_core.kernels import GPU, choose_greedy
from engine_core.kernels.norm import triton as norms
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Need, Part, Variant, parts_of, recording, target_of

HOPPER = GPU.of_capability((9, 0))


@contextmanager
def recorded(note: Callable[[Part], None]) -> Iterator[None]:
    with absent_gpu(HOPPER, 1 << 30), recording(target_of(HOPPER.capability), note):
        yield


def launch() -> None:
    for _ in range(2):
        choose_greedy(torch.zeros(2, 1000, dtype=torch.bfloat16, device="cuda"))
        for columns in (512, 520):
            x = torch.zeros(3, columns, dtype=torch.bfloat16, device="cuda")
            norms.norm(x, x[0], None, 1e-5, residual=None, centred=False)


def rehearse(task: Rehearsal, note: Callable[[Part, Need], None], _: Any) -> None:
    del task
    with recorded(lambda part: note(part, Need.FIRST)):
        launch()
    raise RuntimeError("the end")


def events(task: Rehearsal, names: dict[str, str]) -> list[tuple[str, str]]:
    given, told = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(given[1])
        os.close(told[0])
        rehearsal.live(given[0], told[1])
    os.close(given[0])
    os.close(told[1])
    with os.fdopen(given[1], "wb") as file:
        pickle.dump(task, file)
    with os.fdopen(told[0]) as lines:
        found = [next(iter(json.loads(line).items())) for line in lines]
    os.wait()
    return [
        (kind, names.get(value) or pickle.loads(bytes.fromhex(value)).function.fn.__name__)
        for kind, value in found
        if kind != "failed"
    ]


def main() -> None:
    names: dict[str, str] = {}
    launched: list[Part] = []
    with recorded(launched.append):
        launch()
    variants = [part for part in launched if isinstance(part, Variant)]
    for part in (part for variant in variants for part in parts_of(variant)):
        names[part.key] = part.name
    bad = variants[-1].key
    compile_one = Variant.compile

    def compile_all_but_one(self: Variant) -> None:
        if self.key == bad:
            raise RuntimeError("it cannot be compiled")
        compile_one(self)

    Variant.compile = compile_all_but_one  # type: ignore[method-assign]
    rehearsal.rehearse = rehearse  # type: ignore[assignment]
    told = []
    for ranks in (1, 1, 2):
        config = EngineConfig(tensor_parallel_size=ranks)
        told.append(events(Rehearsal("", config, HOPPER, (1, 1), 2), names))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
