"""An open checkpoint: its config, its tensors' headers, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine_core.checkpoint.bin_file import BinFile
from engine_core.checkpoint.files import (
    TensorHeader,
    WeightFile,
    is_there,
    read_index,
    read_json_object,
)
from engine_core.checkpoint.one_file import OneFile
from engine_core.checkpoint.safetensors_file import SafetensorsFile
from engine_core.configs import HFConfig
from engine_core.configs.rope import override_rope
from engine_core.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.checkpoint.gguf import GGUFAdapter
    from engine_core.checkpoint.gguf_convert import GGUFWeights

LoadFormat = Literal["auto", "safetensors", "bin", "gguf", "dummy"]


class Checkpoint:
    """A checkpoint on disk whose weight files are open and checked.

    Safetensors stay readable when the files are deleted or replaced while the checkpoint is open.

    Attributes:
        folder: where the config is; of a GGUF file the folder that it was converted to, or the one
            it lies in if it was not converted.
        hf_config: the checkpoint's own config, with the overrides applied.
        generation_config: ``generation_config.json``, or an empty dictionary.
        has_weights: false if it was opened with the dummy format.
        gguf: the tensors of a GGUF file that was opened without conversion, else None.
        one_file: the file that holds the whole model, or None if it is a folder's.
        headless: the architecture that its config states, if it is a decoder that was saved
            without its head; else None. ``hf_config`` has that with a head.
    """

    def __init__(
        self,
        folder: Path,
        hf_config: HFConfig,
        generation_config: dict[str, Any],
        files: Mapping[WeightFile, Collection[str]],
        tokenizer_folder: Callable[[], Path] | None = None,
        gguf: GGUFWeights | None = None,
    ) -> None:
        self.gguf = gguf
        self.one_file: OneFile | None = None
        self.headless: str | None = None
        self.folder = folder
        self.hf_config = hf_config
        self.generation_config = generation_config
        self.has_weights = bool(files)
        self._files = files
        self._tokenizer_folder = tokenizer_folder

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer's files are; a GGUF file's tokenizer is converted when asked for.

        Raises:
            TokenizerError: the tokenizer in a GGUF file cannot be translated.
        """
        return self.folder if self._tokenizer_folder is None else self._tokenizer_folder()

    @cached_property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor by name, in file order, without its data.

        Raises:
            CorruptCheckpointError: a ``.bin`` file turns out to be damaged, two files have a tensor
                of the same name, or one lacks a tensor that the index promises.
        """
        headers: dict[str, TensorHeader] = {}
        for file, promised in self._files.items():
            for name, header in file.headers.items():
                if name in headers:
                    raise CorruptCheckpointError(
                        f"tensor {name!r} is both in {headers[name].file} and in {header.file}"
                    )
                headers[name] = header
            absent = sorted(set(promised) - file.headers.keys())
            if absent:
                raise CorruptCheckpointError(
                    f"the index says that tensor {absent[0]!r} is in {file.path}, where it is not "
                    f"({len(absent)} such tensors)"
                )
        return headers

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(header.nbytes for header in self.headers.values())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors on the CPU in file order, mapped from disk: copy what is to be kept.

        Raises:
            CorruptCheckpointError: as :attr:`headers`.
        """
        _ = self.headers  # Every file is checked before the first tensor is handed out.
        for file in self._files:
            yield from file.tensors()

    def release(self) -> None:
        """Leave the pages of mapped files to the system, once the tensors were copied.

        They would count as this process's memory for as long as it runs: a model's weights twice.
        """
        mapped = (self.gguf, *(f for f in self._files if isinstance(f, SafetensorsFile)))
        for file in mapped:
            if file is not None:
                file.release()

    def safetensors_files(self) -> tuple[SafetensorsFile, ...] | None:
        """The files in the order of :meth:`weights`; None if any is of another format.

        Raises:
            CorruptCheckpointError: as :attr:`headers`.
        """
        _ = self.headers
        files = tuple(file for file in self._files if isinstance(file, SafetensorsFile))
        return files if len(files) == len(self._files) else None

    def keeping_blocks(self, names: Collection[str]) -> Checkpoint:
        """This checkpoint with some matrices as they are quantised in the GGUF file.

        See ``GGUFWeights.keeping_blocks``.
        """
        assert self.gguf is not None, "only a GGUF file that was not converted has blocks"
        kept = self.gguf.keeping_blocks(names)
        return Checkpoint(
            self.folder,
            self.hf_config,
            self.generation_config,
            {kept: ()},
            self._tokenizer_folder,
            gguf=kept,
        )


