"""Ranks that capture steps together: the same graphs on all, or none, whatever one of them meets.

Two processes over gloo, with the engine's own graphs and agreements; only what captures is a
stand-in (``tests/captured_on_cpu.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import captured_on_cpu
import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.engine.timings import Timings
from engine_core.errors import EngineDeadError
from engine_core.runtime.compiles import ALL, MEMORY, START, Compiles
from engine_core.runtime.phases import Phases
from engine_core.runtime.ranks import RanksExecutor
from engine_core.runtime.worker import WorkerReport

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
MAP = captured_on_cpu.__file__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(captured_on_cpu.FOLDER, str(tmp_path))
    return tmp_path


@contextmanager
def two_ranks(name: str = "llama-gqa", ranks: int = 2, **more: object) -> Iterator[LLM]:
    settings: dict[str, object] = {
        "skip_tokenizer_init": True,
        "tensor_parallel_size": ranks,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "custom_module_map": MAP,
    }
    with LLM(str(GOLDEN / name), EngineConfig(**(settings | more))) as llm:
        yield llm
    assert not multiprocessing.active_children()


def journals(folder: Path, ranks: int = 2) -> list[str]:
    """Captures and replays of every rank: the same on all."""
    (every,) = {
        (folder / f"rank-{rank}").read_text() if (folder / f"rank-{rank}").exists() else ""
        for rank in range(ranks)
    }
    return every.splitlines()


def check_tokens(llm: LLM, name: str = "llama-gqa", prompts: int | None = None) -> None:
    """All prompts at once, and the first alone: the tokens of the original code."""
    golden = golden_prompts(name)[:prompts]
    for some in (golden, golden[:1]):
        outputs = llm.generate([prompt.input_ids for prompt in some], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in some]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen2-gqa", 2),
        *(pytest.param("llama-gqa", ranks, marks=pytest.mark.long) for ranks in (2, 4)),
    ],
)
def test_ranks_replay_the_same_graphs_and_give_the_tokens(
    name: str, ranks: int, folder: Path
) -> None:
    """Decode steps and steps with prompts, greedy and random; nothing is exchanged in a replay."""
    with two_ranks(name, ranks) as llm:
        started = journals(folder, ranks)
        assert [line.split()[0] for line in started] == ["capture"] * 3
        llm.warmup()
        warm = journals(folder, ranks)
        assert len(warm) > len(started)
        check_tokens(llm, name)
        prompt = golden_prompts(name)[1].input_ids
        random = SamplingParams(seed=3, max_tokens=9)
        sampled = llm.generate(prompt, random)[0].outputs[0].token_ids
        assert llm.generate(prompt, random)[0].outputs[0].token_ids == sampled
        steps = Timings(llm.engine.core.stats().timings).steps()
    done = journals(folder, ranks)[len(warm) :]
    assert {line.split()[0] for line in done} == {"replay"}
    assert (steps["graph"], steps["eager"]) == (len(done), 0)
    with two_ranks(name, ranks, eager=True) as llm:
        assert llm.generate(prompt, random)[0].outputs[0].token_ids == sampled
    assert len(journals(folder, ranks)) == len(warm) + len(done)


def ask_to_fail(folder: Path, *lines: str) -> None:
    (folder / "failures").write_text("\n".join(lines))


FAILURES = [
    *((0, "rehearse", "memory"), (1, "capture", ""), (1, "rehearse", "")),
    *((0, "capture", ""), (1, "capture", "memory")),
]
# Of each rank, of each kind, in each way, once.
SHORTLY = [(*FAILURES[0], True), (*FAILURES[1], False)]


@pytest.mark.parametrize(
    ("rank", "kind", "memory", "ahead"),
    [
        pytest.param(*case, ahead, marks=() if (*case, ahead) in SHORTLY else pytest.mark.long)
        for case in FAILURES
        for ahead in (True, False)
    ],
)
def test_what_one_rank_cannot_capture_all_run_eagerly(
    rank: int,
    kind: str,
    memory: str,
    ahead: bool,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first step at the start, and one that is captured ahead, or one that is needed."""
    ask_to_fail(folder, *(f"{rank} {kind} {number} {memory}" for number in (1, 4)))
    with two_ranks() as llm:
        if ahead:
            assert not llm.engine.core.capture_next()
        check_tokens(llm)
        assert not llm.engine.core.capture_next()
        steps = Timings(llm.engine.core.stats().timings).steps()
    journals(folder)
    assert steps["graph"] > 0
    assert steps["eager"] > 0
    said = capfd.readouterr().err
    assert said.count(f"rank {rank}: RuntimeError: ") == said.count("as a CUDA graph") == 2
    assert ("set kv_cache_memory lower" in said) == bool(memory)


