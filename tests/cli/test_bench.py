"""``engine-core bench``: what it reports, and the counts that must hold. No time is asserted."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest
from typer.testing import CliRunner

from engine_core.bench import BenchReport
from engine_core.bench.workloads import LONGEST, measure, random_ids
from engine_core.cli import app

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llama-gqa"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _bench(
    *arguments: str, model: Path = GOLDEN, code: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_core.cli", "bench", str(model)]
    done = forkserver.run(
        [*command, "--kv-cache-memory", "64MiB", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def _report(*arguments: str, model: Path = GOLDEN) -> dict[str, Any]:
    report = json.loads(_bench("--json", *arguments, model=model).stdout)
    for measured in report["measurements"]:
        _check_spreads(measured)
        _check_time_spent(measured["time_spent"])
    return report  # type: ignore[no-any-return]


def _check_spreads(measured: dict[str, Any]) -> None:
    figures = [value for value in measured.values() if isinstance(value, dict)]
    for name in ("ttft_ms", "inter_token_ms"):
        percentiles = measured[name]
        if percentiles is not None:
            figures += percentiles.values()
            assert percentiles["p50"]["median"] <= percentiles["p90"]["median"]
            assert percentiles["p90"]["median"] <= percentiles["p99"]["median"]
    spreads = [figure for figure in figures if "median" in figure]
    assert len(spreads) >= 7
    assert all(0 < item["min"] <= item["median"] <= item["max"] for item in spreads)


def _check_time_spent(spent: dict[str, Any]) -> None:
    parts = [spent[f"{part}_seconds"] for part in ("schedule", "submit", "wait", "apply")]
    assert sum(parts) + spent["outside_seconds"] == pytest.approx(spent["total_seconds"])
    assert min(*parts, spent["outside_seconds"]) > 0
    kinds = sum(spent[kind]["seconds"] for kind in ("prefill", "mixed", "decode"))
    assert kinds == pytest.approx(spent["submit_seconds"] + spent["wait_seconds"])


def _counts(measured: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Steps and tokens of each kind."""
    spent = measured["time_spent"]
    return {
        kind: (spent[kind]["steps"], spent[kind]["tokens"])
        for kind in ("prefill", "mixed", "decode")
    }


def test_latency_of_two_batch_sizes() -> None:
    sizes = ("--batch-size", "1", "--batch-size", "3")
    report = _report("--prompt-len", "20", "--output-len", "6", "--repeats", "2", *sizes)
    assert report["workload"] == "latency"
    assert report["repeats"] == 2
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["shared"] is None
    assert report["settings"]["skip_tokenizer_init"] is True
    assert report["settings"]["enable_prefix_caching"] is False
    assert {"plugins", "config", "weights", "cache"} <= report["startup"].keys()
    one, three = report["measurements"]
    assert (one["num_requests"], one["prompt_tokens"], one["output_tokens"]) == (1, 20, 6)
    assert (three["num_requests"], three["prompt_tokens"], three["output_tokens"]) == (3, 60, 18)
    # Each repeat: all prompts at once, whose logits choose the first token, then one step a token.
    assert _counts(one) == {"prefill": (2, 40), "mixed": (0, 0), "decode": (10, 10)}
    assert _counts(three) == {"prefill": (2, 120), "mixed": (0, 0), "decode": (10, 30)}
    rate = three["output_tokens_per_second"]["median"] * 78 / 18
    assert three["total_tokens_per_second"]["median"] == pytest.approx(rate)


def test_chunked_prefill_is_counted_by_step() -> None:
    limits = ("--max-num-batched-tokens", "8", "--max-num-seqs", "4")
    report = _report("--prompt-len", "20", "--output-len", "3", "--repeats", "1", *limits)
    (measured,) = report["measurements"]
    assert _counts(measured) == {"prefill": (3, 20), "mixed": (0, 0), "decode": (2, 2)}


def test_throughput_repeats_its_lengths() -> None:
    arguments = ["--workload", "throughput", "--num-requests", "9", "--repeats", "2"]
    arguments += ["--prompt-len", "5-40", "--output-len", "1-12", "--max-num-seqs", "4"]
    first, again, other = (
        _report(*arguments, "--seed", seed)["measurements"][0] for seed in ("5", "5", "6")
    )
    for measured in (first, other):
        assert measured["num_requests"] == 9
        assert 9 * 5 <= measured["prompt_tokens"] <= 9 * 40
        assert 9 * 1 <= measured["output_tokens"] <= 9 * 12
        assert measured["inter_token_ms"] is None
        # The last token of each request is never computed.
        computed = 2 * (measured["prompt_tokens"] + measured["output_tokens"] - 9)
        assert sum(tokens for _, tokens in _counts(measured).values()) == computed
        # Nine requests in four rows: some begin while others decode.
        assert _counts(measured)["mixed"][0] > 0
    lengths = ("prompt_tokens", "output_tokens")
    assert [first[name] for name in lengths] == [again[name] for name in lengths]
    assert [first[name] for name in lengths] != [other[name] for name in lengths]
    assert _counts(first) == _counts(again)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "config.json", tmp_path)
    arguments = ("--prompt-len", "4", "--output-len", "1", "--repeats", "1")
    report = _report("--load-format", "dummy", *arguments, model=tmp_path)
    (measured,) = report["measurements"]
    assert measured["inter_token_ms"] is None
    assert _counts(measured) == {"prefill": (1, 4), "mixed": (0, 0), "decode": (0, 0)}


