"""Sentences embedded a second: engine-core, its server, and sentence-transformers, in one run.

    python benchmarks/embed.py [--peers-env FOLDER] [--rounds 5] [--threads N] [--model FOLDER]
        [--sentences 1000] [--dtype float32]

all-MiniLM-L6-v2 and sentences of random words, from 4 to 40 words long. Every engine lives in a
process of its own and they take turns, round by round, because these machines are noisy: a ratio is
the median of the rounds' ratios. Only the one whose turn it is computes. The server gets all
sentences in one request, as one list. sentence-transformers is installed into the environment
FOLDER if that is not there, and computes batches of 32 (its default) or 128, whichever is faster.
Without --peers-env only engine-core is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this folder, whose kernels.py is not the package of that name that transformers knows.
sys.path[0] = str(ROOT)
MODEL = ROOT / ".cache" / "models" / "all-MiniLM-L6-v2"
PEERS = ("sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0")
SUBJECTS = ("engine-core", "engine-core HTTP", "sentence-transformers 32", "sentence-transformers")


def sentences(model: Path, count: int) -> list[str]:
    """Random words of the model's vocabulary, whole ones."""
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word, index in vocab.items() if 2000 < index < 20000 and word.isalpha()]
    chosen = random.Random(0)
    return [" ".join(chosen.choices(words, k=chosen.randint(4, 40))) for _ in range(count)]


def child(subject: str, model: Path, count: int, dtype: str) -> None:
    """One engine: seconds of a round for each line of stdin, and at first its vectors' sum."""
    texts = sentences(model, count)
    run: Any
    if subject == "engine-core":
        from engine_core import LLM, own_process

        own_process.claim()
        llm = LLM(model, dtype=dtype)

        def run() -> Any:
            return [output.outputs.vector for output in llm.embed(texts)]
    elif subject == "engine-core HTTP":
        run = _served(model, texts, dtype)
    else:
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(model), device="cpu")
        batch = 32 if subject.endswith("32") else 128

        def run() -> Any:
            return theirs.encode(texts, batch_size=batch, show_progress_bar=False)

    first = run()
    print(json.dumps([float(sum(vector[:8])) for vector in first[:20]]), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        run()
        print(time.perf_counter() - begin, flush=True)


def _served(model: Path, texts: list[str], dtype: str) -> Any:
    import base64
    import re

    import httpx
    import numpy as np

    command = [sys.executable, "-m", "engine_core.cli", "serve", str(model), "--port", "0"]
    server = subprocess.Popen([*command, "--dtype", dtype], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None, "it was asked for"
    url = ""
    for line in server.stderr:
        if found := re.search(r"http://[0-9.:]+", line):
            url = found[0]
        if url and "ready" in line:
            break
    client = httpx.Client(base_url=url, timeout=600)
    for _ in range(600):
        if client.get("/health/ready").status_code == 200:
            break
        time.sleep(0.1)

    def run() -> Any:
        body = {"input": texts, "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", json=body).raise_for_status()
        data = answer.json()["data"]
        return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]

    import atexit

    atexit.register(server.terminate)
    return run


def prepare_peers(folder: Path) -> Path:
    """The interpreter of the environment that has sentence-transformers."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--peers-env", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.model, options.sentences, options.dtype)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    theirs = None if options.peers_env is None else prepare_peers(options.peers_env)
    processes: dict[str, subprocess.Popen[str]] = {}
    sums: dict[str, list[float]] = {}
    for subject in SUBJECTS:
        ours = subject.startswith("engine-core")
        if not ours and theirs is None:
            continue
        command = [sys.executable if ours else str(theirs), __file__, "--child", subject]
        command += ["--model", str(options.model), "--sentences", str(options.sentences)]
        process = processes[subject] = subprocess.Popen(
            [*command, "--dtype", options.dtype],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "it was asked for"
        sums[subject] = json.loads(process.stdout.readline())
        worst = max(abs(a - b) for a, b in zip(sums[subject], sums[SUBJECTS[0]], strict=True))
        print(f"{subject}: ready, its vectors differ by up to {worst:.1e} in a sum of 8 numbers")
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for subject, process in processes.items():
            assert process.stdin is not None, "it was asked for"
            assert process.stdout is not None, "it was asked for"
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[subject].append(float(process.stdout.readline()))
    for process in processes.values():
        process.communicate()
    peer = [min(each) for each in zip(*(seconds[name] for name in SUBJECTS[2:]), strict=False)]
    for subject, taken in seconds.items():
        rates = [options.sentences / each for each in taken]
        line = f"{subject:26} {statistics.median(rates):7.1f} sentences a second"
        line += f" ({', '.join(f'{rate:.0f}' for rate in rates)})"
        for name, base in (("sentence-transformers", peer), ("offline", seconds[SUBJECTS[0]])):
            if base and subject.startswith("engine-core") and base is not taken:
                ratios = [other / own for other, own in zip(base, taken, strict=True)]
                line += f"; {statistics.median(ratios):.2f} times {name}"
        print(line)


if __name__ == "__main__":
    main()
