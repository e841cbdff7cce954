"""Traces of steps and requests, which must agree with the run and within themselves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import forkserver
import httpx
import psutil
import pytest
from serving import ServerProcess, write_tiny_model

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llama-gqa"
PHASES = ("plan", "submit", "wait", "apply", "send")
# Times are rounded to nanoseconds, each by itself.
NEAR = 0.01

Event = dict[str, Any]


class Trace:
    """A trace file as a reader sees it."""

    def __init__(self, file: Path) -> None:
        content = json.loads(file.read_text())
        self.events: list[Event] = content["traceEvents"]
        self.other: dict[str, Any] = content["otherData"]
        self.steps = {
            event["args"]["step"]: event
            for event in self.events
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (1, 2)
        }
        self.host: dict[int, dict[str, Event]] = defaultdict(dict)
        for event in self.events:
            on_host = event["ph"] == "X" and (event["pid"], event["tid"]) == (1, 1)
            if on_host and event["name"] != "commands":
                self.host[event["args"]["step"]][event["name"]] = event
        self.tracks: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.get("cat") == "request":
                self.tracks[event["id"]].append(event)

    def requests(self) -> list[Event]:
        return [e for e in self.events if (e["ph"], e["name"]) == ("b", "request")]

    def check(self) -> None:
        """Check each step and request: order of phases, nesting, and where first tokens lie."""
        assert self.other["dropped_steps"] == 0
        assert min(event["ts"] for event in self.events if "ts" in event) == 0
        assert self.host.keys() == self.steps.keys()
        before = 0.0
        for step, device in self.steps.items():
            phases = [self.host[step][name] for name in PHASES]
            begins = [phase["ts"] for phase in phases]
            assert begins == sorted(begins)
            for phase, after in pairwise(phases):
                assert phase["ts"] + phase["dur"] <= after["ts"] + NEAR
            # On the device after it was planned and after the step before; done when it was seen.
            assert device["ts"] >= max(self.host[step]["submit"]["ts"], before) - NEAR
            before = device["ts"] + device["dur"]
            wait = self.host[step]["wait"]
            assert before == pytest.approx(wait["ts"] + wait["dur"], abs=NEAR)
            args = device["args"]
            assert args["prompt_tokens"] == sum(count for _, _, count in args["prompts"])
            assert args["padded_tokens"] >= args["decode_rows"] + args["prompt_tokens"]
        last_chunk = {
            sequence: (step, start + count)
            for step, device in self.steps.items()
            for sequence, start, count in device["args"]["prompts"]
        }
        for event in self.requests():
            args = event["args"]
            step, end = last_chunk[args["sequence"]]
            assert end == args["prompt_tokens"]
            assert args["first_token_step"] == step
            assert args["sequence"] in self.steps[args["admitted_step"]]["args"]["admitted"]
            self._check_track(event["id"], step)

    def _check_track(self, track: str, step: int) -> None:
        events = self.tracks[track]
        begins = {e["name"]: e["ts"] for e in events if e["ph"] == "b"}
        ends = {e["name"]: e["ts"] for e in events if e["ph"] == "e"}
        names = [name for name in begins if name != "request"]
        assert names in (
            ["arrive", "queued", "prefill", "decode"],
            ["tokenize", "to engine", "queued", "prefill", "decode"],
        )
        for name, following in pairwise(names):
            assert ends[name] == pytest.approx(begins[following], abs=NEAR)
        assert begins["request"] == begins[names[0]]
        assert ends["request"] >= ends["decode"] - NEAR
        # The first token is there when the host has seen the end of its step.
        device = self.steps[step]
        assert begins["decode"] == pytest.approx(device["ts"] + device["dur"], abs=NEAR)

    def arrows(self) -> dict[str, list[Event]]:
        arrows: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "stf":
                arrows[event["id"]].append(event)
        return arrows

    def slice_at(self, arrow: Event) -> str:
        """The slice that a point of an arrow lies in."""
        (name,) = {
            event["name"]
            for event in self.events
            if event["ph"] == "X"
            and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
        }
        return str(name)


def test_bench_traces_the_counted_runs(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "engine_core.cli", "bench", str(GOLDEN)]
    command += ["--kv-cache-memory", "64MiB", "--workload", "throughput", "--num-requests", "9"]
    command += ["--repeats", "2", "--prompt-len", "5-40", "--output-len", "1-12"]
    # Prompts in chunks, some of which are one token.
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--json"]
    done = forkserver.run(
        [*command, "--trace", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (measured,) = json.loads(done.stdout)["measurements"]
    trace = Trace(file)
    trace.check()
    for kind in ("prefill", "mixed", "decode"):
        steps = [step["args"] for step in trace.steps.values() if step["name"] == kind]
        spent = measured["time_spent"][kind]
        tokens = [step["prompt_tokens"] + step["decode_rows"] * step["repeat"] for step in steps]
        assert (sum(step["repeat"] for step in steps), sum(tokens)) == (
            spent["steps"],
            spent["tokens"],
        )
    prompts = sum(step["args"]["prompt_tokens"] for step in trace.steps.values())
    assert prompts == 2 * measured["prompt_tokens"]
    generated = sum(step["args"]["generated"] for step in trace.steps.values())
    assert generated == 2 * measured["output_tokens"]
    requests = [event["args"] for event in trace.requests()]
    assert len(requests) == 2 * 9
    assert sum(args["generated"] for args in requests) == generated
    assert {args["finish_reason"] for args in requests} == {"length"}
    # Small batches are recorded when they come for the second time.
    assert {step["args"]["way"] for step in trace.steps.values()} == {"eager", "recorded"}
    for id_, arrow in trace.arrows().items():
        assert [event["ph"] for event in arrow] == ["s", "t", "f"], id_


def test_server_traces_its_last_seconds(tmp_path: Path) -> None:
    model, file = write_tiny_model(tmp_path / "model"), tmp_path / "trace.json"
    options = ["--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "16MiB"]
    body = {"model": "model", "prompt": ["Hello " * 9, "fox"], "max_tokens": 6, "ignore_eos": True}
    with ServerProcess(model, *options, "--trace", str(file), "--trace-seconds", "600") as server:
        server.wait_ready()
        url = f"{server.url}/v1/completions"
        single = httpx.post(url, json=body, timeout=60).json()
        several = httpx.post(url, json={**body, "prompt": "Hello", "n": 2}, timeout=60).json()
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line[6:7] == "{"]
        server.terminate(signal.SIGTERM)
        assert server.wait() == 0, server.log
    trace = Trace(file)
    engine = [event for event in trace.requests() if "sequence" in event["args"]]
    assert len(engine) == 2 + 2 + 2
    generated = sum(step["args"]["generated"] for step in trace.steps.values())
    assert generated == 6 * len(engine)
    # Sequences of a request with several have tracks of their own; its outputs are on its own.
    whole = f"{several['id']}-0"
    assert {e["name"] for e in trace.tracks[whole]} == {"request", "tokens"}
    trace.tracks.pop(whole)
    trace.events = [event for event in trace.events if event.get("id") != whole]
    trace.check()
    streamed = chunks[0]["id"]
    assert {single["id"], streamed} == {
        track.rpartition("-")[0] for track in trace.tracks if "@" not in track
    }
    for index in range(2):
        outputs = [e for e in trace.tracks[f"{streamed}-{index}"] if e["name"] == "tokens"]
        assert sum(output["args"]["tokens"] for output in outputs) == 6
        assert all(output["args"]["write_us"] >= 0 for output in outputs)
        steps = [output["args"]["step"] for output in outputs]
        assert steps == sorted(set(steps))
        for output in outputs:
            wait = trace.host[output["args"]["step"]]["wait"]
            assert output["ts"] >= wait["ts"] + wait["dur"]
    updates = [e for e in trace.events if (e["ph"], e["name"]) == ("X", "updates")]
    assert sum(event["args"]["tokens"] for event in updates) == generated
    # Two requests of two prompts and one of one, and what takes the trace.
    commands = [e["args"]["commands"] for e in trace.events if e["name"] == "commands"]
    assert sum(commands) >= 5 + 1
    arrows = trace.arrows()
    for step, device in trace.steps.items():
        names = [trace.slice_at(event) for event in arrows[f"step {step}"]]
        assert names == ["submit", device["name"], "send", "updates"]
    queued = [arrow for name, arrow in arrows.items() if name.startswith("queue")]
    assert len(queued) == len(engine)
    for arrow in queued:
        points = sorted(arrow, key=lambda event: str(event["ph"]), reverse=True)
        assert [trace.slice_at(event) for event in points] == ["queue", "plan"]


@pytest.mark.slow
def test_several_processes_share_a_trace(tmp_path: Path) -> None:
    """One engine, and each process with what it answered; one that was killed is not there."""
    model, file = write_tiny_model(tmp_path / "model"), tmp_path / "trace.json"
    options = ["--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "16MiB"]
    options += ["--api-server-count", "2", "--trace", str(file), "--trace-seconds", "600"]
    body = {"model": "model", "prompt": "fox", "max_tokens": 6, "ignore_eos": True, "stream": True}

    with ServerProcess(model, *options) as server:
        server.wait_for_log(" ready ")

        def ask(count: int) -> None:
            for _ in range(count):
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
                assert answer.text.endswith("data: [DONE]\n\n"), answer.text

        ask(6)  # by either of them, as the system has it
        children = psutil.Process(server.process.pid).children()
        next(child for child in children if child.net_connections("tcp")).kill()
        server.wait_for_log("another process takes its place")
        ask(6)
        server.terminate(signal.SIGTERM)
        assert server.wait() == 0, server.log
    trace = Trace(file)
    names = [e["args"]["name"] for e in trace.events if e["name"] == "process_name"]
    assert names[0] == "engine"
    assert sorted(names[2:]) == ["server 0", "server 1"]
    assert sum(step["args"]["generated"] for step in trace.steps.values()) == 12 * 6
    updates = [e for e in trace.events if (e["ph"], e["name"]) == ("X", "updates")]
    seen = sum(event["args"]["tokens"] for event in updates)
    outputs = [e for track in trace.tracks.values() for e in track if e["name"] == "tokens"]
    assert sum(output["args"]["tokens"] for output in outputs) == seen
    assert 6 * 6 <= seen <= 12 * 6


def test_a_server_whose_engine_died_writes_its_own_part(tmp_path: Path) -> None:
    model, file = write_tiny_model(tmp_path / "model"), tmp_path / "trace.json"
    options = ["--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "16MiB"]
    body = {"model": "model", "prompt": "fox", "max_tokens": 6, "ignore_eos": True}
    with ServerProcess(model, *options, "--trace", str(file)) as server:
        server.wait_ready()
        done = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == 1, server.log
    trace = Trace(file)
    assert not trace.steps
    assert trace.tracks.keys() == {f"{done['id']}-0"}
    updates = [e["args"] for e in trace.events if (e["ph"], e["name"]) == ("X", "updates")]
    assert sum(each["tokens"] for each in updates) == 6


def test_a_trace_holds_no_more_than_the_seconds_asked_for(tmp_path: Path) -> None:
    from engine_core import EngineConfig, SamplingParams
    from engine_core.engine import Engine
    from engine_core.engine.trace import EngineTrace, write_trace

    engine = Engine(str(GOLDEN), EngineConfig(skip_tokenizer_init=True, kv_cache_memory=2**24))
    trace = engine.core.trace = EngineTrace()
    for name in ("first", "second"):
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        engine.add_request([7, 8, 9], params, request_id=name)
        while engine.has_unfinished:
            engine.step()
    engine.add_request([7, 8], SamplingParams(), request_id="third")
    engine.abort("third")
    engine.close()
    halves = list(trace.steps)[:5], list(trace.steps)[5:]
    assert halves[1][0].prompts[0][0] == "second"
    file = tmp_path / "trace.json"
    seconds = (
        halves[1][-1].sent - halves[1][0].begun + halves[1][-1].sent - halves[0][-1].sent
    ) / 2
    write_trace(file, trace, seconds=seconds)
    found = Trace(file)
    assert list(found.steps) == [record.plan_id for record in halves[1]]
    assert [e["args"]["request"] for e in found.requests()] == ["second", "third"]
    third = found.requests()[-1]["args"]
    assert (third["finish_reason"], third["admitted_step"]) == ("abort", None)
    write_trace(file, trace)
    assert len(Trace(file).steps) == 10


@pytest.mark.parametrize("command", ["bench", "serve"])
def test_a_file_that_cannot_be_written_is_found_first(command: str, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "trace.json"
    done = forkserver.run(
        [sys.executable, "-m", "engine_core.cli", command, str(GOLDEN), "--trace", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"trace: {file} cannot be written: " in line
    assert line.endswith("; give another file")
