"""Launches of models' starts on an H200, found out without one.

Run by itself with folders of models, since Triton's interpreter takes the compiler's place in the
other tests. A type and a number of ranks may follow a folder, each after a "=". For each it prints
a line of JSON: the kernels of each step, how many variants each has, how soon each is needed, which
an engine cannot load before they are launched, and whether the same variants are launched if all
layers are run, not just those that differ.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from typing import Any

from engine_core import EngineConfig
from engine_core.engine.beside import Rehearsal
from engine_core.engine.rehearsal import rehearse
from engine_core.kernels import GPU
from engine_core.nn.decoder import Decoder
from engine_core.runtime.ahead import Need, Part, Variant, packed

SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 128}


def kernels(
    model: str, unloaded: set[str], needs: dict[str, Need], **settings: Any
) -> tuple[dict[str, list[str]], dict[str, str]]:
    names: dict[str, str] = {}
    steps: dict[str, list[str]] = {}

    def recorded(step: str, keys: list[str]) -> None:
        steps[step] = sorted({names[key] for key in keys})

    memory = (140 << 30, 140 << 30)
    # No text is read, so a tokenizer that is named need not be there.
    config = EngineConfig(**(SETTINGS | settings), tokenizer="of a user")
    task = Rehearsal(model, config, GPU.of_capability((9, 0)), memory, 1)

    def note(part: Part, need: Need) -> None:
        names[part.key] = part.name
        if isinstance(part, Variant) and packed(part) is None:
            unloaded.add(part.name)
        needs[part.name] = min(need, needs.get(part.name, need))

    rehearse(task, note, recorded)
    return steps, names


def main(models: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    keep, kept = Decoder.keep, []
    for model in models:
        name, *given = model.split("=")
        settings: dict[str, Any] = dict(zip(("dtype", "tensor_parallel_size"), given, strict=False))
        settings["tensor_parallel_size"] = int(settings.get("tensor_parallel_size", 1))
        Decoder.keep = keep
        needs: dict[str, Need] = {}
        unloaded: set[str] = set()
        steps, some = kernels(name, unloaded, needs, **settings)
        counts = Counter(some.values())
        kept.clear()
        Decoder.keep = lambda self, layers: kept.extend(layers)
        _, every = kernels(name, set(), {}, **settings)
        told = {"steps": steps, "kept": kept, "same": some == every, "counts": counts}
        told["unloaded"] = sorted(unloaded)
        told["needs"] = {kernel: need.name for kernel, need in needs.items()}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
