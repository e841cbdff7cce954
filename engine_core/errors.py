"""Every error that engine-core raises on purpose.

::

    EngineError
    ├── ConfigError (ValueError)          a value in a config, ours or the checkpoint's
    │   └── OptionError                   a setting of the engine does not fit this model or device
    ├── CheckpointError                   what is on disk cannot be used
    │   ├── CheckpointNotFoundError       no such folder, file or hub id
    │   ├── CorruptCheckpointError        truncated, malformed or lying file
    │   └── WeightsMismatchError          tensors missing, unexpected or of another shape
    ├── TokenizerError                    no tokenizer, or one that cannot be read
    ├── PluginError
    │   ├── PluginLoadError               a plugin cannot be imported or breaks the contract
    │   ├── ModelError                    a plugin's code fails, or gives what it must not
    │   ├── DuplicateArchitectureError    two plugins claim one architecture or config
    │   └── UnknownArchitectureError      no plugin claims it
    ├── CacheMemoryError                  the memory given holds too few KV blocks
    ├── RequestError (ValueError)         this one request is refused; the others go on
    │   └── QueueFullError                not now: too many wait already
    ├── RequestTimeoutError               a request was not done in the time it had
    └── EngineDeadError                   the engine cannot go on; says the root cause

A message names the culprit, what was offered and what to do about it. It is for people: programs
read ``code``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class ErrorCode(StrEnum):
    """Kinds of errors: those of the tree's classes, and where one class has several.

    The last group are the ways in which one sequence ends with the reason "error".
    """

    ENGINE = "engine-error"
    CONFIG = "config-invalid"
    OPTION = "option-invalid"
    QUANTIZATION = "quantization-unsupported"
    CHECKPOINT = "checkpoint-unsupported"
    CHECKPOINT_NOT_FOUND = "checkpoint-not-found"
    CHECKPOINT_CORRUPT = "checkpoint-corrupt"
    TOKENIZER = "tokenizer-unusable"
    PLUGIN = "plugin-broken"
    MODEL = "model-failed"
    ARCHITECTURE_AMBIGUOUS = "architecture-ambiguous"
    ARCHITECTURE_UNKNOWN = "architecture-unknown"
    CACHE_MEMORY = "memory-cache-too-small"
    REQUEST = "request-invalid"
    PROMPT_TOO_LONG = "prompt-too-long"
    CHAT_TEMPLATE = "chat-template-invalid"
    TASK = "task-unsupported"
    QUEUE_FULL = "queue-full"
    TIMEOUT = "timeout"
    ENGINE_DEAD = "engine-dead"

    NOT_FINITE = "logits-not-finite"
    NO_TOKEN = "no-token-allowed"
    LOGITS_PROCESSOR = "logits-processor-failed"
    GUIDED = "guided-failed"
    GRAMMAR_TOO_COMPLEX = "grammar-too-complex"
    GRAMMAR_WITHOUT_END = "grammar-without-end"


class EngineError(Exception):
    """Root of the tree above.

    Attributes:
        code: the kind of error; that of the class if none is given.
    """

    code: ErrorCode = ErrorCode.ENGINE

    def __init__(self, *args: object, code: ErrorCode | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


def shown(value: object, most: int = 200) -> str:
    """The first ``most`` characters of ``repr(value)``, which may fail: Python writes out no number
    of more than 4,300 digits, and nothing that contains itself too deeply."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}..."


class Fault(NamedTuple):
    """One value that a config refuses.

    Attributes:
        place: where it stands, with dots; empty if it is the whole.
        message: why it is refused.
        field: the field at fault; None if it is several.
    """

    place: str
    message: str
    field: str | None


class ConfigError(EngineError, ValueError):
    """A value in an engine config, sampling parameters or a checkpoint's config is wrong.

    Attributes:
        faults: each value that is refused, where a config model refuses them.
    """

    code = ErrorCode.CONFIG

    def __init__(
        self, *args: object, faults: tuple[Fault, ...] = (), code: ErrorCode | None = None
    ) -> None:
        super().__init__(*args, code=code)
        self.faults = faults

    def named(self, name: Callable[[str], str]) -> str:
        """The message with ``name(place)`` for each place; as it is where there are no faults."""
        if not self.faults:
            return str(self)
        told = ((name(fault.place) if fault.place else "", fault) for fault in self.faults)
        return "; ".join(f"{place}: {f.message}" if place else f.message for place, f in told)


class OptionError(ConfigError):
    """A setting of the engine is well-formed, but not for this model, its files or this device."""

    code = ErrorCode.OPTION


class CheckpointError(EngineError):
    """A checkpoint cannot be used."""

    code = ErrorCode.CHECKPOINT


class CheckpointNotFoundError(CheckpointError):
    """The folder, file or hub id does not exist or cannot be reached."""

    code = ErrorCode.CHECKPOINT_NOT_FOUND


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is truncated, malformed, or contradicts its own header."""

    code = ErrorCode.CHECKPOINT_CORRUPT


class WeightsMismatchError(CheckpointError):
    """The checkpoint's tensors are not those that the model asks for.

    Attributes:
        missing: names of parameters that no tensor filled; of one that was partly filled with the
            parts that it lacks.
        unexpected: names of tensors that no parameter took.
        wrong: messages, one for each tensor of a wrong shape, or for what another one fills.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.wrong = wrong


class TokenizerError(EngineError):
    """The tokenizer or its chat template is missing or cannot be read."""

    code = ErrorCode.TOKENIZER


class PluginError(EngineError):
    """Something about a model-family plugin."""

    code = ErrorCode.PLUGIN


class PluginLoadError(PluginError):
    """A plugin or module-map file cannot be imported or does not keep the contract."""


class ModelError(PluginError):
    """Code of a model or its input processor failed, or returned what the engine cannot take."""

    code = ErrorCode.MODEL


class DuplicateArchitectureError(PluginError):
    """Two plugins claim the same architecture, or two config builders the same config."""

    code = ErrorCode.ARCHITECTURE_AMBIGUOUS


class UnknownArchitectureError(PluginError):
    """No installed plugin or module map knows the architecture."""

    code = ErrorCode.ARCHITECTURE_UNKNOWN


class CacheMemoryError(EngineError):
    """The memory set aside for the KV cache is too small for what is asked."""

    code = ErrorCode.CACHE_MEMORY


class RequestError(EngineError, ValueError):
    """One request is refused; every other request goes on.

    Attributes:
        param: the parameter at fault, as the caller named it; None if no single one is.
    """

    code = ErrorCode.REQUEST

    def __init__(
        self, *args: object, param: str | None = None, code: ErrorCode | None = None
    ) -> None:
        super().__init__(*args, code=code)
        self.param = param


class QueueFullError(RequestError):
    """As many sequences wait as may; the request can be served later."""

    code = ErrorCode.QUEUE_FULL


class RequestTimeoutError(EngineError):
    """A request had a deadline and was ended at it."""

    code = ErrorCode.TIMEOUT


class RemoteTracebackError(Exception):
    """A traceback as text, of another process mostly: the cause of an :class:`EngineDeadError`."""

    def __str__(self) -> str:
        """The traceback on lines of its own."""
        return f"\n{self.args[0]}"


class EngineDeadError(EngineError):
    """The engine stopped on a failure; ``__cause__`` is the root cause."""

    code = ErrorCode.ENGINE_DEAD
