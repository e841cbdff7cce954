"""Launches of quick steps of many sizes on an H200 that a start does not know, without one.

Run by itself with a folder that has a model's config and with names of quantisations, since
Triton's interpreter takes the compiler's place in the other tests. For each quantisation it prints
a line of JSON: how many variants a start has for quick steps, and the names of those that only
steps of other sizes launch.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from unittest.mock import patch

from engine_core import EngineConfig
from engine_core.engine.beside import Rehearsal
from engine_core.engine.rehearsal import rehearse
from engine_core.kernels import GPU
from engine_core.runtime import graphs
from engine_core.runtime.ahead import Need, Part
from engine_core.runtime.compiles import QUICK
from engine_core.runtime.step_batch import QUICK_GRAIN

MOST_TOKENS = 8192
MEMORY = (140 << 30, 140 << 30)


class EndedError(Exception):
    """Nothing more is to be found out."""


def quick(model: str, quantization: str) -> dict[str, str]:
    """The variants that a start has for quick steps, and their names."""
    names: dict[str, str] = {}
    found: list[str] = []
    config = EngineConfig(
        quantization=quantization,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=64,
        max_num_batched_tokens=MOST_TOKENS,
        max_model_len=MOST_TOKENS,
    )

    def note(part: Part, need: Need) -> None:
        del need
        names[part.key] = part.name

    def recorded(step: str, keys: list[str]) -> None:
        if step == QUICK:
            found.extend(keys)
            raise EndedError

    task = Rehearsal(model, config, GPU.of_capability((9, 0)), MEMORY, 1)
    with suppress(EndedError):
        rehearse(task, note, recorded)
    return {key: names[key] for key in found}


def main(model: str, *quantizations: str) -> None:
    logging.disable(logging.CRITICAL)
    sizes = [*range(QUICK_GRAIN, 1024, QUICK_GRAIN), *range(1024, MOST_TOKENS + 1, 1024)]
    for quantization in quantizations:
        known = quick(model, quantization)
        with patch.object(graphs, "_QUICK_STEPS", [(tokens, 2) for tokens in sizes]):
            launched = quick(model, quantization)
        others = sorted(name for key, name in launched.items() if key not in known)
        sys.stdout.write(json.dumps({"known": len(known), "others": others}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
