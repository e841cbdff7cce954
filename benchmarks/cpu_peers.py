"""engine-core beside transformers and llama.cpp on this machine's CPU, in one run.

    python benchmarks/cpu_peers.py --peers-env FOLDER [--rounds 5] [--threads N] [--model FILE.gguf]
        [--busy 2] [--modes default,unpacked,int8,int4] [--peers transformers,llama.cpp]
        [--no-batch] [--prompt 512] [--decoded 64]

SmolLM2 from its Q4_1 GGUF file, greedy: a prompt of 512 tokens, decoding after it, and a batch of
16 prompts of mixed lengths. `--model FOLDER` takes a checkpoint of it in bfloat16 instead. Each
engine has the dtype that a user gets by default: ours bfloat16 or, where the CPU would emulate
that, float32; transformers that of ours. `--busy N` measures each round twice, the second time
beside N processes that only take time of a core each, and says what was left. Every engine lives in
a process of its own and they take turns, round by round, because these machines are noisy: a ratio
is the median of the rounds' ratios. Beside busy processes transformers' batch takes minutes, and
llama.cpp's decoding too: `--no-batch`, `--peers llama.cpp` and `--decoded 16` make rounds shorter.
The peers are installed into the environment FOLDER if it is not there;
llama-cpp-python is built from source, and left out where that fails. Without --peers-env only
engine-core is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
# In place of this folder, whose kernels.py is not the package of that name that transformers knows.
sys.path[0] = str(ROOT)
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PEERS = ("transformers==5.23.0", "accelerate", "gguf", "torch==2.13.0")
LLAMA_CPP = "llama-cpp-python==0.3.36"

PROMPT, DECODED = 512, 64
BATCH, BATCH_DECODED = 16, 48
# SmolLM2-135M: numbers of weights in the layers' linears and in the tied vocabulary.
LINEAR_WEIGHTS, VOCABULARY_WEIGHTS = 106_168_320, 28_311_552
# Bytes of weights read per decoded token; None where unknown.
BYTES = {
    "engine-core int4": LINEAR_WEIGHTS * 5 // 8 + VOCABULARY_WEIGHTS,
    "engine-core int8": LINEAR_WEIGHTS + VOCABULARY_WEIGHTS,
    "engine-core default": LINEAR_WEIGHTS * 5 // 8 + VOCABULARY_WEIGHTS * 17 // 16,
    "llama.cpp Q4_1": LINEAR_WEIGHTS * 5 // 8 + VOCABULARY_WEIGHTS * 17 // 16,
}
BASELINES = {"llama.cpp": "llama.cpp Q4_1", "transformers": "transformers default"}
MODES = "default,unpacked,int8,int4"


class Subject(Protocol):
    """One engine with the model loaded."""

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        """Complete every prompt with exactly so many greedy tokens."""


class EngineCore:
    """engine-core, with a quantisation or none."""

    def __init__(self, model: str, threads: int, mode: str) -> None:
        from engine_core import own_process

        own_process.claim()
        import torch

        from engine_core import LLM, EngineConfig, SamplingParams

        torch.set_num_threads(threads)
        config = EngineConfig(
            quantization=None if mode == "default" else mode,
            enable_prefix_caching=False,
            kv_cache_memory="1GiB",
            max_model_len=1024,
            skip_tokenizer_init=True,
        )
        self._llm = LLM(model, config)
        self._params = SamplingParams(temperature=0.0, ignore_eos=True)

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        self._llm.generate(prompts, self._params.replace(max_tokens=tokens))

    def profile(self, prompt: list[int]) -> float:
        """Milliseconds of a decode step that linears take."""
        from torch.profiler import ProfilerActivity, profile

        engine, steps = self._llm.engine, 20
        engine.add_request(prompt, self._params.replace(max_tokens=steps + 10))
        for _ in range(5):
            engine.step()
        with profile(activities=[ProfilerActivity.CPU]) as record:
            for _ in range(steps):
                engine.step()
        while engine.has_unfinished:
            engine.step()
        return sum(
            event.self_cpu_time_total / steps / 1e3
            for event in record.key_averages()
            if "linear_pointwise" in event.key or "pack_mm" in event.key
        )

    @staticmethod
    def dtype() -> str:
        """The element type that it computes with by default."""
        from engine_core import EngineConfig
        from engine_core.runtime import platform

        config = EngineConfig()
        return platform.resolve_dtype(config, platform.resolve_device(config), None)


class Transformers:
    """transformers' ``generate``; prompts of different lengths are padded on the left."""

    def __init__(self, model: str, threads: int, mode: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        path = Path(model)
        folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        self._torch, self._transformers = torch, transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, **file, dtype=getattr(torch, mode)
        ).eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        config = self._transformers.GenerationConfig(
            do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
        )
        with self._torch.inference_mode():
            out = self._model.generate(
                self._torch.tensor(ids),
                attention_mask=self._torch.tensor(mask),
                generation_config=config,
            )
        assert out.shape[1] == longest + tokens