def open_checkpoint(
    path: Path,
    *,
    load_format: LoadFormat = "auto",
    gguf_adapters: Mapping[str, type[GGUFAdapter]] | None = None,
    dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    convert: bool = True,
) -> Checkpoint:
    """Open the checkpoint at ``path`` and check its files; no tensor is read.

    Args:
        path: a folder, a ``.gguf`` file or a ``.safetensors`` file of a whole model, as
            :func:`resolve_model` gives it.
        load_format: which weight files to read. ``auto`` takes safetensors before ``.bin`` before
            one ``.gguf`` file; ``dummy`` needs only ``config.json``.
        gguf_adapters: from ``general.architecture`` of a GGUF file to the class that knows its
            tensors.
        dtype: element type that a GGUF file is converted to; ``auto`` is the file's own, or
            bfloat16 if it is quantised. Other formats are left as they are.
        hf_overrides: keys of ``config.json`` to replace; nested objects are merged key by key.
        convert: whether a GGUF file is converted on disk at once. If not, only its header is read,
            and each tensor is converted when it is asked for.

    Raises:
        CheckpointNotFoundError: the folder, its config or its weight files are not there.
        CorruptCheckpointError: a file is damaged; names it.
        OptionError: ``load_format`` or ``hf_overrides`` does not fit the checkpoint.
        UnknownArchitectureError: no adapter for the GGUF file's architecture.
        TokenizerError: a special token's id in the GGUF file is no index into its vocabulary.
    """
    if load_format not in get_args(LoadFormat):
        known = ", ".join(get_args(LoadFormat))
        raise OptionError(f"load_format {load_format!r} is not one of {known}")
    gguf = _gguf_file(path, load_format)
    if gguf is not None:
        return _open_gguf(gguf, gguf_adapters or {}, dtype, hf_overrides, convert)
    if path.suffix.lower() == ".safetensors" and not path.is_dir():
        return _open_one_file(path, load_format, hf_overrides)
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"{path} is neither a folder nor a .gguf or .safetensors file"
        )
    return _open_folder(path, load_format, hf_overrides)


def _open_gguf(
    path: Path,
    adapters: Mapping[str, type[GGUFAdapter]],
    dtype: str,
    hf_overrides: Mapping[str, Any] | None,
    convert: bool,
) -> Checkpoint:
    from engine_core.checkpoint.gguf_convert import convert_gguf, convert_tokenizer, translate_gguf

    tokenizer_folder = partial(convert_tokenizer, path)
    if not convert:
        translated = translate_gguf(path, adapters, dtype)
        hf_config = apply_overrides(HFConfig(translated.config), hf_overrides or {})
        files: dict[WeightFile, Collection[str]] = {translated.weights: ()}
        return Checkpoint(
            path.parent,
            hf_config,
            translated.generation_config,
            files,
            tokenizer_folder,
            gguf=translated.weights,
        )
    try:
        folder = convert_gguf(path, adapters, dtype)
        return _open_folder(folder, "safetensors", hf_overrides, tokenizer_folder)
    except CheckpointNotFoundError:
        # Somebody emptied the cache just now.
        folder = convert_gguf(path, adapters, dtype)
        return _open_folder(folder, "safetensors", hf_overrides, tokenizer_folder)


