"""Time decode steps and first tokens of shapes that are drawn at random, beside their floors.

    python benchmarks/draws.py [--seed 1] [--draws 12] [--only 0,7] [--seconds 0.3] [--prepare 6]
        [--try "0:5632x1280=32,128,1,xw,4,4,256" ...]
    python benchmarks/draws.py --dry-run

A draw is a Llama-like shape (hidden sizes of 1,024 to 5,120, heads 64 to 256 wide, 8 to 40 layers,
vocabularies of 32,000 to 256,000), rows (1 to 300) and the tokens that each has (100 to 60,000),
drawn by their logarithms; weights and cache have room on a card. They hold random values, and a
step is timed as ``benchmarks/decode.py`` does. A floor is the bytes of the weights and of the cache
at 4.28 TB/s, or the products at 781 TFLOP/s if they take longer; the first token is that of one
prompt of at most 8,192 tokens, once the kernels of its step are compiled. ``--prepare`` compiles
the kernels of so many draws at a time first, each in a process of its own with a model of two
layers. Each ``--try`` is a draw's number and settings as of ``benchmarks/tiles.py``: the draw's
step is timed with them, in turns with the step as it is. ``--dry-run`` prints the draws.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode import place_rows, replay_ms
from benchmarks.gpu import release, runner
from benchmarks.tiles import captured_steps, times_in_turn
from engine_core import LLM, EngineConfig, own_process
from engine_core.kernels.codes import cache_parts
from engine_core.runtime.step_batch import GraphKey

BANDWIDTH, PRODUCTS = 4.28e12, 781e12
MOST_WEIGHTS, MOST_CACHE = 40e9, 50e9
LONGEST_PROMPT = 8192


class Draw(NamedTuple):
    """A shape, and the rows of a step: bytes are of bfloat16."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rows: int
    tokens: int

    @classmethod
    def of(cls, config: Mapping[str, Any], rows: int, tokens: int) -> Draw:
        """The shape of a checkpoint's ``config.json``, and such rows."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", hidden // heads),
            vocab=config["vocab_size"],
            tied=config["tie_word_embeddings"],
            rows=rows,
            tokens=tokens,
        )

    @property
    def layer_weights(self) -> int:
        """Numbers of a layer that a token is multiplied by."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read_weights(self) -> int:
        """Bytes of weights that a step reads."""
        return 2 * (self.layers * self.layer_weights + self.vocab * self.hidden)

    @property
    def cache(self) -> int:
        """Bytes of all rows' keys and values."""
        return 4 * self.layers * self.kv_heads * self.head_dim * self.rows * self.tokens

    def step_floor(self) -> float:
        """Seconds of a decode step of all rows."""
        products = self.rows * self.read_weights / PRODUCTS
        return max(self.read_weights / BANDWIDTH, products) + self.cache / BANDWIDTH

    def prompt_floor(self, tokens: int) -> float:
        """Seconds to the first token of one prompt."""
        pairs = 2 * tokens * tokens * self.heads * self.head_dim
        return self.layers * (2 * self.layer_weights * tokens + pairs) / PRODUCTS

    def config(self, layers: int) -> dict[str, Any]:
        """A checkpoint's ``config.json`` of so many layers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def drawn(count: int, seed: int) -> list[Draw]:
    """So many draws; the same for a seed."""
    generator = random.Random(seed)

    def between(least: float, most: float, step: int = 1) -> int:
        number = math.exp(generator.uniform(math.log(least), math.log(most)))
        return max(step, round(number / step) * step)

    found: list[Draw] = []
    while len(found) < count:
        hidden = between(1024, 5120, 128)
        head_dim = generator.choice([64, 80, 96, 128, 192, 256])
        group = generator.choice([1, 2, 4, 5, 7, 8, 16])
        kv_heads = max(1, round(hidden / head_dim / group))
        draw = Draw(
            hidden=hidden,
            intermediate=between(2 * hidden, 4 * hidden, 128),
            layers=between(8, 40),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=between(32000, 256000, 64),
            tied=generator.random() < 0.5,
            rows=between(1, 300),
            tokens=between(100, 60000),
        )
        if draw.read_weights <= MOST_WEIGHTS and draw.cache <= MOST_CACHE:
            found.append(draw)
    return found


def opened(draw: Draw, layers: int, folder: Path, **options: Any) -> LLM:
    """An engine with random weights of the shape, with room for the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draw.config(layers)))
    prompt = min(draw.tokens, LONGEST_PROMPT)
    own = 4 * layers * draw.kv_heads * draw.head_dim
    cache = own * (draw.rows * (draw.tokens + 256) + prompt + 4096)
    return LLM(
        str(folder),
        EngineConfig(
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=draw.tokens + 256,
            max_num_seqs=draw.rows,
            max_num_batched_tokens=max(prompt, 2048),
            kv_cache_memory=cache,
            **options,
        ),
    )


