"""Measure two trees in turn on one card: each has a process that holds its engine.

    python benchmarks/alternate.py BEFORE AFTER [--models llama3_8b,qwen3_8b] [--rounds 3]
        [--batches 1,8,32,128,256] [--no-mix] [--deterministic]

A tree is a checkout, with its plugins in ``plugins/``. Only the one whose turn it is runs. A line
of the table has the medians, and each round's figures after them; ``clock`` is the card's SM clock
in MHz at the end of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import write_config

_CHILD = r"""
import json, random, sys, time
import torch
from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.bench.workloads import mix_requests, random_ids
path, vocab, deterministic, memory = json.loads(sys.argv[1])
try:
    from engine_core import own_process
    own_process.claim()
except ImportError:
    pass
llm = LLM(path, EngineConfig(deterministic=deterministic, load_format="dummy",
    skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=8192, max_num_seqs=256,
    max_num_batched_tokens=8192, kv_cache_memory=memory))
generator = random.Random(0)

def run(prompts, lengths):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    return seconds

def fresh(batch, length):
    return [random_ids(length, vocab, generator) for _ in range(batch)]

run(fresh(4, 64), [8] * 4)
llm.warmup()
print("READY", flush=True)
for line in sys.stdin:
    what, number = line.split()
    number = int(number)
    if what == "warm":
        value = run(fresh(number, 64), [40] * number)
    elif what == "decode":
        once = min(run(fresh(number, 1024), [1] * number) for _ in range(2 if number < 64 else 1))
        value = (run(fresh(number, 1024), [129] * number) - once) / 128 * 1e3
    elif what == "first":
        value = min(run(fresh(1, number), [1]) for _ in range(3)) * 1e3
    else:
        prompts, lengths = mix_requests(vocab, number)
        value = sum(lengths) / run(prompts, lengths)
    print("VALUE", value, flush=True)
"""


class Tree:
    """One tree's process."""

    def __init__(self, tree: Path, model: str, folder: Path, deterministic: bool) -> None:
        path = write_config(model, folder / model)
        vocab = json.loads((path / "config.json").read_text())["vocab_size"]
        places = [tree, *(tree / "plugins").iterdir()]
        arguments = json.dumps([str(path), vocab, deterministic, 45 << 30])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, word: str) -> str:
        """The rest of the next line that begins with ``word``."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise SystemExit(f"the process of a tree ended with {self._process.wait()}")

    def measure(self, task: str) -> float:
        """The figure of ``task``, as in "decode 8"."""
        assert self._process.stdin
        self._process.stdin.write(task + "\n")
        self._process.stdin.flush()
        return float(self.read("VALUE"))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def clock() -> str:
    """The card's SM clock in MHz."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--models", default="llama3_8b,qwen2_0_5b")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-mix", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    tasks = [f"decode {batch}" for batch in arguments.batches.split(",")] + ["first 4096"]
    tasks += [] if arguments.no_mix else ["mix 256"]
    for model in arguments.models.split(","):
        figures: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
        clocks = []
        with tempfile.TemporaryDirectory() as folder:
            trees = []
            for index, tree in enumerate(arguments.trees):
                place = Path(folder) / str(index)
                place.mkdir()
                trees.append(Tree(tree.resolve(), model, place, arguments.deterministic))
            for tree in trees:
                tree.read("READY")
            for task in tasks:
                for tree in trees:
                    if task.startswith("decode"):  # what is captured when it is first needed
                        tree.measure(task.replace("decode", "warm"))
                for number in range(arguments.rounds):
                    for index in (0, 1) if number % 2 == 0 else (1, 0):
                        figures[task][index].append(trees[index].measure(task))
                clocks.append(clock())
                before, after = figures[task]
                first, second = statistics.median(before), statistics.median(after)
                rounds = " | ".join(" ".join(f"{v:.5g}" for v in side) for side in (before, after))
                print(
                    f"{model} {task}: {first:.5g} -> {second:.5g} ({second / first - 1:+.1%})"
                    f"   {rounds}   clock {clocks[-1]}",
                    flush=True,
                )
            for tree in trees:
                tree.close()


if __name__ == "__main__":
    main()
