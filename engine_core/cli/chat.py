"""``engine-core chat``: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.command import OptionGroup, command, flag, parsed, repeats
from engine_core.cli.media import KINDS, FilePart, check_takes, content, named, typed_path
from engine_core.cli.remote import Answer, RemoteModel
from engine_core.configs import EngineConfig, SamplingParams
from engine_core.errors import ConfigError, EngineDeadError, EngineError, RequestError

if TYPE_CHECKING:
    from engine_core import LLM

ENGINE_OPTIONS = OptionGroup(EngineConfig)
# Fields that make no sense for a single streamed answer; --seed is the engine's.
_NOT_FOR_CHAT = ("n", "logprobs", "prompt_logprobs", "logits_processors", "guided")
SAMPLING_OPTIONS = OptionGroup(SamplingParams, skip=("seed", *_NOT_FOR_CHAT))
_SETTINGS = [name for name in SamplingParams.model_fields if name not in _NOT_FOR_CHAT]

_PROMPT = ">>> "
_HISTORY_LENGTH = 1000

_HELP = """\
/image FILE            show a picture with the next message, before its text; so does /video FILE,
                       and /audio FILE lets it hear a sound. Without FILE it shows none of them
/system TEXT           set the system message; without TEXT there is none
/reset                 forget the conversation, but not the system message
/settings              show how tokens are chosen
/settings NAME VALUE   change it; several values for a list, none for none
/help                  show this
/exit                  leave, as does the end of the input
Ctrl-C stops an answer, and leaves when there is none or it is pressed again.
A message that begins with / is written with two."""


def _say(text: str) -> None:
    """Whatever is not the model's goes to stderr."""
    typer.echo(text, err=True)


@dataclass(slots=True)
class _Conversation:
    """Pairs of a message and its answer; the last answer may still be missing."""

    system: str | None
    turns: list[tuple[Any, str]] = field(default_factory=list)

    def messages(self, question: Any) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = (
            [] if not self.system else [{"role": "system", "content": self.system}]
        )
        for user, assistant in self.turns:
            said.append({"role": "user", "content": user})
            said.append({"role": "assistant", "content": assistant})
        return [*said, {"role": "user", "content": question}]


class _Stop:
    """While it is entered, a first Ctrl-C sets :attr:`wanted` and a second one interrupts.

    The first is looked at after each token, so a long prompt is not left before its end.
    """

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> _Stop:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not an exception at once: the engine would be left in the middle of a step.
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


