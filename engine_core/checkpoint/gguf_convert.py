"""From a GGUF file to an ordinary checkpoint folder in the disk cache."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_core.checkpoint.disk_cache import DiskCache, file_key
from engine_core.checkpoint.files import check_regular_file
from engine_core.checkpoint.gguf import GGUFAdapter, GGUFFile, GGUFTensor, read_architecture
from engine_core.checkpoint.safetensors_file import SafetensorsWriter
from engine_core.configs.dtypes import DTYPES
from engine_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    UnknownArchitectureError,
)

logger = logging.getLogger(__name__)

# Raised whenever the files written here change, so that old entries of the cache are left alone.
FORMAT_VERSION = 1
_MAX_THREADS = 8
_UNQUANTISED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def convert_gguf(
    path: Path,
    adapters: Mapping[str, type[GGUFAdapter]],
    dtype: str = "auto",
    cache: DiskCache | None = None,
) -> Path:
    """The folder that the GGUF file at ``path`` was converted to, now or earlier.

    It holds ``config.json``, ``generation_config.json``, ``model.safetensors`` and, if the file has
    a tokenizer, ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        path: the ``.gguf`` file.
        adapters: from ``general.architecture`` to the class that knows its tensors.
        dtype: element type of the weights; ``auto`` is that of the file's matrices if they are not
            quantised, else bfloat16.
        cache: where the folder is kept; the default cache if not given.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is damaged.
        CheckpointError: something in it cannot be translated, or the cache cannot be written.
        ConfigError: ``dtype`` is unknown.
        TokenizerError: its tokenizer is of an unknown kind.
        UnknownArchitectureError: there is no adapter for its architecture.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    check_regular_file(path)
    architecture = read_architecture(path)
    adapter = adapters.get(architecture)
    if adapter is None:
        raise UnknownArchitectureError(
            f"{path} has the GGUF architecture {architecture!r}, which no installed plugin "
            f"translates; those that can be are: {', '.join(sorted(adapters)) or 'none'}"
        )
    name = f"{adapter.__module__}.{adapter.__qualname__}"
    key = file_key(path, f"gguf-{FORMAT_VERSION}", name, str(adapter.version), dtype)

    def write(folder: Path) -> None:
        start = time.perf_counter()
        _write_folder(GGUFFile(path), adapter, dtype, folder)
        logger.info("converted %s in %.1f s", path, time.perf_counter() - start)

    return (cache or DiskCache()).get(key, write)


def _write_folder(
    gguf: GGUFFile, adapter_class: type[GGUFAdapter], dtype: str, folder: Path
) -> None:
    from engine_core.checkpoint.gguf_tokenizer import special_ids, write_tokenizer

    parts = gguf.metadata.get("split.count", 1)
    if parts != 1:
        raise CheckpointError(
            f"{gguf.path} is one of {parts} parts; join them with 'llama-gguf-split --merge'"
        )
    adapter = adapter_class(gguf)
    dtype = _matrix_dtype(gguf) if dtype == "auto" else dtype
    ids = special_ids(gguf)
    config = {**adapter.config(), **ids, "dtype": dtype}
    _write_json(folder / "config.json", config)
    if ids:
        _write_json(folder / "generation_config.json", ids)
    write_tokenizer(gguf, folder)
    _write_weights(gguf, adapter, dtype, folder / "model.safetensors")


def _matrix_dtype(gguf: GGUFFile) -> str:
    # Norms and biases are float32 in every GGUF file; the matrices say what it is.
    types = {tensor.type_name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    return _UNQUANTISED.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _write_weights(gguf: GGUFFile, adapter: GGUFAdapter, dtype: str, path: Path) -> None:
    import torch

    torch_dtype = getattr(torch, dtype)
    names: dict[str, GGUFTensor] = {}
    for tensor in gguf.tensors.values():
        name = adapter.tensor_name(tensor.name)
        if name in names:
            raise CorruptCheckpointError(
                f"{gguf.path}: {tensor.name!r} and {names[name].name!r} are both {name!r}"
            )
        if name is not None:
            names[name] = tensor

    headers = [(name, dtype, tensor.shape) for name, tensor in names.items()]
    with SafetensorsWriter(path, headers) as writer:

        def convert(item: tuple[str, GGUFTensor]) -> None:
            name, tensor = item
            array = adapter.transform(tensor.name, gguf.read(tensor.name))
            if array.shape != tensor.shape:
                raise CheckpointError(
                    f"{type(adapter).__name__}.transform made {array.shape} of {tensor.name!r}, "
                    f"which has the shape {tensor.shape}; a shape must stay as it is"
                )
            data = torch.from_numpy(array).to(torch_dtype).contiguous()
            writer.write(name, data.view(-1).view(torch.uint8).numpy().data)

        # The largest first, so that no thread is left alone with the embedding at the end.
        by_size = sorted(names.items(), key=lambda item: -item[1].nbytes)
        with ThreadPoolExecutor(min(_available_cpus(), _MAX_THREADS)) as pool:
            futures = [pool.submit(convert, item) for item in by_size]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