@pytest.mark.slow
def test_shared_workloads() -> None:
    # One layer: the counts are of tokens and steps.
    overrides = {"max_position_embeddings": 4200, "num_hidden_layers": 1}
    longer = ("--hf-overrides", json.dumps(overrides), "--load-format", "dummy")
    arguments = ("--workload", "shared", "--batch-size", "1", "--num-requests", "0")
    report = _report(*arguments, *longer)
    assert report["measurements"] == []
    figures, spent = report["shared"]["figures"], report["shared"]["time_spent"]
    assert figures.keys() == {"tpot_ms_b1", "prefill_tok_s_b1", "ttft_ms_4k"}
    assert min(figures.values()) > 0
    _check_time_spent(spent)
    # Warm-up: 4 of 64 and 8 tokens. Then 1024 twice with 1 token and with 129, and 4096 thrice.
    assert spent["decode"] == {**spent["decode"], "steps": 7 + 2 * 128, "tokens": 4 * 7 + 2 * 128}
    assert spent["prefill"]["tokens"] == 4 * 64 + 4 * 1024 + 3 * 4096


def test_table_shows_figures_and_where_the_time_went() -> None:
    done = _bench("--prompt-len", "5", "--output-len", "3", "--repeats", "1", "--batch-size", "2")
    lines = [" ".join(re.findall(r"[^\s│┃]+", line)) for line in done.stdout.splitlines()]
    assert lines[0].startswith(f"{GOLDEN}: LlamaForCausalLM, float32 on cpu (")
    assert re.fullmatch(r"start-up [\d.]+ s \((\w+ [\d.]+, )+cache [\d.]+\)", lines[1])
    assert "latency: 2 requests, 10 prompt tokens, 6 generated" in lines
    assert "of 1 repeat median least most" in lines
    number = r"[\d.]+"
    for row in (
        rf"output tokens/s( {number}){{3}}",
        rf"between tokens, ms, p99( {number}){{3}}",
        rf"scheduling {number} {number}% {number}",
        rf"outside of steps {number} {number}% {number}",
        rf"prefill 1 10\.0 {number} {number}%",
        rf"decode 2 2\.0 {number} {number}%",
    ):
        assert any(re.fullmatch(row, line) for line in lines), row


def test_too_long_is_an_error() -> None:
    [line] = _bench("--prompt-len", "2000", "--output-len", "100", code=1).stderr.splitlines()
    assert "a prompt of 2000 tokens and 100 generated ones do not fit" in line
    assert "max_model_len of 2048" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--num-requests", "4"],
            "--num-requests is not for the latency workload; it is for throughput",
        ),
        (
            ["--workload", "throughput", "--batch-size", "4"],
            "--batch-size is not for the throughput",
        ),
        (["--workload", "shared", "--repeats", "4"], "--repeats is not for the shared workload"),
        (["--workload", "throughput", "--num-requests", "0"], "throughput needs at least one"),
        (["--prompt-len", "100-200"], "--prompt-len: a range is for the throughput workload"),
        (["--prompt-len", "many"], "--prompt-len: wants a number of tokens like 512"),
        (["--output-len", "0"], "--output-len: wants a number of tokens like 512"),
        (["--workload", "throughput", "--output-len", "9-3"], "--output-len: wants a number"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_exits_with_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "model", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_help_shows_the_defaults_of_this_command() -> None:
    output = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "100"}).output
    text = " ".join(output.split())
    assert re.search(r"Read no tokenizer: [^(]*\(default: on\)", text)
    assert re.search(r"Share the cached blocks [^(]*\(default: off\)", text)


def test_every_field_is_documented() -> None:
    schema = BenchReport.json_schema()
    models = [schema, *schema["$defs"].values()]
    names = {name for model in models for name in model["properties"]}
    assert len(names) > 40
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "bench.md").read_text("utf-8")))
    assert names <= documented


def test_shared_workloads_measure_by_differences() -> None:
    runs: list[tuple[list[int], list[int]]] = []

    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        runs.append(([len(prompt) for prompt in prompts], lengths))
        return 0.5 + 0.002 * max(lengths)

    figures = measure(run, 32000, batches=(1, 8), mix=5)
    assert figures["tpot_ms_b8"] == pytest.approx(2)
    assert figures["prefill_tok_s_b8"] == pytest.approx(8 * 1024 / 0.502)
    assert figures["ttft_ms_4k"] == pytest.approx(502)
    prompts, lengths = runs[-1]
    assert len(prompts) == len(lengths) == 5
    assert all(100 <= length <= 1024 for length in (*prompts, *lengths))
    assert figures["mix_out_tok_s"] == pytest.approx(sum(lengths) / figures["mix_s"])
    longest = max(p + n for prompts, lengths in runs for p, n in zip(prompts, lengths, strict=True))
    assert longest == LONGEST


@pytest.mark.parametrize(("vocab", "low", "high"), [(32000, 1000, 29000), (320, 80, 240)])
def test_random_ids_leave_out_both_ends(vocab: int, low: int, high: int) -> None:
    ids = random_ids(20_000, vocab, random.Random(0))
    assert low <= min(ids) < low + (high - low) // 100 + 5
    assert high - (high - low) // 100 - 5 < max(ids) < high