def _open_one_file(
    path: Path, load_format: LoadFormat, hf_overrides: Mapping[str, Any] | None
) -> Checkpoint:
    if load_format not in ("auto", "safetensors", "dummy"):
        raise OptionError(
            f"load_format {load_format!r} does not fit the file {path}; leave it at auto"
        )
    opened = OneFile(path)
    folder = opened.folder()
    hf_config = apply_overrides(HFConfig.from_folder(folder), hf_overrides or {})
    files: dict[WeightFile, Collection[str]] = {opened.weights: ()}
    checkpoint = Checkpoint(
        folder, hf_config, read_generation_config(folder), {} if load_format == "dummy" else files
    )
    checkpoint.one_file = opened
    if opened.scheme is not None and not hf_config.get("quantization_config"):
        raise CorruptCheckpointError(
            f"{path} was exported as {opened.scheme}, and its config.json has no "
            "quantization_config, which says how to read it; export the model again"
        )
    return checkpoint


def _open_folder(
    folder: Path,
    load_format: LoadFormat,
    hf_overrides: Mapping[str, Any] | None,
    tokenizer_folder: Callable[[], Path] | None = None,
) -> Checkpoint:
    hf_config = apply_overrides(HFConfig.from_folder(folder), hf_overrides or {})
    files = {} if load_format == "dummy" else _weight_files(folder, load_format)
    generation_config = read_generation_config(folder)
    checkpoint = Checkpoint(folder, hf_config, generation_config, files, tokenizer_folder)
    if not any(isinstance(file, BinFile) for file in files):
        # Costs nothing here, while the headers of a .bin file cost the import of torch.
        _ = checkpoint.headers
    return checkpoint


def read_generation_config(folder: Path) -> dict[str, Any]:
    """``generation_config.json`` of a checkpoint folder; empty if there is none.

    Raises:
        CorruptCheckpointError: it is not a JSON object.
    """
    try:
        return read_json_object(folder / "generation_config.json")
    except CheckpointNotFoundError:
        return {}


def apply_overrides(hf_config: HFConfig, overrides: Mapping[str, Any]) -> HFConfig:
    """A copy of ``hf_config`` with ``overrides`` in it; nested objects are merged key by key.

    Those of rotary positions take effect under whichever of their names, see :func:`override_rope`.

    Raises:
        OptionError: an override has a name that is no string, or two names of one thing are given.
    """
    values = hf_config.to_dict()
    return HFConfig({**_merge(values, overrides), **override_rope(values, overrides)})


def _merge(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise OptionError(f"hf_overrides: {name!r} is not a valid key; keys are strings")
        old = merged.get(name)
        if isinstance(value, Mapping) and isinstance(old, dict):
            value = _merge(old, value)
        merged[name] = value
    return merged


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file to convert, or None if the checkpoint is an ordinary folder."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if load_format not in ("auto", "gguf"):
            raise OptionError(
                f"load_format {load_format!r} does not fit the GGUF file {path}; leave it at auto"
            )
        return path
    if load_format == "gguf" or (load_format == "auto" and not (path / "config.json").exists()):
        found = sorted(path.glob("*.gguf")) if path.is_dir() else []
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found)
            raise CheckpointNotFoundError(f"{path} has several GGUF files; name one: {names}")
        if load_format == "gguf":
            raise CheckpointNotFoundError(f"{path} has no .gguf file")
    return None


def _weight_files(folder: Path, load_format: str) -> dict[WeightFile, Collection[str]]:
    """The weight files in reading order, with the tensors that an index promises of each."""
    for name, reader, single in (
        ("safetensors", SafetensorsFile, "model.safetensors"),
        ("bin", BinFile, "pytorch_model.bin"),
    ):
        if load_format not in ("auto", name):
            continue
        if is_there(folder / single):
            return {reader(folder / single): ()}
        index = folder / f"{single}.index.json"
        if is_there(index):
            return {reader(path): promised for path, promised in read_index(index).items()}
        shards = sorted(folder.glob(f"*-of-*.{name}"))
        if shards:
            raise CheckpointNotFoundError(
                f"{folder} has {shards[0].name} but no {index.name} that says what belongs to it"
            )
    wanted = "" if load_format == "auto" else f" of format {load_format}"
    raise CheckpointNotFoundError(
        f"{folder} has no weight files{wanted}: looked for model.safetensors, pytorch_model.bin "
        f"and their .index.json; it holds {', '.join(_listing(folder)) or 'nothing'}"
    )


def _listing(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    return [*names[:10], "..."] if len(names) > 10 else names