def await_kernels(worker: Any, prompt: int) -> None:
    """Wait for the kernels of a prompt's step, which are compiled beside a start."""
    steps = worker._graph_steps
    key = steps._own_shape(GraphKey(prompt, 0, 1))
    steps._state.compiles.wait(steps._others if key is None else key)


@torch.inference_mode()
def measure(
    draw: Draw, layers: int, folder: Path, seconds: float, tries: list[str]
) -> tuple[float, float, str]:
    """Seconds of a step and to a prompt's first token, and the clock and power of the steps."""
    prompt = min(draw.tokens, LONGEST_PROMPT)
    own_process.claim()
    with opened(draw, layers, folder) as llm:
        run = runner(llm)
        worker = llm.engine.core.executor._runner
        await_kernels(worker, prompt)
        tokens = [7] * prompt
        times = sorted(run([tokens], [1]) for _ in range(5))
        for pair in worker.kv_cache:
            for part in pair:
                cache_parts(part)[0].normal_()
        place_rows(worker, [draw.tokens] * draw.rows)
        graphs = worker._decode_graphs
        positions = [draw.tokens] * draw.rows
        _, steady, said = replay_ms(graphs, positions, seconds)
        if tries:
            captured = captured_steps(worker, positions, tries, "a try")
            for text, ms in times_in_turn(graphs, captured, positions, 5).items():
                figures = f"{min(ms):8.4f} {statistics.median(ms):8.4f}"
                print(f"      {figures} {text or 'as it is'}", flush=True)
    release()
    return steady / 1e3, times[1], said


def prepare(script: str, runs: Sequence[Sequence[str]], processes: int) -> None:
    """Compile what runs of a script with these arguments and two layers do, several at a time."""
    begin = time.perf_counter()
    waiting, running = list(runs), []
    while waiting or running:
        while waiting and len(running) < processes:
            command = [sys.executable, script, *waiting.pop(0), "--layers", "2"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.05)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--prepare", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--only", help="the draws of these numbers alone")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="N:SETTINGS")
    parser.add_argument("--layers", type=int, help="instead of the draws'")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    draws = drawn(arguments.draws, arguments.seed)
    chosen = list(range(len(draws)))
    if arguments.only is not None:
        chosen = [int(part) for part in arguments.only.split(",")]
    if arguments.prepare and not arguments.dry_run:
        own = ["--seed", str(arguments.seed), "--draws", str(arguments.draws)]
        own += ["--seconds", "0.01", *(f"--try={text}" for text in arguments.tries)]
        runs = [["--only", str(number), *own] for number in chosen]
        prepare(__file__, runs, arguments.prepare)
    ratios: list[tuple[float, int]] = []
    print("draw: step ms, its floor, ratio; first token ms, its floor, ratio; clock and power")
    with tempfile.TemporaryDirectory() as folder:
        for number in chosen:
            draw = draws[number]._replace(
                **{"layers": arguments.layers} if arguments.layers else {}
            )
            prompt = min(draw.tokens, LONGEST_PROMPT)
            floors = draw.step_floor(), draw.prompt_floor(prompt)
            print(f"{number} {draw}", flush=True)
            if arguments.dry_run:
                print(f"   {1e3 * floors[0]:.3f} {1e3 * floors[1]:.1f}")
                continue
            tries = [text.partition(":") for text in arguments.tries]
            step, first, said = measure(
                draw,
                draw.layers,
                Path(folder) / str(number),
                arguments.seconds,
                [settings for of, _, settings in tries if of == str(number)],
            )
            ratios.append((step / floors[0], number))
            print(
                f"   {1e3 * step:.3f} {1e3 * floors[0]:.3f} {step / floors[0]:.2f}; "
                f"{1e3 * first:.1f} {1e3 * floors[1]:.1f} {first / floors[1]:.2f} ({prompt} "
                f"tokens); {said}",
                flush=True,
            )
    if len(ratios) > 1:
        worst = max(ratios)
        print(f"the worst step: {worst[0]:.2f} times its floor, draw {worst[1]}")


if __name__ == "__main__":
    main()
