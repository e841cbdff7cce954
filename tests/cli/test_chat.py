"""``engine-core chat`` as a person uses it: through a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import forkserver
import pytest
from serving import write_tiny_model

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "llama-gqa"
COMMAND = [sys.executable, "-m", "engine_core.cli", "chat"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
# In bfloat16 the first token of the answer is a tie, and an answer in French is as near.
PRECISE = ["--temperature", "0", "--dtype", "float32", "--quantization", "unpacked"]
GREEDY = [*PRECISE, "--max-tokens", "24", "--max-model-len", "1024"]
TINY = ["--temperature", "0", "--kv-cache-memory", "64MiB"]
FRANCE = "What is the capital of France?"


def _chat(
    model: Path, *lines: str, arguments: list[str] = GREEDY, code: int = 0
) -> tuple[list[str], str]:
    """The answers to ``lines``, and what was written to stderr."""
    done = forkserver.run(
        [*COMMAND, str(model), *arguments],
        input="".join(f"{line}\n" for line in lines),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.fixture(scope="module")
def session(smollm2_gguf: Path) -> tuple[list[str], str]:
    """One person's talk with a real model, whose start takes longer than its answers."""
    return _chat(
        smollm2_gguf,
        FRANCE,
        "And of Italy?",
        "/reset",
        FRANCE,
        "/reset",
        "/settings bad_words Paris 'a phrase'",
        FRANCE,
        "/settings",
        "/settings bad-words=none",
        "/settings stop = capital",
        '/settings logit_bias {"5": 1.5}',
        "/settings logit_bias none",
        "/reset",
        FRANCE,
        "/settings stop none",
        "/help",
        "",
        "/reset",
        "//etc",
        "/exit",
        FRANCE,
    )


def test_a_conversation_goes_on_until_it_is_reset(session: tuple[list[str], str]) -> None:
    answers, said = session
    france, italy, again = answers[:3]
    assert "Paris" in france
    assert "Rome" in italy
    assert again == france
    assert "the conversation begins anew" in said
    pattern = r"\[(\d+) tokens, [\d.]+ tokens/s, first after [\d.]+ s, (\d+) of 1024 in the context"
    used = [tuple(map(int, numbers)) for numbers in re.findall(pattern, said)]
    assert used[2] == used[0]
    assert used[1][1] > used[0][1] + used[1][0]


def test_settings_are_shown_and_changed(session: tuple[list[str], str]) -> None:
    answers, said = session
    assert said.index("settings: temperature 0.0, max_tokens 24\n") < said.index("tokens/s")
    assert "Paris" not in answers[3]
    assert "settings: temperature 0.0, bad_words Paris 'a phrase', max_tokens 24" in said
    assert "bad_words none" in said
    assert 'logit_bias {"5": 1.5}' in said
    assert answers[4] == "The "


def test_help_exit_and_a_message_that_begins_with_a_slash(session: tuple[list[str], str]) -> None:
    answers, said = session
    assert len(answers) >= 6
    assert "Paris" not in " ".join(answers[5:])
    assert "/settings NAME VALUE" in said
    assert said.count("in the context]") == 6


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_a_byte_order_mark_is_no_part_of_a_message(tiny_model: Path) -> None:
    answers, said = _chat(tiny_model, "\ufeff/reset", arguments=TINY)
    assert answers == []
    assert "the conversation begins anew" in said


def test_a_wrong_command_changes_nothing(tiny_model: Path) -> None:
    answers, said = _chat(
        tiny_model,
        "/temperature 3",
        "/settings n 3",
        "/settings top_p 5",
        "/settings top_k 1 2",
        "/settings logit_bias {",
        "/settings stop '",
        "/reset now",
        "/settings",
        arguments=[*TINY, "--max-tokens", "24"],
    )
    assert answers == []
    for message in (
        "there is no command /temperature; /help shows them",
        "there is no setting 'n'; there are temperature, ",
        "not changed: SamplingParams.top_p: Input should be less than or equal to 1, got 5",
        "not changed: top_k takes one value, got 2",
        "not changed: Expecting property name",
        "not changed: No closing quotation",
        "/reset takes nothing, got 'now'",
    ):
        assert message in said
    assert said.count("settings: temperature 0.0, max_tokens 24\n") == 2


def test_the_system_message_is_heeded_and_outlives_a_reset(smollm2_gguf: Path) -> None:
    pirate = "You are a pirate. Talk like one."
    arguments = [*GREEDY, "--max-tokens", "8", "--system", pirate]
    question = "Who are you?"
    anew = ("/reset", "/system", question, f"/system {pirate}", "/reset", question)
    answers, said = _chat(smollm2_gguf, question, *anew, arguments=arguments)
    given, without, later = answers
    assert f"system message: {pirate}" in said
    assert "Captain" in given
    assert later == given
    assert "Captain" not in without
    assert "system message: none" in said


