"""Loading a checkpoint's files, on a CPU and onto a GPU."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import write_config, write_index
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine_core.checkpoint import Checkpoint, open_checkpoint
from engine_core.errors import ConfigError, CorruptCheckpointError
from engine_core.nn.loading import load_weight
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, check_weights, load_weights
from engine_core.runtime.weight_reader import read_weights
from engine_core.step_context import BuildContext

CPU = torch.device("cpu")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    raw, wanted = (tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(raw, wanted)


def files_in(folder: Path) -> Any:
    files = open_checkpoint(folder).safetensors_files()
    assert files is not None
    return files


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("weights")]


def network(folder: Path, **context: Any) -> torch.nn.Module:
    """The model of a checkpoint, on meta."""
    registry = build_registry(())
    model_config = registry.model_config(open_checkpoint(folder).hf_config, folder)
    model_class = registry.model_class(model_config.architecture)
    return build_on_meta(model_class, model_config, BuildContext(**context))


def spied(model: torch.nn.Module) -> set[str]:
    """The kinds of device that the tensors are on which ``model`` will be loaded from."""
    devices: set[str] = set()
    load: Any = model.load_weights

    def watch(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            devices.add(tensor.device.type)
            yield name, tensor

    model.load_weights = lambda weights: load(watch(weights))  # type: ignore[assignment]
    return devices


def merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A llama checkpoint's tensors under the names of the model's parameters."""
    joined = dict(tensors)
    for name in tensors:
        for parts, layer in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            (("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            if f".{parts[0]}." in name:
                pieces = [joined.pop(name.replace(parts[0], part)) for part in parts]
                joined[name.replace(parts[0], layer)] = torch.cat(pieces)
    return joined


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-tied-llama3", "llama-bias-linear", "qwen2-gqa"]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parameters_are_the_files_tensors(name: str, device: str) -> None:
    folder = GOLDEN / name
    model = network(folder, dtype=torch.float32)
    devices = spied(model)
    load_weights(model, open_checkpoint(folder), name, torch.device(device))
    assert devices == {device}
    expected = merged(load_file(folder / "model.safetensors"))
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, parameter in parameters.items():
        assert parameter.device.type == device
        assert same_bytes(parameter, expected[key]), key


class Fresh:
    """The tensors of a checkpoint, each in memory of its own that is watched."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.headers = tensors
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.headers:
            gc.collect()
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.alive))
            tensor = self.headers[name].clone()
            self.alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor


class Transposed(torch.nn.Module):
    """A family that makes of each tensor one of its own."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            data = torch.empty(8, 20, device="meta")
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            load_weight(self.get_parameter(name), tensor.t().contiguous())


def test_what_a_family_makes_of_a_tensor_is_not_taken_for_another_that_is_gone(
    tmp_path: Path,
) -> None:
    tensors = {f"w{index:02}": torch.randn(20, 8) for index in range(40)}
    save_file(tensors, write_config(tmp_path) / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    model = Transposed(list(tensors))
    account = check_weights(model, checkpoint, "transposed")
    assert all(account.sources(model.get_parameter(name)) == {name} for name in tensors)
    load_weights(model, checkpoint, "transposed", CPU)
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor.T)


TIED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("copies", [1, 2])
def test_no_tensor_is_kept_longer_than_it_takes_to_load_it(copies: int) -> None:
    """Not even one whose parameter another may be for: on a GPU it would take memory there."""
    folder = GOLDEN / "llama-tied-llama3"
    tensors = load_file(folder / "model.safetensors")
    tensors = {TIED[0]: tensors.pop(TIED[0]), **tensors}
    if copies == 2:
        tensors[TIED[1]] = tensors[TIED[0]]
    source = Fresh(tensors)
    load_weights(network(folder, dtype=torch.float32), source, "fresh", CPU)
    # That which the loop still names.
    assert source.most_alive == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_finds_a_difference_in_its_part_of_a_tied_tensor(
    dtype: torch.dtype, rank: int, device: str, tmp_path: Path
) -> None:
    source = GOLDEN / "llama-tied-llama3"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    head = tensors[TIED[0]].clone()

    def load(copy: Tensor) -> None:
        save_file({**tensors, TIED[1]: copy}, tmp_path / "model.safetensors")
        model = network(tmp_path, dtype=dtype, tp_size=2, tp_rank=rank)
        checkpoint = open_checkpoint(tmp_path)
        load_weights(model, checkpoint, "tied", torch.device(device), tp_size=2)

    load(head)
    head[0 if rank == 0 else -1, -1] += 1.0
    with pytest.raises(ConfigError, match=r"lm_head\.weight .*they differ; set tie_word"):
        load(head)


class Reads(TorchDispatchMode):
    """Bytes of a checkpoint's tensors, or of views of them, that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._storages: set[int] = set()

    def watch(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._storages.add(tensor.untyped_storage().data_ptr())
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for each in args:
                if isinstance(each, Tensor) and not each.is_meta:
                    held = each.untyped_storage().data_ptr() in self._storages
                    self.nbytes += each.nbytes * held
        return result


# Tensors of their own, of experts, stacked, and fused with the rows of a head side by side.
@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-yarn", "mixtral-tiny", "qwen3moe-stacked", "bloom-pow2"]
)
@pytest.mark.parametrize("experts", [False, True])
def test_a_rank_reads_as_many_bytes_as_it_keeps(name: str, experts: bool) -> None:
    source = open_checkpoint(GOLDEN / name)
    (stored,) = {getattr(torch, header.dtype) for header in source.headers.values()}
    for rank in range(2):
        context = {"tp_size": 2, "tp_rank": rank, "expert_parallel": experts}
        model = network(GOLDEN / name, dtype=torch.float32, **context)
        load: Any = model.load_weights
        reads = Reads()
        model.load_weights = lambda weights, reads=reads, load=load: load(reads.watch(weights))
        with reads:
            load_weights(model, source, name, CPU, tp_size=2)
        kept = sum(param.numel() for param in dict.fromkeys(model.parameters()))
        assert reads.nbytes == kept * stored.itemsize


@pytest.mark.gpu
class TestOnAGPU:
    """The reader, and the loader with it."""

    DEVICE = torch.device("cuda", 0)

    @pytest.fixture
    def large(self, tmp_path: Path) -> Path:
        """300 MB in two files: tensors of one byte to 100 MB, a scalar, one without elements."""
        write_config(tmp_path)
        generator = torch.Generator().manual_seed(0)
        weight_map = {}
        for number in range(2):
            sizes: list[tuple[int, ...]] = [(5000, 5000), (3, 7), (), (0, 4), (1000, 3001)] * 2
            tensors = {
                f"{number}.{index}": torch.randn(size, generator=generator).to(
                    torch.bfloat16 if index % 2 else torch.float32
                )
                for index, size in enumerate(sizes)
            }
            tensors[f"{number}.odd"] = torch.arange(13, dtype=torch.uint8)
            save_file(tensors, tmp_path / f"{number}.safetensors")
            weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
        write_index(tmp_path, weight_map)
        return tmp_path

    @pytest.mark.parametrize("ahead", [0, 2**20, 150 * 2**20, 2**30])
    @pytest.mark.parametrize("piece", [2**20 + 1, 16 * 2**20])
    def test_all_bytes_come_though_memory_is_used_again(
        self, ahead: int, piece: int, large: Path
    ) -> None:
        """The device is kept busy, so that copies out of a tensor run long after it was freed."""
        copies: dict[str, Tensor] = {}
        with closing(
            read_weights(files_in(large), self.DEVICE, ahead_bytes=ahead, piece_bytes=piece)
        ) as weights:
            for name, tensor in weights:
                torch.cuda._sleep(20_000_000)
                copies[name] = tensor.clone()
        expected = load_file(large / "0.safetensors") | load_file(large / "1.safetensors")
        assert copies.keys() == expected.keys()
        for name, tensor in expected.items():
            assert same_bytes(copies[name], tensor), name

    def test_memory_stays_within_the_bound(self, large: Path) -> None:
        files = files_in(large)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # What is asked for: the allocator gives up to 1 MiB more.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        ahead = 220 * 2**20
        count = sum(1 for _ in read_weights(files, self.DEVICE, ahead_bytes=ahead))
        assert count == sum(len(file.headers) for file in files)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= ahead
        assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before

    def test_an_early_end_leaves_nothing_behind(self, large: Path) -> None:
        files = files_in(large)
        before = torch.cuda.memory_allocated()
        for count in range(4):
            with closing(read_weights(files, self.DEVICE)) as weights:
                deque(itertools.islice(weights, count), maxlen=0)  # keeps none
            assert reading_threads() == []
            assert torch.cuda.memory_allocated() == before

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        source = GOLDEN / "llama-gqa"
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        path = tmp_path / "model.safetensors"
        path.write_bytes((source / "model.safetensors").read_bytes())
        checkpoint = open_checkpoint(tmp_path)
        os.truncate(path, path.stat().st_size - 1000)
        with pytest.raises(CorruptCheckpointError, match="truncated") as caught:
            load_weights(
                network(tmp_path, dtype=torch.float32), checkpoint, "cut", self.DEVICE, pack=True
            )
        assert str(path) in str(caught.value)

    def test_ranks_go_on_with_the_mapped_files(self) -> None:
        folder = GOLDEN / "llama-gqa"
        model = network(folder, dtype=torch.float32, tp_size=2, tp_rank=1)
        devices = spied(model)
        load_weights(model, open_checkpoint(folder), "golden", self.DEVICE, tp_size=2)
        assert devices == {"cpu"}

    def test_little_memory_is_left_to_the_parameters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = GOLDEN / "llama-gqa"
        model = network(folder, dtype=torch.float32)
        devices = spied(model)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 8 * 2**30))
        load_weights(model, open_checkpoint(folder), "golden", self.DEVICE)
        assert devices == {"cpu"}

    def test_what_the_tensors_took_is_free_for_the_cache(self, large: Path) -> None:
        checkpoint = open_checkpoint(large)
        model = Listed(checkpoint)
        gc.collect()
        torch.cuda.empty_cache()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        load_weights(model, checkpoint, "large", self.DEVICE)
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - unused
        # The allocator takes segments of 20 MiB for parameters below 10.
        assert unused < 40 * 2**20
        expected = load_file(large / "0.safetensors") | load_file(large / "1.safetensors")
        for name, tensor in expected.items():
            assert same_bytes(model.under[name], tensor), name


class Listed(torch.nn.Module):
    """A model whose parameters are a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._keys = {name: name.replace(".", "_") for name in checkpoint.headers}
        for name, header in checkpoint.headers.items():
            data = torch.empty(header.shape, dtype=getattr(torch, header.dtype), device="meta")
            self.register_parameter(self._keys[name], torch.nn.Parameter(data, requires_grad=False))

    @property
    def under(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by the tensors' names."""
        return {name: self.get_parameter(key) for name, key in self._keys.items()}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        parameters = self.under
        for name, tensor in weights:
            load_weight(parameters[name], tensor)