class LlamaCpp:
    """llama.cpp through llama-cpp-python, one sequence at a time."""

    def __init__(self, model: str, threads: int, mode: str) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            model, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        for prompt in prompts:
            self._llama.reset()
            self._llama.eval(prompt)
            for _ in range(tokens - 1):
                self._llama.eval([self._llama.sample(temp=0.0)])
            self._llama.sample(temp=0.0)


SUBJECTS: dict[str, Callable[[str, int, str], Subject]] = {
    "engine-core": EngineCore,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def serve(name: str, model: str, threads: int) -> None:
    """Answer tasks, one per line, until the input ends."""
    # Only answers go to the real standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, _, mode = name.partition(" ")
    subject: Any = SUBJECTS[kind](model, threads, mode)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if task["do"] == "profile":
            answer: Any = subject.profile(task["prompt"])
        elif task["do"] == "bandwidth":
            answer = read_bandwidth()
        else:
            start = time.perf_counter()
            subject.generate(task["prompts"], task["tokens"])
            answer = time.perf_counter() - start
        print(json.dumps(answer), file=answers, flush=True)


def read_bandwidth() -> float:
    """GB/s at which all threads together read a tensor far larger than the caches."""
    import torch

    numbers = torch.ones(2**27)
    numbers.sum()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times) / 1e9


class Worker:
    """A process that serves one subject."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name = name
        command = [python, __file__, "--serve", name, "--model", model, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._answer()

    def ask(self, do: str, **values: Any) -> Any:
        """Give a task and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """How long it takes to complete the prompts."""
        return float(self.ask("generate", prompts=prompts, tokens=tokens))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)