def test_a_full_context_forgets_the_oldest_turns(tiny_model: Path) -> None:
    arguments = [*TINY, "--max-model-len", "128", "--max-tokens", "16"]
    lines = [f"What is {number} plus {number}?" for number in range(1, 7)]
    answers, said = _chat(tiny_model, *lines, "word " * 200, lines[0], arguments=arguments)
    assert "the context of 128 tokens is full: the oldest turn is forgotten" in said
    assert re.search(r"not answered: the message makes a prompt of \d+ tokens.*128; shorten", said)
    assert said.count("in the context]") == 7
    used = [int(number) for number in re.findall(r"(\d+) of 128 in the context", said)]
    assert max(used) <= 128
    # It keeps what fits instead of beginning anew.
    assert min(used[3:]) > used[0]
    assert len(answers) >= 7


def test_an_answer_that_is_cut_off_is_said_to_be(tiny_model: Path) -> None:
    tell = "Tell me"
    arguments = [*TINY, "--max-model-len", "64"]
    lines = (tell, "/reset", "/settings max_tokens 5", tell)
    _, said = _chat(tiny_model, *lines, arguments=arguments)
    assert "max_tokens none" in said
    assert "(cut off: max_tokens is reached)" in said
    assert "(cut off: the context is full)" in said


def test_a_model_that_cannot_chat_is_refused() -> None:
    _, said = _chat(GOLDEN, "Hello", arguments=["--skip-tokenizer-init"], code=1)
    assert said.splitlines()[-1].startswith("engine-core: error: ")
    assert "cannot chat" in said


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Read until ``pattern`` appears, and forget what came up to its end."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self._seen)):
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"no {pattern!r} in {self._seen!r}"
            try:
                self._seen += os.read(self._master, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"ended without {pattern!r}: {self._seen!r}")
        self._seen = self._seen[match.end() :]
        return match

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def leave(self) -> int:
        """Interrupt at the prompt; one just before readline waits is seen by the next."""
        for _ in range(30):
            self.interrupt()
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(2)
        pytest.fail("still there after 30 interrupts")


@contextmanager
def terminal(model: Path, state: Path, *arguments: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    with forkserver.Popen(
        [*COMMAND, str(model), *arguments],
        env={**ENVIRONMENT, "XDG_STATE_HOME": str(state)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as process:
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            process.kill()
            os.close(master)


def test_in_a_terminal(smollm2_gguf: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and then leaves; what was typed comes back with the arrow key."""
    endless = [*PRECISE, "--max-model-len", "2048", "--ignore-eos"]
    with terminal(smollm2_gguf, tmp_path, *endless) as chat:
        chat.wait_for("settings: temperature 0.0, max_tokens none, ignore_eos on")
        chat.wait_for(">>> ")
        chat.type("/settings max_tokens 5\n")
        chat.wait_for("max_tokens 5\r\n")
        chat.wait_for(">>> ")
        chat.type(f"{FRANCE}\n")
        chat.wait_for("The capital of France")
        chat.wait_for(r"\[5 tokens, [\d.]+ tokens/s")
        chat.wait_for("max_tokens is reached")
        chat.wait_for(">>> ")
        chat.type("/settings max_tokens none\n")
        chat.wait_for("max_tokens none\r\n")
        chat.wait_for(">>> ")
        chat.type("Tell me a long story.\n")
        chat.wait_for("story\\.\r\n")
        chat.wait_for(r"\w+ \w+ \w+")  # the answer has begun
        chat.interrupt()
        chat.wait_for(r"\(stopped\)")
        chat.wait_for(">>> ")
        chat.type("\x1b[A")
        chat.wait_for("Tell me a long story\\.")
        chat.type("\n")
        chat.wait_for(r"\w+ \w+ \w+")
        chat.interrupt()
        chat.wait_for(r"\(stopped\)")
        chat.wait_for(">>> ")
        assert chat.leave() == 130
    history = (tmp_path / "engine-core" / "chat_history").read_text()
    assert FRANCE in history
    with terminal(tiny_model, tmp_path, *TINY) as chat:
        chat.wait_for(">>> ")
        chat.type("\x1b[A")
        chat.wait_for("Tell me a long story")
        chat.type("\x15\x04")  # clear the line, end of input
        assert chat.process.wait(60) == 0
