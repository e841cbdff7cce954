"""From what a user calls a model to a folder or file on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from engine_core.errors import CheckpointNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The folder or ``.gguf`` file that ``model`` stands for.

    An existing folder or ``.gguf`` file is taken as it is. Anything else that has the form of a hub
    id (``name`` or ``owner/name``) is downloaded through ``huggingface_hub``, into its cache and by
    its rules: ``HF_HOME`` says where the cache is, and with ``HF_HUB_OFFLINE=1`` only the cache is
    asked. Of a repository come the configs, the tokenizer, and the safetensors files, or the
    ``.bin`` files if it has no safetensors.

    Args:
        model: folder, ``.gguf`` file or hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointNotFoundError: there is nothing of that name; says where it was looked for.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return path
        if path.is_file():
            if path.suffix.lower() == ".gguf":
                return path
            raise CheckpointNotFoundError(
                f"{model!r} is a file; give the folder it lies in, or a .gguf file"
            )
    except OSError as error:
        raise CheckpointNotFoundError(f"{model!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointNotFoundError(f"{model!r} is no path: {error}") from error
    if not _is_hub_id(model):
        raise CheckpointNotFoundError(
            f"{model!r} does not exist, and it is no hub id (name or owner/name), so no hub was "
            f"asked; the full path is {path.absolute()}"
        )
    return _download(model, revision)


def _is_hub_id(model: str) -> bool:
    return (
        _HUB_ID.fullmatch(model) is not None
        and len(model) <= 96
        and not model.lower().endswith((".gguf", ".safetensors", ".bin", ".json", ".git"))
        and "--" not in model
        and ".." not in model
    )


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = f"{model}@{revision}" if revision else model
    tried = f"{name!r} is no folder here ({Path(model).absolute()})"
    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(model, revision=revision, local_files_only=True))
        files = HfApi().list_repo_files(model, revision=revision)
        weights = "*.safetensors" if _has(files, ".safetensors") else "*.bin"
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=[*_SMALL_FILES, weights])
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{tried}, nor in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE keeps "
            "from asking the hub"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointNotFoundError(f"{tried}, and the hub does not give it: {error}") from error
    except OSError as error:
        # No network: what was downloaded once is good enough.
        try:
            return Path(snapshot_download(model, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise CheckpointNotFoundError(
                f"{tried}, nor in the hub's cache ({constants.HF_HUB_CACHE}), and the hub cannot "
                f"be reached: {error}"
            ) from error


def _has(files: list[str], suffix: str) -> bool:
    return any(file.endswith(suffix) for file in files)