def prepare_peers(folder: Path) -> str:
    """The Python of the environment ``folder``, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEERS], check=True)
        # With AMX, which it finds by itself, this release crashes; images are nothing to us.
        arguments = "-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DLLAVA_BUILD=OFF"
        flags = {**os.environ, "CMAKE_ARGS": arguments}
        subprocess.run([str(python), "-m", "pip", "install", "-q", LLAMA_CPP], env=flags)
    return str(python)


def measure(
    worker: Worker, long: list[list[int]], decoded: int, batch: list[list[int]]
) -> dict[str, float]:
    """Tokens per second of one round; of no batch if it is empty."""
    once = worker.seconds(long, 1)
    many = worker.seconds(long, decoded + 1)
    figures = {"prefill": len(long[0]) / once, "decode": decoded / (many - once)}
    if batch and not worker.name.startswith("llama.cpp"):
        figures["batch"] = BATCH * BATCH_DECODED / worker.seconds(batch, BATCH_DECODED)
    return figures


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have so many processes take a core each in the ``with`` block."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-env", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--modes", default=MODES, help="of engine-core, by commas")
    parser.add_argument("--busy", type=int, default=0, help="processes that take a core each")
    parser.add_argument("--peers", default="transformers,llama.cpp", help="of others, by commas")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="its tokens")
    parser.add_argument("--decoded", type=int, default=DECODED, help="tokens after it")
    parser.add_argument("--no-batch", action="store_true", help="measure no batch of 16")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.threads)
        return

    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1000, 40000) for _ in range(length)]

    lengths = range(0 if options.no_batch else BATCH)
    batch = [prompt(draw.randrange(32, PROMPT)) for _ in lengths]
    names = {f"engine-core {mode}": sys.executable for mode in options.modes.split(",")}
    dtype = EngineCore.dtype()
    if options.peers_env is not None:
        peers = prepare_peers(options.peers_env)
        BASELINES["transformers"] = f"transformers {dtype}"
        names |= {BASELINES[each]: peers for each in options.peers.split(",")}
    whole = (LINEAR_WEIGHTS + VOCABULARY_WEIGHTS) * (2 if dtype == "bfloat16" else 4)
    BYTES.update({"engine-core unpacked": whole, f"transformers {dtype}": whole})
    if Path(options.model).is_dir():
        BYTES["engine-core default"] = (LINEAR_WEIGHTS + VOCABULARY_WEIGHTS) * 2
        names.pop("llama.cpp Q4_1", None)
    workers = []
    for name, python in names.items():
        try:
            workers.append(Worker(name, python, options.model, options.threads))
        except RuntimeError as error:
            print(f"left out: {error}")
    ours = workers[0]
    rounds: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    alone: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    bandwidths = []
    for worker in workers:
        worker.seconds([prompt(64)], 4)
    for number in range(options.rounds):
        bandwidths.append(ours.ask("bandwidth"))
        long = [prompt(options.prompt)]
        if options.busy:
            for worker in workers:
                alone[worker.name].append(measure(worker, long, options.decoded, batch))
        with busy_processes(options.busy):
            for worker in workers:
                rounds[worker.name].append(measure(worker, long, options.decoded, batch))
        shown = {
            name: [each[-1] for each in (alone[name], rounds[name]) if each] for name in rounds
        }
        print(f"round {number + 1} of {options.rounds}: {shown}", file=sys.stderr)
    linears = {
        worker.name: worker.ask("profile", prompt=prompt(options.prompt))
        for worker in workers
        if worker.name.startswith("engine-core") and not worker.name.endswith("default")
    }
    for worker in workers:
        worker.close()
    report(rounds, bandwidths, linears, options)
    if options.busy:
        report_left(alone, rounds, options.busy)


def report(
    rounds: dict[str, list[dict[str, float]]],
    bandwidths: list[float],
    linears: dict[str, float],
    options: argparse.Namespace,
) -> None:
    """Print the tables, in Markdown."""
    bandwidth, day = statistics.median(bandwidths), time.strftime("%Y-%m-%d")
    print(f"{day}, {_cpu()}, {options.threads} threads, {bandwidth:.1f} GB/s read\n")
    prefill = f"prefill of {options.prompt}"
    print(f"| tokens/s, median | {prefill} | decode | batch of 16 | of the bandwidth |")
    print("|---|---|---|---|---|")
    medians = {}
    for name, figures in rounds.items():
        row = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
        medians[name] = row
        share = row["decode"] * BYTES[name] / 1e9 / bandwidth
        batch = f"{row['batch']:.0f}" if "batch" in row else ""
        print(f"| {name} | {row['prefill']:.0f} | {row['decode']:.1f} | {batch} | {share:.0%} |")
    print("\n| ratio, median of the rounds (least to most) | prefill | decode | batch |")
    print("|---|---|---|---|")
    for name, figures in rounds.items():
        for kind, baseline in BASELINES.items():
            if not name.startswith("engine-core") or baseline not in rounds:
                continue
            cells = []
            for key in ("prefill", "decode", "batch"):
                pairs = zip(figures, rounds[baseline], strict=True)
                ratios = sorted(own[key] / base[key] for own, base in pairs if key in base)
                cells.append(
                    f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                    if ratios
                    else ""
                )
            print(f"| {name} / {kind} | {' | '.join(cells)} |")
    print("\n| ms of a decode step | all | linears | rest |")
    print("|---|---|---|---|")
    for name, taken in linears.items():
        step = 1e3 / medians[name]["decode"]
        rest = step - taken
        print(f"| {name} | {step:.1f} | {taken:.1f} | {rest:.1f} ({rest / step:.0%}) |")


def report_left(
    alone: dict[str, list[dict[str, float]]], beside: dict[str, list[dict[str, float]]], busy: int
) -> None:
    """Print what busy processes left of the tokens per second, in Markdown."""
    print(f"\n| left beside {busy} busy processes | prefill | decode | decode alone, tokens/s |")
    print("|---|---|---|---|")
    for name, figures in alone.items():
        cells = []
        for key in ("prefill", "decode"):
            pairs = zip(beside[name], figures, strict=True)
            left = sorted(after[key] / before[key] for after, before in pairs)
            cells.append(f"{statistics.median(left):.2f} ({left[0]:.2f} to {left[-1]:.2f})")
        before = statistics.median(each["decode"] for each in figures)
        print(f"| {name} | {' | '.join(cells)} | {before:.1f} |")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
