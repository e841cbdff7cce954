"""A server process with a tiny model, for the tests that go through HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import forkserver
import httpx
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Each client would read the certificates of all authorities anew: 25 ms of a processor, and tests
# that wait for a figure ask for it many times a second.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)
# Where a test gives none: five seconds are not much for a machine that has other work.
for _name in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _name, 60.0)

GOLDEN = Path(__file__).parent / "golden" / "llama-gqa"
COMPLETION = {"model": "tiny", "ignore_eos": True, "temperature": 0}
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
_TEXT = """The quick brown fox jumps over the lazy dog. What is an inference engine? It takes a
model and some text, and says what comes next, one token after the other, as fast as it can."""


def write_tiny_model(folder: Path) -> Path:
    """A random model of 320 tokens, with a byte-level tokenizer and a chat template.

    Its weights are those of a golden fixture; a step takes about a millisecond.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / "model.safetensors", folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["vocab_size"],
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                # Without it transformers is asked, whose import takes seconds.
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return folder


def write_certificate(folder: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate that signs itself, for a name or by default this machine, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", f"subjectAltName={name}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class ServerProcess:
    """``engine-core serve`` as a process of its own.

    Attributes:
        verify: what its certificate is checked with, if it has one.
        url: where it listens, without a slash at the end.
        process: the process.
    """

    def __init__(self, model: Path, *options: str, environment: dict[str, str] | None = None):
        self.verify: ssl.SSLContext | bool = True
        self.process = forkserver.Popen(
            [sys.executable, "-m", "engine_core.cli", "serve", str(model), "--port", "0", *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._listening = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(180), self.log
        assert self.url, self.log

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self._lines.append(line)
                found = re.search(r"listening on (https?://[^\s\"]+)", line)
                if found:
                    self.url = found[1]
                    self._listening.set()
        self._listening.set()

    @property
    def log(self) -> str:
        """The log written so far."""
        return "".join(self._lines[-200:])

    @property
    def engine_pid(self) -> int:
        """The process that holds the model: the largest of the server's children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return max(children, key=lambda child: child.memory_info().rss).pid

    def wait_ready(self, seconds: float = 180) -> Self:
        """Wait until it takes requests."""
        deadline = time.monotonic() + seconds
        while (
            httpx.get(f"{self.url}/health/ready", timeout=60, verify=self.verify).status_code != 200
        ):
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        return self

    def metric(self, name: str, **labels: str) -> float:
        """A figure of ``/metrics``; 0 if it is not there."""
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and (found[1] or "") == wanted:
                return float(found[2])
        return 0.0

    def wait_for(self, name: str, value: float, seconds: float = 180, **labels: str) -> None:
        """Wait until a figure of ``/metrics`` has a value."""
        deadline = time.monotonic() + seconds
        while (now := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            time.sleep(0.02)

    def wait_for_log(self, text: str, seconds: float = 180) -> None:
        """Wait until it has written a text, which may come later than the answer it is about."""
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline, f"no {text!r} in {self.log}"
            time.sleep(0.02)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 180) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)


class Stream(threading.Thread):
    """A streamed completion on a connection of its own.

    Attributes:
        port: the connection's on this side, once the answer has begun.
        text: what has come.
        pieces: in how many events.
        error: the code of an error that ended it.
        complete: whether all of it has come.
    """

    def __init__(self, url: str, key: str | None = None, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(timeout=60, headers=headers)
        self._body = {**COMPLETION, "stream": True, **body}
        self._begun = threading.Event()
        self.left = threading.Event()
        self.port = self.pieces = 0
        self.text = self.error = ""
        self.complete = False
        self.start()
        assert self._begun.wait(60), "no answer"

    def run(self) -> None:
        url = f"{self._url}/v1/completions"
        with self._client.stream("POST", url, json=self._body) as response:
            network = response.extensions["network_stream"]
            self.port = network.get_extra_info("client_addr")[1]
            self._begun.set()
            try:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.complete = not self.error
                    elif line:
                        event = json.loads(line.removeprefix("data: "))
                        self.error = self.error or event.get("error", {}).get("code", "")
                        self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                        self.pieces += 1
                    if self.left.is_set():
                        return
            except httpx.TransportError:  # its server's process was killed
                return

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, and close the connection, which can be looked for until then."""
        super().join(timeout)
        self._client.close()


def leave_unharmed(streams: Sequence[Stream]) -> None:
    """Leave streams of one prompt, once each has gone on for a while and all say the same."""
    deadline = time.monotonic() + 60
    for stream, count in [(stream, stream.pieces) for stream in streams]:
        while stream.pieces < count + 20:
            assert time.monotonic() < deadline, f"no more after {stream.text!r} {stream.error}"
            time.sleep(0.02)
    for stream in streams:
        stream.left.set()
        stream.join(60)
        assert not stream.error
    shortest = min((stream.text for stream in streams), key=len)
    assert all(stream.text.startswith(shortest) for stream in streams)
