"""A process that opens damaged checkpoints, within limits: a line before each, one after it.

``python worker.py GOOD KIND FIRST END``; the good checkpoints are in the folder GOOD.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from damaged_checkpoints import KINDS, write_case

from engine_core import LLM, SamplingParams
from engine_core.check import check_model
from engine_core.configs import EngineConfig
from engine_core.errors import EngineError, RequestError

SECONDS = 20
BYTES = 2 * 2**30
CONFIG = EngineConfig(kv_cache_memory=2**22, device="cpu", max_num_seqs=2, eager=True)


def problem_of(path: Path) -> str | None:
    """A fault in how the checkpoint is refused or loaded; None if there is none."""
    try:
        report = check_model(path, CONFIG)
        json.loads(report.to_json())
        refused: str | None = None
        try:
            with LLM(str(path), CONFIG) as llm:
                params = SamplingParams(max_tokens=2, temperature=0)
                (output,) = llm.generate([[3, 4, 5]], params)
                assert output.outputs, "a loaded model answers"
                if llm.tokenizer is not None:
                    with suppress(RequestError):
                        llm.generate(["abc é"], params)
        except EngineError as error:
            refused = f"{type(error).__name__}: {error}"
            refused.encode()
    except BaseException:  # a panic of the tokenizers library is none of Exception's
        return traceback.format_exc(limit=-6)
    # A model without a usable template runs, but not as asked.
    errors = [problem for problem in report.errors if problem.code != "chat-template-invalid"]
    if bool(errors) != (refused is not None):
        said = [f"{problem.code}: {problem.message}" for problem in errors]
        return f"the check says {said or 'that it runs'}, LLM: {refused or 'it runs'}"
    return None


def memory(name: str) -> int:
    """Bytes that ``/proc/self/status`` gives under ``name``."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def tell(**values: object) -> None:
    """Write a line for who started this process."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    good, kind, first, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    problem = problem_of(good / KINDS[kind][0])
    assert problem is None, f"the good one of {kind}: {problem}"
    limit = memory("VmSize") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for case in range(first, end):
        tell(case=case)
        with tempfile.TemporaryDirectory() as folder:
            path = write_case(good, kind, case, Path(folder) / "model")
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            # Either ends the process. Others may have most of the processor's time.
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
            problem = problem_of(path)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = memory("VmHWM") - before
            if problem is None and grown > BYTES // 4:
                problem = f"it took {grown} bytes"
        tell(case=case, problem=problem)


if __name__ == "__main__":
    main()
