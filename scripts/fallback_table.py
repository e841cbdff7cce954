"""Compare the fallback with transformers for every causal model that transformers knows.

    python scripts/fallback_table.py [--write] [--ranks 2] [MODEL_TYPE ...]

Each architecture gets a tiny random checkpoint (tests/fallback_models.py) and a process of its own.
With --write the results go to plugins/transformers/ARCHITECTURES.md; of MODEL_TYPEs only their rows
change. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402
from fallback_models import Result, compare  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

TABLE = ROOT / "plugins" / "transformers" / "ARCHITECTURES.md"
MEMORY, SECONDS = 7 << 30, 120

INTRODUCTION = """\
# What runs

Every causal language model of transformers {version}, as a tiny random checkpoint in float32 on a
CPU. *Equal*: greedy tokens are those of transformers' own `generate`, and every log-probability is
within 2e-4, for four prompts in one batch, in chunks of 16 tokens, with a cold and with a warm
prefix cache. *Refused*: at the start, with the reason given here. `python scripts/fallback_table.py
--write` made this table; `make soak` makes it anew.

{counts}. Those that take pictures or sounds, or of which no tiny model comes of common sizes, are
*untried*.

| model_type | class | result | |
|---|---|---|---|
"""


def in_a_process(model_type: str, name: str, ranks: int) -> Result:
    """Compare in a fork, so that a model that takes all memory takes nobody else's."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if ranks == 1:
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                signal.alarm(SECONDS)
                result = compare(place / "model", model_type, name, tensor_parallel_size=ranks)
                (place / "result").write_bytes(pickle.dumps(result))
                code = 0
            finally:
                os._exit(code)
        os.waitpid(child, 0)
        if (place / "result").exists():
            result = pickle.loads((place / "result").read_bytes())
            assert isinstance(result, Result), "the child wrote one"
            return result
    return Result("unmade", "it took too much memory or time")


def reason(result: Result) -> str:
    """The reason of a refusal, without what is said of every one."""
    if result.verdict == "unmade":
        return re.sub(r"\s+", " ", result.why).replace("|", "/")[:120]
    if result.verdict != "refused":
        return result.why
    text = re.sub(r"\s+", " ", result.why)
    text = re.split(r"\. A package (of its own|for it)", text)[0]
    return re.sub(r"^.*cannot run \w+( here)?: ", "", text).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and options.ranks != 1:
        parser.error("the table is of one rank")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = {}
    if options.write and options.model_types and TABLE.exists():
        for line in TABLE.read_text(encoding="utf-8").split("|---|---|---|---|\n")[1].splitlines():
            rows[line.split(" | ")[0].removeprefix("| ")] = line
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if options.model_types and model_type not in options.model_types:
            continue
        result = in_a_process(model_type, name, options.ranks)
        verdict = "untried" if result.verdict == "unmade" else result.verdict
        rows[model_type] = f"| {model_type} | {name} | {verdict} | {reason(result)} |"
        print(model_type, name, verdict, reason(result), flush=True)
    counts = Counter(line.split(" | ")[2] for line in rows.values())
    told = ", ".join(f"{counts[key]} are {key}" for key in ("equal", "refused", "untried", "wrong"))
    print(told)
    if options.write:
        head = INTRODUCTION.format(version=transformers.__version__, counts=told)
        lines = [rows[key] for key in sorted(rows)]
        TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
