"""Resolution of a model's name to a folder or file on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from engine_core.errors import CheckpointNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_TIMEOUT_SECONDS = 10
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*_Dense/pytorch_model.bin"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The folder, ``.gguf`` or ``.safetensors`` file that ``model`` stands for.

    An existing folder or such a file is taken as it is. Anything else that has the form of a hub
    id (``name`` or ``owner/name``) is downloaded through ``huggingface_hub``, into its cache and by
    its rules: ``HF_HOME`` says where the cache is, and with ``HF_HUB_OFFLINE=1`` only the cache is
    asked. Of a repository come the configs, the tokenizer, and the safetensors files, or the
    ``.bin`` files if it has no safetensors.

    Args:
        model: folder, ``.gguf`` or ``.safetensors`` file, or hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointNotFoundError: there is nothing of that name; says where it was looked for.
    """
    if not model:
        raise CheckpointNotFoundError("the model is an empty string; give a folder or a hub id")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        if path.is_file():
            if path.suffix.lower() in (".gguf", ".safetensors"):
                return path
            raise CheckpointNotFoundError(
                f"{model!r} is a file; give the folder it lies in, a .gguf file, or a .safetensors "
                "file that 'engine-core export' wrote"
            )
    except OSError as error:
        raise CheckpointNotFoundError(f"{model!r} cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:
        raise CheckpointNotFoundError(f"{model!r} is no path: {error}") from error
    if not _is_hub_id(model):
        raise CheckpointNotFoundError(
            f"{model!r} does not exist, and it is no hub id (name or owner/name), so no hub was "
            f"asked; the full path is {path.absolute()}"
        )
    return _download(model, revision)


def is_local(model: str) -> bool:
    """Whether a folder or file of this machine has the name ``model``."""
    try:
        return Path(model).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # what is no path
        return False


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
    unreachable = "HF_HUB_OFFLINE keeps from asking the hub"
    advice = "unset it"

    def get(weights: str, *, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*_SMALL_FILES, weights],
                local_files_only=local_files_only,
            )
        )

    if not constants.HF_HUB_OFFLINE:
        try:
            info = HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_SECONDS)
            files = [sibling.rfilename for sibling in info.siblings or ()]
            safetensors = any(file.endswith(".safetensors") for file in files)
            return get("*.safetensors" if safetensors else "*.bin", local_files_only=False)
        except HfHubHTTPError as error:
            raise CheckpointNotFoundError(f"{tried}, and the hub refuses: {error}") from error
        except Exception as error:  # Which one depends on the HTTP library of the day.
            unreachable = f"the hub cannot be reached: {error}"
            advice = "try again with a connection"
    try:
        folder = get("*.safetensors", local_files_only=True)
        if any(folder.rglob("*.safetensors")):
            return folder
        # Without the hub's list of files, only now is it known which kind of weights there is.
        return get("*.bin", local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{tried}, nor whole in the hub's cache ({constants.HF_HUB_CACHE}), and {unreachable}; "
            f"{advice}, or give a folder or a .gguf file"
        ) from error
