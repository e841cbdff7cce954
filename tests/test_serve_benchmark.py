"""The serving benchmark: what it reports is what was sent and what came."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import forkserver
import pytest
from serving import ServerProcess, write_tiny_model

ROOT = Path(__file__).parents[1]
RATE, SECONDS, SEED = 40, 1.0, 5
FINISHED = "engine_core_finished_sequences_total"


def bench(output: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark; its one row, with every request."""
    command = [sys.executable, "benchmarks/serve.py", "--output", str(output), "--observations"]
    done = forkserver.run(
        [*command, *options], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [line] = output.read_text().splitlines()
    row: dict[str, Any] = json.loads(line)
    assert f"| {row['load']} |" in done.stdout
    return row


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with ServerProcess(model, "--kv-cache-memory", "64MiB") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def row(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = ("--rates", f"{RATE}", "--seconds", f"{SECONDS}", "--seed", f"{SEED}")
    lengths = ("--prompt-tokens", "lognormal:20:0.5:4:64", "--output-tokens", "uniform:1:40")
    more = ("--token-range", "3", "320", "--processes", "2")
    output = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return bench(output, "--url", server.url, *options, *lengths, *more)


def test_requests_are_those_of_the_seed_and_sent_no_earlier(row: dict[str, Any]) -> None:
    draw = random.Random(SEED)
    due = 0.0
    assert len(row["observations"]) == RATE * SECONDS
    for index, seen in enumerate(row["observations"]):
        due += draw.expovariate(RATE)
        wanted = draw.randint(1, 40)
        size = int(min(64, max(4, math.exp(draw.gauss(math.log(20), 0.5)))))
        for _ in range(size):
            draw.randrange(3, 320)
        assert (seen["index"], seen["due"]) == (index, due)
        assert seen["sent"] >= due
        assert (seen["usage"], seen["prompt_tokens"]) == (wanted, size)


def test_tokens_of_events_add_up_to_the_usage(row: dict[str, Any]) -> None:
    for seen in row["observations"]:
        assert seen["error"] is None
        assert seen["counted"]
        assert sum(seen["tokens"]) == seen["usage"]
    assert row["miscounted"] == 0
    assert row["output_tokens"] == sum(seen["usage"] for seen in row["observations"])
    assert (row["finished"], row["failed"]) == (len(row["observations"]), 0)


def test_gaps_add_up_to_the_streams(row: dict[str, Any]) -> None:
    largest = 0.0
    for seen in row["observations"]:
        events = seen["events"]
        assert len(events) == len(seen["tokens"])
        assert seen["sent"] < events[0]
        assert events[-1] <= seen["ended"]
        gaps = [after - before for before, after in pairwise(events)]
        assert min(gaps, default=0.0) >= 0.0
        assert sum(gaps) == pytest.approx(events[-1] - events[0], abs=1e-9)
        largest = max(largest, *gaps, 0.0)
    assert row["largest_gap"]["ms"] == pytest.approx(largest * 1e3)
    assert row["event_gap_ms"]["p100"] == pytest.approx(largest * 1e3)
    assert row["event_gap_ms"]["p50"] <= row["event_gap_ms"]["p99"]
    assert row["largest_gap"]["cause"]


def test_half_of_the_requests_follow_a_schema(server: ServerProcess, tmp_path: Path) -> None:
    options = ("--url", server.url, "--burst", "12", "--schemas", "0.5", "--shared-prefix", "40")
    lengths = ("--prompt-tokens", "8", "--output-tokens", "24", "--token-range", "3", "320")
    row = bench(tmp_path / "rows.jsonl", *options, *lengths)
    kinds = [seen["kind"] for seen in row["observations"]]
    assert set(kinds) == {"schema", "text"}
    assert row["failed"] == 0
    assert row["prompt_tokens"] == 12 * 48
    for seen in row["observations"]:
        assert sum(seen["tokens"]) == seen["usage"] <= 24
        assert seen["usage"] == 24 or seen["kind"] == "schema"


def test_rows_are_measured_while_a_long_prompt_is_computed(
    server: ServerProcess, tmp_path: Path
) -> None:
    options = ("--url", server.url, "--long", "150", "--rows", "3", "--row-prompt", "8")
    lengths = ("--row-tokens", "180", "--long-after", "0.05", "--token-range", "3", "320")
    row = bench(tmp_path / "rows.jsonl", *options, *lengths)
    *rows, long = row["observations"]
    assert [seen["kind"] for seen in (*rows, long)] == ["row"] * 3 + ["long"]
    assert long["usage"] == 16
    first = (long["events"][0] - long["sent"]) * 1e3
    assert row["first_token_ms"]["p50"] == pytest.approx(first)
    largest = [
        after - before
        for seen in rows
        for before, after in pairwise(seen["events"])
        if after > long["sent"] and before < long["events"][0]
    ]
    if largest:  # the rows had not ended before it
        assert row["event_gap_ms"]["p100"] == pytest.approx(max(largest) * 1e3)


def test_failures_are_counted(server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/serve.py", "--url", server.url, "--burst", "2"]
    command += ["--token-range", "5000", "5001", "--output", str(output)]
    done = forkserver.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 1
    row = json.loads(output.read_text())
    assert (row["finished"], row["failed"]) == (0, 2)
    [(error, count)] = row["errors"].items()
    assert count == 2
    assert error.startswith("status 400")


def test_a_run_that_is_stopped_keeps_what_it_saw(server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/serve.py", "--url", server.url, "--rates", "20,30"]
    command += ["--seconds", "300", "--prompt-tokens", "8", "--output-tokens", "uniform:1:40"]
    command += ["--token-range", "3", "320", "--output", str(output), "--observations"]
    before = server.metric(FINISHED, finish_reason="length")
    with forkserver.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True
    ) as process:
        while server.metric(FINISHED, finish_reason="length") < before + 5:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    [line] = output.read_text().splitlines()
    row = json.loads(line)
    assert row["load"] == f"20 requests/s, stopped after {row['stopped_s']:.0f} s"
    assert f"| {row['load']} |" in printed
    assert row["finished"] + row["cut"] + row["failed"] == row["requests"] < 20 * 300
    assert row["finished"] >= 5
    assert row["cut"] == sum(seen["cut"] and seen["error"] is None for seen in row["observations"])
    assert set(row["errors"]) <= {"stopped before its first token"}
    tokens = [sum(seen["tokens"]) for seen in row["observations"] if seen["error"] is None]
    assert row["output_tokens"] == sum(tokens) > 0
    assert row["miscounted"] == 0
    # The server goes on.
    server.wait_for("engine_core_requests_running", 0)


def test_causes_of_gaps() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.serve import Step, cause
    finally:
        sys.path.remove(str(ROOT))
    steps = [
        Step(0.0, 0.010, "decode", "graph", 16, 0),
        Step(0.010, 0.071, "mixed", "eager", 16, 2048),
        Step(0.071, 0.080, "decode", "graph", 17, 0),
        Step(0.500, 0.510, "decode", "graph", 1, 0),
    ]
    step = "mixed step (eager) of 16 rows and 2,048 tokens of prompts: 61.0 ms"
    assert cause((0.020, 0.070), steps) == step
    assert cause((0.0105, 0.0795), steps) == f"{step}, the longest of 2"
    assert cause((0.100, 0.500), steps) == "no step ran for 400.0 ms: idle or host"
    assert cause((0.0105, 0.0705), steps, [(0.02, 0.06)]) == "client read late: 40.0 ms"
    assert cause((0.0105, 0.0705), steps, [(0.02, 0.03)]) == step
    assert cause((0.005, 0.070), steps) == "unknown (the trace begins later)"
    assert cause((0.020, 0.070), None) == "unknown (no trace)"
