"""Send requests of all kinds to an engine from its cold start on, and see that none fails or waits.

    python benchmarks/cold.py [llama3_8b] [--layers 4] [--seconds 20] [--seed 1]
        [--quantization fp8|int4|int8 | --gguf Q4_K] [--kv-cache-dtype auto|fp8|int8]
    python benchmarks/cold.py --tiny              # a tiny model on a CPU, to try the script

A model's shape with a few of its layers and random weights is started with an empty kernel cache,
and gets requests at once: for five seconds 40 at a time, for five one at a time, for five 200, and
so on. They are greedy, drawn with top-p, top-k and min-p, penalised, with log-probabilities, or
three of a prompt; of 1 to 4000 tokens; one in ten leaves early, and one in twenty is bad: a token
that is none, a prompt that is too long, or none. Each must have all of its tokens, or be refused if
it is bad. Exits with 1 if any failed or hung.

Printed are for each five seconds how many requests began, and seconds to their first token and
between two of their outputs: median and greatest. What 200 prompts at a time wait for is mostly
each other: 170,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import SHAPES, write_config
from engine_core import AsyncEngine, EngineConfig, SamplingParams
from engine_core.errors import EngineError

PHASE_SECONDS = 5.0
AT_ONCE = (40, 1, 200)
PROMPTS = (1, 5, 30, 129, 200, 256, 700, 1500, 4000)
OUTPUTS = (1, 2, 17, 60, 200)
LONGEST = 8192
# Kinds of choice, and how many of a hundred requests have them.
KINDS: list[tuple[int, dict[str, Any]]] = [
    (15, {"temperature": 0.8, "top_p": 0.9}),
    (10, {"temperature": 1.0, "top_k": 40, "min_p": 0.02}),
    (10, {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3}),
    (7, {"temperature": 0.0, "logprobs": 3}),
    (3, {"temperature": 0.9, "n": 3}),
    (55, {"temperature": 0.0}),
]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is drawn.

    Attributes:
        prompt: its tokens.
        params: what it asks for.
        bad: whether it is to be refused.
        leaves: whether its sender goes after a few tokens.
    """

    prompt: list[int]
    params: SamplingParams
    bad: bool
    leaves: bool


def drawn(draw: random.Random, vocab: int) -> Request:
    """A request of any kind; random numbers are taken from ``draw`` alone."""
    kind = draw.choices([of for _, of in KINDS], [weight for weight, _ in KINDS])[0]
    prompt = [draw.randrange(vocab) for _ in range(draw.choice(PROMPTS))]
    params = SamplingParams(
        max_tokens=draw.choice(OUTPUTS), ignore_eos=True, seed=draw.randrange(1000), **kind
    )
    fate = draw.random()
    if fate < 0.02:
        prompt[-1] = vocab + 7
    elif fate < 0.04:
        prompt *= LONGEST // len(prompt) + 1
    elif fate < 0.05:
        prompt = []
    return Request(prompt, params, fate < 0.05, draw.random() < 0.1)


@dataclass(slots=True)
class Seen:
    """Ends, waits and failures of all requests.

    Attributes:
        ends: how many ended in each way.
        firsts: seconds to the first token, by the number of the five seconds they began in.
        gaps: seconds between two outputs, likewise.
        failures: what went wrong, in words.
    """

    ends: Counter[str] = field(default_factory=Counter)
    firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print it."""
        print("| from second | at a time | begun | first token: median, most | gap: median, most |")
        print("|---|---|---|---|---|")
        for phase in sorted(self.firsts):
            firsts, gaps = self.firsts[phase], self.gaps[phase] or [0.0]
            print(
                f"| {phase * PHASE_SECONDS:.0f} | {AT_ONCE[phase % len(AT_ONCE)]} | {len(firsts)} "
                f"| {median(firsts):.3f}, {max(firsts):.3f} | {median(gaps):.3f}, {max(gaps):.3f} |"
            )
        print(", ".join(f"{count} {how}" for how, count in sorted(self.ends.items())))
        for each in self.failures[:10]:
            print(f"FAILED {each}")


async def send(engine: AsyncEngine, request: Request, vocab: int, begin: float, seen: Seen) -> None:
    """Send a request, and take note of what comes."""
    sent = last = time.perf_counter()
    phase = int((sent - begin) / PHASE_SECONDS)
    counts: Counter[int] = Counter()
    try:
        async with await engine.add_request(request.prompt, request.params) as stream:
            async for output in stream:
                now = time.perf_counter()
                waits = seen.gaps if counts else seen.firsts
                waits[phase].append(now - last)
                last = now
                for completion in output.outputs:
                    counts[completion.index] += len(completion.token_ids)
                    assert all(0 <= token < vocab for token in completion.token_ids), "no token"
                if request.leaves and counts.total() > 2:
                    seen.ends["left"] += 1
                    return
        wanted = dict.fromkeys(range(request.params.n), request.params.max_tokens)
        assert counts == wanted, f"{dict(counts)} tokens, not {wanted}"
        assert not request.bad, "it was not refused"
        seen.ends["done"] += 1
    except (EngineError, ValueError) as error:
        if request.bad:
            seen.ends["refused"] += 1
        else:
            seen.failures.append(f"{type(error).__name__}: {error}; {request.params}")
    except AssertionError as error:
        seen.failures.append(f"{error}; {len(request.prompt)} in the prompt, {request.params}")


async def attack(arguments: argparse.Namespace, folder: Path) -> Seen:
    """Start an engine, send requests for some seconds, and wait for all of them."""
    shape = dict(SHAPES[arguments.model], num_hidden_layers=arguments.layers)
    if arguments.tiny:
        shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    SHAPES[arguments.model] = shape
    if arguments.gguf is None:
        model = write_config(arguments.model, folder / "model")
    else:
        from benchmarks import gguf_file

        model = gguf_file.write(shape, arguments.gguf, folder / "model.gguf")
    config = EngineConfig(
        device="cpu" if arguments.tiny else "auto",
        quantization=arguments.quantization if arguments.gguf is None else "gguf",
        kv_cache_dtype=arguments.kv_cache_dtype,
        load_format="dummy" if arguments.gguf is None else "auto",
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        max_num_seqs=256,
    )
    begin = time.perf_counter()
    engine = await AsyncEngine.start(str(model), config)
    print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    draw, seen, vocab = random.Random(arguments.seed), Seen(), shape["vocab_size"]
    begin = time.perf_counter()
    running: set[asyncio.Task[None]] = set()
    while (elapsed := time.perf_counter() - begin) < arguments.seconds:
        most = AT_ONCE[int(elapsed / PHASE_SECONDS) % len(AT_ONCE)]
        while len(running) < (min(most, 4) if arguments.tiny else most):
            request = drawn(draw, vocab)
            running.add(asyncio.create_task(send(engine, request, vocab, begin, seen)))
        _, running = await asyncio.wait(running, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    if running:
        _, running = await asyncio.wait(running, timeout=60)
    for task in running:
        task.cancel()
        seen.failures.append("a request had not ended after a minute")
    await engine.close()
    return seen


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="llama3_8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quantization")
    parser.add_argument("--gguf", help="type of a GGUF file's linears")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "kernels"))
        seen = asyncio.run(attack(arguments, Path(folder)))
    seen.show()
    return 1 if seen.failures else 0


if __name__ == "__main__":
    sys.exit(main())
