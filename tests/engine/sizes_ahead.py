"""Launches of steps of many sizes on an H200 that a start does not know of, found out without one.

Run by itself with a folder that has a model's config and with settings, each a quantisation or
nothing, a type of the cache and a number of sequences with a "=" between them, since Triton's
interpreter takes the compiler's place in the other tests. For each it prints a line of JSON: how
many variants a start has for quick steps, the names of those that only quick steps of other sizes
launch, and the names of those that only steps without a graph launch.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from unittest.mock import patch

from rehearsed import MEMORY

from engine_core import EngineConfig
from engine_core.engine.beside import Rehearsal
from engine_core.engine.rehearsal import rehearse
from engine_core.kernels import GPU
from engine_core.kernels.launch.gluon import Family
from engine_core.runtime import graphs
from engine_core.runtime.ahead import Need, Part
from engine_core.runtime.compiles import QUICK
from engine_core.runtime.graphs import GraphSteps
from engine_core.runtime.step_batch import QUICK_GRAIN, GraphKey

MOST_TOKENS = 8192
# Prompts and tokens of steps without a graph.
PROMPTS = (1, 7, 33, 65, 129, 250, 300)
TOKENS = (1, 17, 33, 65, 66, 129, 200, 256, 300, 600, 700, 900, 1000, 1500, 2047, 3000, 7000)


class EndedError(Exception):
    """Nothing more is to be found out."""


def task(model: str, quantization: str, kv_cache_dtype: str, sequences: str) -> Rehearsal:
    """A start on an H200 with dummy weights."""
    config = EngineConfig(
        quantization=quantization or None,
        kv_cache_dtype=kv_cache_dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=int(sequences),
        max_num_batched_tokens=MOST_TOKENS,
        max_model_len=MOST_TOKENS,
    )
    return Rehearsal(model, config, GPU.of_capability((9, 0)), MEMORY, 1)


def quick(start: Rehearsal) -> dict[str, str]:
    """The variants that a start has for quick steps, and their names."""
    names: dict[str, str] = {}
    found: list[str] = []

    def note(part: Part, need: Need) -> None:
        del need
        names[part.key] = part.name

    def recorded(step: str, keys: list[str]) -> None:
        if step == QUICK:
            found.extend(keys)
            raise EndedError

    with suppress(EndedError):
        rehearse(start, note, recorded)
    return {key: names[key] for key in found}


def without_graphs(start: Rehearsal) -> list[str]:
    """Names of the variants that steps of other sizes launch once all of a start are known."""
    most = start.config.max_num_seqs
    # Rows that decode, as many as they are filled up to, and those that there are at least.
    decoding = ((0, 0), (32, 1), (most, most // 2 + 1))
    known: set[str] = set()
    others: dict[str, str] = {}
    compile_others = GraphSteps._compile_others
    ended: list[bool] = []

    def note(part: Part, need: Need) -> None:
        del need
        if ended:
            others[part.key] = part.name
        else:
            known.add(part.key)

    def run_more(steps: GraphSteps) -> Iterator[None]:
        yield from compile_others(steps)
        ended.append(True)
        for (decode, least), tokens, rows in product(decoding, TOKENS, PROMPTS):
            if rows <= min(tokens, most - least):
                steps._prepare(GraphKey(decode + tokens, decode, rows)).step()
        ended.clear()
        # What was tried for these is tried by steps that are still to come, too.
        for each in gc.get_objects():
            if isinstance(each, Family):
                each._right.clear()

    with patch.object(GraphSteps, "_compile_others", run_more):
        rehearse(start, note, lambda step, keys: None)
    return sorted(name for key, name in others.items() if key not in known)


def main(model: str, *settings: str) -> None:
    logging.disable(logging.CRITICAL)
    sizes = [*range(QUICK_GRAIN, 1024, QUICK_GRAIN), *range(1024, MOST_TOKENS + 1, 1024)]
    for setting in settings:
        start = task(model, *setting.split("="))
        known = quick(start)
        with patch.object(graphs, "_QUICK_STEPS", [(tokens, 2) for tokens in sizes]):
            launched = quick(start)
        told = {
            "known": len(known),
            "quick": sorted(name for key, name in launched.items() if key not in known),
            "without_graphs": without_graphs(start),
        }
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
