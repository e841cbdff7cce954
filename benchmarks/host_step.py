"""The host's share of a decode step: planning, taking results in, and telling the frontend.

    python benchmarks/host_step.py [--rows 1,64,256,1024] [--steps 200] [--churn 0]

A tiny model, ``depth`` 1, prefix caching with blocks of 16, prompts of 5 to 39 tokens, greedy, no
GPU: the replay of a decode step's CUDA graph is replaced by tokens that are there at once, all else
is the engine's own code. The tenth percentile of this thread's processor time, in microseconds: of
the parts of ``EngineCore.step``, of all of it, of sending its results to one frontend, and of what
the frontend takes to read them and to make text of the tokens. ``--churn`` sequences are aborted,
and as many added, between any two steps.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

# In place of this folder, whose kernels.py is not the package of that name that transformers knows.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from serving import write_tiny_model

from engine_core import EngineConfig, SamplingParams
from engine_core.engine.core import EngineCore
from engine_core.engine.frontend import Frontend, choose_tokenizer
from engine_core.engine.pacing import Pacing
from engine_core.engine.process import Decoder, _Links
from engine_core.engine.startup import load, open_engine
from engine_core.runtime.chosen import ChosenRoom
from engine_core.runtime.runner import ModelRunner
from engine_core.runtime.step_batch import StepOutputs
from engine_core.steps import TokenUpdate


class InstantGraphs:
    """Stands in for the decode steps' CUDA graphs: it takes what they take, and answers at once."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self._tables = runner._tables
        self._static = np.zeros((2, rows), dtype=np.int64)
        memory = torch.zeros(ChosenRoom.bytes_of(rows, 1), dtype=torch.uint8)
        self.room = ChosenRoom.of(rows, 1, memory, None)
        self.room.turns.tokens.random_(100, 300)

    def offer(self, rows: int, choice: Any) -> Any:
        return choice

    def begin(self, rows: Sequence[int], positions: Sequence[int], choice: Any) -> InstantGraphs:
        self._static[0, : len(rows)] = rows
        self._static[1, : len(rows)] = positions
        for table in self._tables:
            table.flush()
        return self

    def replays(
        self, captured: InstantGraphs, turns: int, rows: int, *, chosen: bool
    ) -> Iterator[StepOutputs]:
        for _ in range(turns):
            yield StepOutputs(room=self.room)

    def forget(self) -> None:
        """Nothing is kept."""


class Clock:
    """Processor time of this thread by the name of what it went to."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[int]] = defaultdict(list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.thread_time_ns()
            result = call(*args)
            self.seconds[name].append(time.thread_time_ns() - begin)
            return result

        return timed


def measure(model: Path, rows: int, steps: int, churn: int) -> dict[str, float]:
    """Microseconds of each part of a step of so many rows."""
    config = EngineConfig(
        device="cpu", max_num_seqs=rows + churn, max_num_batched_tokens=8192, block_size=16
    )
    opened = open_engine(str(model), config)
    loaded = load(opened)
    core = EngineCore(loaded, Pacing(loaded.scheduler, 1, max_step_time=0.03), beside=True)
    runner = loaded.executor._runner
    runner._decode_graphs = InstantGraphs(runner, rows + churn)
    ours, theirs = socket.socketpair()
    links, decoder = _Links(theirs, None), Decoder()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    model_config = opened.source.model_config
    tokenizer = choose_tokenizer(config, lambda: model, model_config)
    frontend = Frontend(config, model_config, tokenizer, None, {}, core.finish)
    draw, names = random.Random(5), count()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)

    def add() -> None:
        prompt = [draw.randrange(3, 300) for _ in range(draw.randint(5, 39))]
        state, sequences = frontend.prepare(
            frontend.tokenize(prompt),
            params,
            request_id=f"chatcmpl-{next(names):032x}",
            unique_ids=True,
        )
        frontend.keep(state)
        for sequence in sequences:
            core.add(sequence)

    clock = Clock()
    scheduler = core.scheduler
    schedule, update = scheduler.schedule, scheduler.update
    submit = loaded.executor.submit

    def submit_timed(plan: Any) -> Any:
        pending = clock.timed("submit", submit)(plan)
        read = clock.timed("read", pending.result)
        object.__setattr__(pending, "result", read)
        return pending

    for _ in range(rows):
        add()
    step = clock.timed("step", core.step)
    send = clock.timed("send", links.send)

    def receive(data: bytes) -> None:
        for updates, *columns, _ in decoder.feed(data):
            given = (memoryview(column).cast("q").tolist() for column in columns)
            deque(frontend.apply([TokenUpdate._make(update) for update in updates], *given), 0)

    take = clock.timed("receive", receive)
    warm = 2 * (1 + rows * 22 // 500) + 90
    for turn in range(warm + steps):
        if turn == warm:
            clock.seconds.clear()
            scheduler.schedule = clock.timed("schedule", schedule)
            scheduler.update = clock.timed("update", update)
            loaded.executor.submit = submit_timed
        if turn >= warm:
            for name in draw.sample(sorted(frontend.states), churn):
                frontend.drop(name)
                core.abort(name)
                add()
        updates = step()
        send(updates, core.stats())
        data = b""
        ours.setblocking(False)
        try:
            while piece := ours.recv(1 << 20):
                data += piece
        except BlockingIOError:
            pass
        take(data)
    core.close()
    return {name: quantiles(taken, n=10)[0] / 1e3 for name, taken in clock.seconds.items()}


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,64,256,1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--churn", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = ("schedule", "submit", "read", "update", "step", "send", "receive")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model")
        print("| rows |", " | ".join(parts), "|")
        for rows in map(int, options.rows.split(",")):
            taken = measure(model, rows, options.steps, options.churn)
            print(f"| {rows} |", " | ".join(f"{taken[part]:.0f}" for part in parts), "|")


if __name__ == "__main__":
    main()