class _LocalModel:
    """A model of this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.engine.model_config.architecture
        self.max_len: int | None = llm.engine.max_model_len
        media = llm.engine.frontend.media
        self.media_kinds: tuple[str, ...] | None = media.kinds
        self.media_kinds_off = media.kinds_off

    def count(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Tokens of the prompt that ``messages`` make."""
        return len(self._llm.engine.frontend.tokenize(self._llm.render_chat(messages)).token_ids)

    def stream(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Generator[Answer, None, None]:
        """Answer ``messages``; yields the whole answer so far after each step."""
        with contextlib.closing(self._llm.stream_chat(messages, sampling)) as outputs:
            for output in outputs:
                made = output.outputs[0]
                yield Answer(made.text, len(made.token_ids), made.finish_reason, made.error)


class _Chat:
    """The loop's state: the model, the conversation and the settings.

    Args:
        model: answers.
        sampling: how.
        system: the system message, or None.
        given: the settings that the user gave. A server gets no others, so that its own
            recommendations apply.
    """

    def __init__(
        self,
        model: _LocalModel | RemoteModel,
        sampling: SamplingParams,
        system: str | None,
        given: Iterable[str] = (),
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._given = set(given)
        self._conversation = _Conversation(system)
        self._files: list[FilePart] = []  # of the next message
        self._max_len = model.max_len
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/settings": self._settings,
            "/help": lambda _: _say(_HELP),
            **{f"/{kind}": partial(self._show, kind) for kind in KINDS},
        }

    def run(self, lines: Iterator[str]) -> None:
        """Answer and obey ``lines`` to their end or /exit."""
        for line in lines:
            text = line.strip()
            name, _, rest = text.partition(" ")
            if name == "/exit":
                return
            if text.startswith("//"):
                self._answer(text[1:])
            elif name in self._commands:
                self._commands[name](rest.strip())
            elif name.startswith("/"):
                _say(f"there is no command {name}; /help shows them")
            elif text:
                self._answer(text)

    def show_settings(self) -> None:
        """Everything that differs from the defaults, and temperature and max_tokens."""
        remote = isinstance(self._model, RemoteModel)
        shown = self._given if remote else {"temperature", "max_tokens"}
        parts = []
        for name in _SETTINGS:
            value = getattr(self._sampling, name)
            if name in shown or (not remote and value != getattr(_DEFAULTS, name)):
                parts.append(f"{name} {_written(value)}")
        if remote and not parts:
            parts.append("the server's own")
        system = self._conversation.system
        _say(f"settings: {', '.join(parts)}")
        _say(f"system message: {system or 'that of the chat template, if it has one'}")

    def _show(self, kind: str, text: str) -> None:
        """Put a file before the next message."""
        if not text:
            self._files = [file for file in self._files if file.kind != kind]
            _say(f"the next message has no {kind}")
            return
        try:
            file = FilePart(kind, typed_path(text))
            kinds = self._model.media_kinds
            given = KINDS if kinds is None else kinds
            check_takes([file], given, self._model.name, self._model.media_kinds_off)
        except RequestError as error:
            _say(str(error))
            return
        self._files.append(file)
        _say(f"the next message has {', '.join(str(each.path) for each in self._files)}")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        _say(f"system message: {text or 'none'}")

    def _reset(self, rest: str) -> None:
        if rest:
            _say(f"/reset takes nothing, got {rest!r}")
            return
        self._conversation.turns.clear()
        self._files.clear()
        _say("the conversation begins anew")

    def _settings(self, rest: str) -> None:
        if not rest:
            self.show_settings()
            return
        # "name=value" is what many write.
        given, *value = re.split(r"\s*=\s*|\s+", rest, maxsplit=1)
        name = given.lstrip("-").replace("-", "_")
        if name not in _SETTINGS:
            _say(f"there is no setting {given!r}; there are {', '.join(_SETTINGS)}")
            return
        try:
            changed = self._sampling.replace(**{name: _parsed(name, *value)})
        except (ConfigError, ValueError) as error:
            _say(f"not changed: {error}")
            return
        self._sampling = changed
        self._given.add(name)
        _say(f"{name} {_written(getattr(changed, name))}")

    def _answer(self, text: str) -> None:
        """Stream the answer to a message, and remember both."""
        question = content(text, self._files)
        try:
            prompt_len = self._make_room(question)
            answers = self._stream(self._conversation.messages(question))
            start = time.monotonic()
            with _Stop() as stop, contextlib.closing(answers):
                answer, first = _print_stream(answers, stop)
        except EngineDeadError:
            raise
        except EngineError as error:
            if isinstance(error, RequestError):
                error = named(error, self._conversation.messages(question))
            _say(f"not answered: {error}")
            if self._files:
                kinds = " and ".join(f"/{kind}" for kind in {file.kind: 0 for file in self._files})
                _say(f"(the next message still has its files; {kinds} alone takes them out)")
            return
        end = time.monotonic()
        if answer is None or first is None:
            _say("(stopped before the answer began)")
            return
        if answer.finish_reason == "error":
            _say(f"not answered: {answer.error}")
            return
        self._conversation.turns.append((question, answer.text))
        self._files = []
        count = answer.num_tokens
        speed = f"{(count - 1) / (end - first):.1f} tokens/s, " if count > 1 else ""
        used = ""
        if prompt_len is not None and self._max_len is not None:
            used = f", {prompt_len + count} of {self._max_len} in the context"
        _say(f"[{count} tokens, {speed}first after {first - start:.2f} s{used}]")
        if answer.finish_reason is None:
            _say("(stopped)")
        elif answer.finish_reason == "length":
            full = (
                prompt_len is not None
                and self._max_len is not None
                and prompt_len + count >= self._max_len
            )
            _say(f"(cut off: {'the context is full' if full else 'max_tokens is reached'})")

    def _stream(self, messages: list[dict[str, Any]]) -> Generator[Answer, None, None]:
        if isinstance(self._model, _LocalModel):
            return self._model.stream(messages, self._sampling)
        options = self._sampling.model_dump(mode="json", include=self._given)
        return self._model.stream(messages, options)

    def _make_room(self, question: Any) -> int | None:
        """Drop the oldest turns until the answer has room; the prompt's length in tokens.

        Room is max_tokens, or a quarter of the context if that is less. Where a server does not
        tell how long a prompt is, none is dropped.
        """
        turns = self._conversation.turns
        kept = list(turns)
        limit = self._max_len
        room = 0 if limit is None else limit // 4
        if self._sampling.max_tokens is not None:
            room = min(room, self._sampling.max_tokens)
        while True:
            length = self._model.count(self._conversation.messages(question))
            if limit is None or length is None or length + room <= limit or not turns:
                break
            del turns[0]
        if limit is not None and length is not None and length >= limit:
            turns[:] = kept
            raise RequestError(
                f"the message makes a prompt of {length} tokens, and the context holds "
                f"{limit}; shorten it"
            )
        dropped = len(kept) - len(turns)
        if dropped:
            which = "oldest turn is" if dropped == 1 else f"oldest {dropped} turns are"
            _say(f"(the context of {limit} tokens is full: the {which} forgotten)")
        return length


_DEFAULTS = SamplingParams()


def _print_stream(answers: Iterator[Answer], stop: _Stop) -> tuple[Answer | None, float | None]:
    """Print text as it comes; the last answer, and when the first token came."""
    written = 0
    answer = first = None
    for answer in answers:
        if first is None and answer.num_tokens:
            first = time.monotonic()
        print(answer.text[written:], end="", flush=True)
        written = len(answer.text)
        if stop.wanted:
            break
    print(flush=True)
    return answer, first


def _written(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(item)) for item in value)
    return str(value)


