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
    │   ├── DuplicateArchitectureError    two plugins claim one architecture or config
    │   └── UnknownArchitectureError      no plugin claims it
    ├── CacheMemoryError                  the memory given holds too few KV blocks
    ├── RequestError (ValueError)         this one request is refused; the others go on
    │   └── QueueFullError                not now: too many wait already
    ├── RequestTimeoutError               a request was not done in the time it had
    └── EngineDeadError                   the engine cannot go on; says the root cause

A message names the culprit, what was offered and what to do about it.
"""


class EngineError(Exception):
    """Root of the tree above."""


class ConfigError(EngineError, ValueError):
    """A value in an engine config, sampling parameters or a checkpoint's config is wrong."""


class OptionError(ConfigError):
    """A setting of the engine is well-formed, but not for this model, its files or this device."""


class CheckpointError(EngineError):
    """A checkpoint cannot be used."""


class CheckpointNotFoundError(CheckpointError):
    """The folder, file or hub id does not exist or cannot be reached."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is truncated, malformed, or contradicts its own header."""


class WeightsMismatchError(CheckpointError):
    """The checkpoint's tensors are not those that the model asks for.

    Attributes:
        missing: names of parameters that no tensor filled.
        unexpected: names of tensors that no parameter took.
        wrong: messages, one for each tensor of a wrong shape.
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


class PluginError(EngineError):
    """Something about a model-family plugin."""


class PluginLoadError(PluginError):
    """A plugin or module-map file cannot be imported or does not keep the contract."""


class DuplicateArchitectureError(PluginError):
    """Two plugins claim the same architecture, or two config builders the same config."""


class UnknownArchitectureError(PluginError):
    """No installed plugin or module map knows the architecture."""


class CacheMemoryError(EngineError):
    """The memory set aside for the KV cache is too small for what is asked."""


class RequestError(EngineError, ValueError):
    """One request is refused; every other request goes on.

    Attributes:
        param: the parameter at fault, as the caller named it; None if no single one is.
    """

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*args)
        self.param = param


class QueueFullError(RequestError):
    """As many sequences wait as may; the request can be served later."""


class RequestTimeoutError(EngineError):
    """A request had a deadline and was ended at it."""


class EngineDeadError(EngineError):
    """The engine stopped on a failure; ``__cause__`` is the root cause."""
