"""Launches of models' starts on an H200, found out without one.

Run by itself with folders of models, since Triton's interpreter takes the compiler's place in the
other tests. A type, a number of ranks and a quantisation may follow a folder, each after a "=". For
each it prints a line of JSON: the kernels of each step, how many variants each has, how many
registers a thread of each may have where that is bounded, how soon each is needed, which an engine
cannot load before they are launched, which that choose randomly by logits are others than those of
a step of as many rows, and whether the same variants are launched if all layers are run, not just
those that differ.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from typing import Any

import torch

from engine_core import EngineConfig, SamplingParams
from engine_core.engine.beside import Rehearsal
from engine_core.engine.rehearsal import rehearse
from engine_core.kernels import GPU
from engine_core.nn.decoder import Decoder
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Need, Part, Variant, packed, recording, target_of
from engine_core.runtime.sampler.sampler import Sampler

SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 128}


MEMORY = (140 << 30, 140 << 30)


def by_logits(task: Rehearsal, rows: int, vocab: int, dtype: torch.dtype) -> list[Variant]:
    """Launches of a random choice of so many rows that is made by a step's logits."""
    launched: list[Part] = []
    free, total = MEMORY
    with (
        absent_gpu(task.gpu, total, free=free),
        recording(target_of(task.gpu.capability), launched.append),
        torch.inference_mode(),
    ):
        sampler = Sampler(task.config.max_num_seqs + 1, torch.device("cuda"))
        for row in range(rows):
            sampler.admit(row, [1], 1, SamplingParams(temperature=1.0, seed=0), ())
        logits = torch.zeros(rows, vocab, dtype=dtype, device="cuda")
        sampler.sample(logits, range(rows), [1] * rows)
    return [part for part in launched if isinstance(part, Variant)]


def kernels(
    model: str,
    unloaded: set[str],
    needs: dict[str, Need],
    others: set[str],
    registers: dict[str, int | None],
    **settings: Any,
) -> tuple[dict[str, list[str]], dict[str, str]]:
    names: dict[str, str] = {}
    steps: dict[str, list[str]] = {}
    random: dict[int, set[str]] = {}

    def recorded(step: str, keys: list[str]) -> None:
        steps[step] = sorted({names[key] for key in keys})
        if "RANDOM" in step:
            random[int(step[1 : step.index(",")])] = set(keys)

    # No text is read, so a tokenizer that is named need not be there.
    config = EngineConfig(**(SETTINGS | settings), tokenizer="of a user")
    task = Rehearsal(model, config, GPU.of_capability((9, 0)), MEMORY, 1)

    def note(part: Part, need: Need) -> None:
        names[part.key] = part.name
        if isinstance(part, Variant):
            registers[part.name] = part.options.get("maxnreg")
            if packed(part) is None:
                unloaded.add(part.name)
        needs[part.name] = min(need, needs.get(part.name, need))

    source = rehearse(task, note, recorded).source
    for rows, keys in random.items():
        launched = by_logits(task, rows, source.model_config.vocab_size, source.dtype)
        others |= {part.name for part in launched if part.key not in keys}
    return steps, names


def main(models: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    keep, kept = Decoder.keep, []
    for model in models:
        name, *given = model.split("=")
        fields = ("dtype", "tensor_parallel_size", "quantization")
        settings: dict[str, Any] = dict(zip(fields, given, strict=False))
        settings["tensor_parallel_size"] = int(settings.get("tensor_parallel_size", 1))
        Decoder.keep = keep
        needs: dict[str, Need] = {}
        unloaded: set[str] = set()
        others: set[str] = set()
        registers: dict[str, int | None] = {}
        steps, some = kernels(name, unloaded, needs, others, registers, **settings)
        counts = Counter(some.values())
        kept.clear()
        Decoder.keep = lambda self, layers: kept.extend(layers)
        _, every = kernels(name, set(), {}, set(), {}, **settings)
        told = {"steps": steps, "kept": kept, "same": some == every, "counts": counts}
        told["unloaded"], told["others"] = sorted(unloaded), sorted(others)
        told["registers"] = {kernel: most for kernel, most in registers.items() if most}
        told["needs"] = {kernel: need.name for kernel, need in needs.items()}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