def test_the_rank_with_the_least_memory_decides_for_all(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Weights that are packed for a CPU tell no width, so that the largest step takes 0 bytes.
    (folder / "free").write_text(f"{1 << 40} {-1 << 20}")
    with two_ranks() as llm:
        started = journals(folder)
        assert not llm.engine.core.capture_next()
        assert not llm.engine.core.capture_next()
        assert journals(folder) == started
        check_tokens(llm)
        # What is needed is captured all the same.
        assert len([line for line in journals(folder) if "capture" in line]) > len(started)
    assert capfd.readouterr().err.count("-1 MiB of GPU memory are free") == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_fails_in_the_run_together_ends_all_with_its_cause(
    rank: int, folder: Path
) -> None:
    """The other waits for it in a sum, which no host can call off."""
    ask_to_fail(folder, f"{rank} run 4")
    told = f"rank {rank} failed: RuntimeError: no run here"
    with two_ranks() as llm, pytest.raises(EngineDeadError, match=told):
        llm.engine.core.capture_next()


def test_a_rank_that_is_killed_while_others_wait_for_its_word_ends_all(folder: Path) -> None:
    ask_to_fail(folder, "1 rehearse 4 killed")
    told = "rank 1 ended by signal SIGKILL"
    with two_ranks() as llm, pytest.raises(EngineDeadError, match=told):
        llm.engine.core.capture_next()


def test_a_capture_between_the_steps_of_a_request_changes_nothing(folder: Path) -> None:
    """Its answers do not mix with the results of steps in flight."""
    prompt = golden_prompts("llama-gqa")[2]
    with two_ranks() as llm:
        tokens: list[int] = []
        for output in llm.stream(prompt.input_ids, GREEDY):
            tokens = output.outputs[0].token_ids
            llm.engine.core.capture_next()
        executor = llm.engine.core.executor
        # A step for the prompt, and one for each token but the last.
        assert executor.leads() == [{0: 16}, {0: 16}]
        assert executor.leads() == [{}, {}]
    assert tokens == prompt.new_tokens
    journals(folder)


def test_results_are_looked_for_before_they_are_asked_for_as_of_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one is here shows how far ahead the host is; the end of a rank shows when asked."""
    prompt = golden_prompts("llama-gqa")[2]
    with two_ranks() as llm:
        monkeypatch.setattr(llm.engine.core.executor, "_device", torch.device("cuda"))
        check_tokens(llm)
        stream = llm.stream(prompt.input_ids, GREEDY)
        assert next(stream).outputs[0].token_ids == prompt.new_tokens[:1]
        victim = next(p for p in multiprocessing.active_children() if p.name.endswith("rank-1"))
        os.kill(victim.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 ended by signal SIGKILL"):
            list(stream)


class Obedient(RanksExecutor):
    """Two ranks that do nothing, and what they were told and what was waited for, in order."""

    def __init__(self, compiles: Coming) -> None:
        super().__init__(EngineConfig(tensor_parallel_size=2), torch.device("cpu"), compiles)
        self._connections = [None, None]  # type: ignore[list-item]
        self._order = compiles.order

    def _send(self, *message: Any) -> None:
        self._order.append(message[0])

    def _answer(self, rank: int, kind: str = "done") -> Any:
        return False if kind == "captured" else WorkerReport((), 8 + rank, Phases())

    def close(self) -> None: ...

    _receive = _fail = close  # type: ignore[assignment]


class Coming(Compiles):
    """Kernels that somebody compiles until he is waited for; all of them when a test says so."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.all = False

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        if step == ALL:
            return self.all
        assert seconds > 0
        self.order.append(step)
        return True


def test_kernels_of_ranks_are_waited_for_before_ranks_would_compile_them() -> None:
    """They know nothing of it, so that they decide alike; while idle they wait for all."""
    compiles = Coming()
    ranks = Obedient(compiles)
    assert ranks.load().cache_budget == 8
    ranks.start(*[None] * 4)  # type: ignore[arg-type]
    assert compiles.order == [MEMORY, "load", START, "start"]
    for _ in range(2):
        assert ranks.capture_next()
    assert (compiles.late, compiles.order[4:]) == (2, [])
    compiles.all = True
    assert not ranks.capture_next()
    assert compiles.order[4:] == ["capture_next"]
