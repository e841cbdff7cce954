"""Pages of mapped files, which are a process's memory only while it reads them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_core import LLM, SamplingParams
from engine_core.checkpoint.safetensors_file import SafetensorsFile


def resident(path: Path) -> int:
    """Bytes of a file's pages in this process."""
    count, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            within = line.endswith(str(path.resolve()))
        elif within and line.startswith("Rss:"):
            count += 1024 * int(line.split()[1])
    return count


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[Path, Tensor]]:
    tensor = torch.arange(2**20, dtype=torch.int32)
    save_file({"a": tensor, "b": tensor + 1}, tmp_path / "a.safetensors")
    yield tmp_path / "a.safetensors", tensor
    gc.collect()


def test_pages_that_were_read_are_left(file: tuple[Path, Tensor]) -> None:
    path, numbers = file
    mapped = SafetensorsFile(path)
    for _ in range(2):
        assert [int(tensor.sum()) for _, tensor in mapped.tensors()] == [
            int(numbers.sum()),
            int(numbers.sum()) + len(numbers),
        ]
        assert resident(path) >= 2 * numbers.nbytes
        mapped.release()
        assert resident(path) == 0


def test_a_tensor_that_somebody_holds_keeps_what_was_written_to_it(
    file: tuple[Path, Tensor],
) -> None:
    path, numbers = file
    mapped = SafetensorsFile(path)
    held = next(mapped.tensors())[1][5:]
    held.add_(7)
    mapped.release()
    assert torch.equal(held, numbers[5:] + 7)
    del held
    mapped.release()
    assert torch.equal(next(mapped.tensors())[1], numbers)


def test_a_model_that_is_loaded_has_its_weights_once(smollm2_gguf: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(str(smollm2_gguf), max_model_len=64) as llm:
        assert llm.generate("Hello", params)[0].outputs[0].token_ids
        assert resident(smollm2_gguf) < 2**22
