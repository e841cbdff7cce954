"""Checks of the arguments that an engine is made from."""

from __future__ import annotations

import os
from typing import Any, Literal

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.errors import ConfigError, OptionError, shown

WarmUp = bool | Literal["beside"]
"""When an engine in a process of its own captures all likely steps and times some.

True: before it is ready. "beside": it is ready before that, and does so while it is idle. False: it
captures while it is idle, and times none.
"""


def check_model_and_config(model: Any, config: Any) -> tuple[str, EngineConfig]:
    """The model's name as text, and the engine's settings; the default ones if None.

    Raises:
        ConfigError: ``model`` is no path or text, or ``config`` no :class:`EngineConfig`.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise ConfigError(
            "model must be the path of a checkpoint folder or a GGUF file, or a hub id, as text; "
            f"got {shown(model)}"
        )
    if config is None:
        config = EngineConfig()
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"config must be an EngineConfig, got {shown(config)}; LLM takes single fields as "
            "keywords"
        )
    return name, config


def check_children(what: str) -> None:
    """Refuse ``what``, which starts processes, where this one may not; else do nothing.

    Raises:
        OptionError: this process is daemonic.
    """
    if not own_process.may_have_children():
        raise OptionError(
            f"{what} starts processes, which a daemonic process, such as a worker of "
            "multiprocessing.Pool, may not; make the engine in a Process with daemon=False, or in "
            "a worker of concurrent.futures.ProcessPoolExecutor"
        )


__all__ = ["WarmUp", "check_children", "check_model_and_config"]