def _parsed(name: str, text: str = "") -> Any:
    """Parse the text after a setting's name; the config model checks the value."""
    if text == "none":
        return None
    if name == "logit_bias":
        return json.loads(text)
    values = shlex.split(text)
    field = SamplingParams.model_fields[name]
    if repeats(field) and values:
        return parsed(field, values)
    if len(values) != 1:
        raise ValueError(f"{name} takes one value, got {len(values)}")
    return parsed(field, values[0])


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "engine-core" / "chat_history"


@contextlib.contextmanager
def _typed_lines() -> Iterator[Iterator[str]]:
    """Lines of standard input, with a prompt, line editing and a history if it is a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Of a file that an editor wrote, perhaps with a byte order mark.
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
        yield iter(sys.stdin.readline, "")
        return
    try:
        import readline
    except ImportError:  # not on every platform
        yield _read_prompted()
        return
    file = _history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LENGTH)
    try:
        yield _read_prompted()
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)


def _read_prompted() -> Iterator[str]:
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return


@command(SAMPLING_OPTIONS, ENGINE_OPTIONS)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, .gguf file or hub id; with --url, a model's name there.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Talk to a running server, like http://localhost:8000, instead."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="ENGINE_CORE_API_KEY", help="The server's key."),
    ] = None,
    **options: Any,
) -> None:
    """Talk with a model. Each line is a message; /help shows the commands.

    Answers go to stdout, everything else to stderr. When the context is full, the oldest turns are
    forgotten. A sampling option that is not given comes from the checkpoint's
    generation_config.json, or else is the default shown; but max_tokens is none. With --url it is
    the server's.
    """
    config = ENGINE_OPTIONS.build(options)
    chosen = SAMPLING_OPTIONS.build(options)  # a wrong value is found before the model is loaded
    given = SAMPLING_OPTIONS.given(options)
    if url is not None:
        # Its seed is that of the requests, as offline.
        of_engine = [flag(name) for name in ENGINE_OPTIONS.given(options) if name != "seed"]
        if of_engine:
            raise typer.BadParameter(
                f"{', '.join(of_engine)}: set when the server is started; leave out with --url"
            )
        if "seed" in ENGINE_OPTIONS.given(options):
            chosen, given = chosen.replace(seed=config.seed), {**given, "seed": config.seed}
        remote = RemoteModel(url, model, api_key)
        _talk(_Chat(remote, chosen, system, given), f"{remote.name} at {url}", remote.max_len)
        return
    if model is None:
        raise typer.BadParameter("give a MODEL, or the --url of a server")

    from engine_core import LLM

    with LLM(model, config) as llm:
        if "max_tokens" not in llm.default_sampling_params().model_fields_set:
            given = {"max_tokens": None, **given}
        sampling = llm.default_sampling_params(**given)
        llm.engine.frontend.check_task("generate")
        llm.render_chat([{"role": "user", "content": "Hello"}])  # refuses what cannot chat
        local = _LocalModel(llm)
        _talk(_Chat(local, sampling, system), model, local.max_len)


def _talk(session: _Chat, name: str, max_len: int | None) -> None:
    context = "" if max_len is None else f"{max_len} tokens of context; "
    _say(f"{name}, {context}/help shows the commands")
    session.show_settings()
    with _typed_lines() as lines:
        session.run(lines)
