"""``engine-core generate`` on real checkpoints, as a person runs it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
from serving import write_tiny_model

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llama-gqa"
SMOLLM2 = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
COMMAND = [sys.executable, "-m", "engine_core.cli", "generate"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
GREEDY = ["--temperature", "0", "--kv-cache-memory", "64MiB"]
TOKENS = [*GREEDY, "--skip-tokenizer-init", "--dtype", "float32", "--ignore-eos"]


def _generate(
    model: Path, *arguments: str, stdin: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = forkserver.run(
        [*COMMAND, str(model), *arguments],
        input=stdin,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def _golden(name: str) -> tuple[str, list[int]]:
    """A prompt of the reference as an argument, and the 16 tokens that the reference made of it."""
    expected = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
    prompts = {prompt["name"]: prompt for prompt in expected["prompts"]}
    prompt = prompts[name]
    return ",".join(map(str, prompt["input_ids"])), prompt["new_tokens"]


def test_one_prompt_is_streamed_with_statistics() -> None:
    ids, expected = _golden("short")
    done = _generate(GOLDEN, "--token-ids", ids, *TOKENS)
    assert list(map(int, done.stdout.split())) == expected
    assert done.stdout.endswith("\n\n")
    count = len(ids.split(","))
    statistics, startup = done.stderr.splitlines()
    assert re.fullmatch(
        rf"{count} prompt tokens, 16 generated, time to first token \d+\.\d+ s, [\d.]+ tokens/s",
        statistics,
    )
    assert re.fullmatch(r"start-up \d+\.\d\d s \(\w+ \d+\.\d\d(, \w+ \d+\.\d\d)+\)", startup)


def test_several_prompts_keep_their_order() -> None:
    short, short_tokens = _golden("short")
    medium, medium_tokens = _golden("medium")
    done = _generate(GOLDEN, "--token-ids", medium, "--token-ids", short, *TOKENS)
    first, second = done.stdout.strip().split("\n\n")
    assert first == f"[1] {' '.join(map(str, medium_tokens))}"
    assert second == f"[2] {' '.join(map(str, short_tokens))}"
    assert "32 generated" in done.stderr


def test_json_is_one_object_a_prompt() -> None:
    short, short_tokens = _golden("short")
    medium, medium_tokens = _golden("medium")
    arguments = ("--token-ids", short, "--token-ids", medium, "--json", "--logprobs", "2")
    lines = _generate(GOLDEN, *arguments, *TOKENS).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["outputs"][0]["token_ids"] for result in results] == [
        short_tokens,
        medium_tokens,
    ]
    [output] = results[0]["outputs"]
    assert output["finish_reason"] == "length"
    assert len(output["logprobs"]) == 16
    assert all(
        step[str(token)]["rank"] == 1
        for step, token in zip(output["logprobs"], short_tokens, strict=True)
    )
    assert 0 < results[0]["metrics"]["time_to_first_token"] <= results[0]["metrics"]["time"]


def test_several_completions_are_numbered() -> None:
    ids, _ = _golden("short")
    arguments = ("--token-ids", ids, "--skip-tokenizer-init", "--kv-cache-memory", "64MiB")
    done = _generate(GOLDEN, *arguments, "--n", "3", "--max-tokens", "8", "--ignore-eos")
    labels = [block.split()[0] for block in done.stdout.strip().split("\n\n")]
    assert labels == ["[1.1]", "[1.2]", "[1.3]"]


def test_seed_repeats_random_sampling() -> None:
    ids, _ = _golden("short")
    arguments = ("--token-ids", ids, "--skip-tokenizer-init", "--kv-cache-memory", "64MiB")
    runs = [_generate(GOLDEN, *arguments, "--seed", seed).stdout for seed in ("5", "5", "6")]
    assert runs[0] == runs[1] != runs[2]


def test_error_is_one_line() -> None:
    done = _generate(GOLDEN / "missing", "Hello", code=1)
    [line] = done.stderr.splitlines()
    assert line.startswith("engine-core: error: ")
    assert "missing" in line
    assert done.stdout == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_is_one_line(form: tuple[str, ...], unbuffered: str) -> None:
    ids, _ = _golden("short")
    with Path("/dev/full").open("wb") as full:
        done = forkserver.run(
            [*COMMAND, str(GOLDEN), "--token-ids", ids, "--token-ids", ids, *form, *TOKENS],
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "engine-core: error: standard output cannot be written: No space left on device"
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_empty_tokenizer_is_named() -> None:
    done = _generate(GOLDEN, "Hello", "--tokenizer", "", code=2)
    assert "--tokenizer: " in done.stderr
    assert "model" not in done.stderr


def test_refused_prompt_is_named() -> None:
    arguments = ("--token-ids", "1,2", "--token-ids", "1,99999", *TOKENS)
    done = _generate(GOLDEN, *arguments, code=1)
    assert "engine-core: error: prompt 1: " in done.stderr
    assert "99999" in done.stderr


@pytest.mark.parametrize("where", ["file", "stdin"])
def test_only_a_line_feed_ends_a_prompt(where: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    prompts = ["one\x0ctwo", "three\u2028four", "five\x85six", "\ufeffseven", "eight\rnine"]
    text = "\ufeff" + "\r\n".join(prompts) + "\n\n \n"
    file = tmp_path / "prompts.txt"
    file.write_bytes(text.encode())
    arguments = ["--json", "--max-tokens", "1", *GREEDY]
    done = forkserver.run(
        [*COMMAND, str(model), "--prompt-file", "-" if where == "stdin" else str(file), *arguments],
        input=file.read_bytes(),
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().removesuffix("\n").split("\n")
    assert [json.loads(line)["prompt"] for line in lines] == prompts


def test_standard_input_is_a_prompt_without_its_byte_order_mark(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    arguments = ("-", "--json", "--max-tokens", "1", *GREEDY)
    result = json.loads(_generate(model, *arguments, stdin="\ufeffone\r\n\ufefftwo").stdout)
    assert result["prompt"] == "one\n\ufefftwo"


def test_a_closed_standard_input_is_named() -> None:
    command = " ".join(map(shlex.quote, [*COMMAND, str(GOLDEN), "-"]))
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} <&-"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("PROMPT: standard input is closed")


def test_text_from_argument_file_and_stdin(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    prompt = "The capital of France is"
    file = tmp_path / "prompts.txt"
    file.write_text(f"{prompt}\n\nThe opposite of hot is\n", encoding="utf-8")
    limits = (*GREEDY, "--max-tokens", "4", "--ignore-eos")
    streamed = _generate(model, prompt, *limits).stdout
    assert streamed.removesuffix("\n\n")
    assert _generate(model, "-", *limits, stdin=prompt).stdout == streamed
    batch = _generate(model, "--prompt-file", str(file), "--json", *limits).stdout
    first, second = map(json.loads, batch.splitlines())
    assert first["prompt"] == prompt
    assert first["outputs"][0]["text"] == streamed.removesuffix("\n\n")
    assert second["prompt"] == "The opposite of hot is"


@pytest.mark.slow
def test_a_real_model_goes_on_with_a_text() -> None:
    arguments = ("The capital of France is", *GREEDY, "--max-tokens", "4")
    assert " Paris" in _generate(SMOLLM2, *arguments).stdout


@pytest.mark.slow
def test_chat_applies_the_template() -> None:
    question = "What is the capital of France?"
    arguments = ("--chat", question, "--system", "Be brief.", "--json", *GREEDY)
    [result] = map(json.loads, _generate(SMOLLM2, *arguments).stdout.splitlines())
    assert "Paris" in result["outputs"][0]["text"]
    # The question and the system message alone are 7 and 3 tokens, and each role is 4 at least.
    assert len(result["prompt_token_ids"]) > 7 + 3 + 2 * 4


@pytest.mark.slow
def test_interrupt_leaves_quietly() -> None:
    with forkserver.Popen(
        [*COMMAND, str(SMOLLM2), "Once", *GREEDY, "--max-tokens", "none", "--ignore-eos"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)  # it is streaming
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
