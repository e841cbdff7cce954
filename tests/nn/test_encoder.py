"""Prompts that go through an encoder's layers in parts, a part a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine_core.kernels import Segments, compiled
from engine_core.nn import MLP, EncoderAttention, EncoderLayers, LayerNorm
from engine_core.nn.module import Module
from engine_core.step_context import BuildContext, building

CPU = torch.device("cpu")


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = EncoderAttention(32, 4, 8)
        self.norm = LayerNorm(32)
        self.mlp = MLP(32, 64, "gelu", bias=True)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = self.norm(self.attention(x, segments), x)[0]
        return x + self.mlp(x)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def made() -> EncoderLayers:
    with building(BuildContext(dtype=torch.float32, device=CPU)):
        layers = EncoderLayers(Layer() for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for param in layers.parameters():
        param.data.normal_(0, 0.2, generator=generator)
    return layers


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("runs", [[(20, 4), (5, 30), (3, 17)], [(1, 1), (4, 90)], [(1, 400)]])
@torch.inference_mode()
def test_parts_are_what_all_are(
    runs: list[tuple[int, int]], threads: int, set_threads: Callable[[int], None]
) -> None:
    layers, segments = made(), Segments(runs, CPU)
    x = torch.randn(1, segments.length, 32)
    set_threads(1)
    wanted = layers(x, segments)
    set_threads(threads)
    for _ in range(3):
        torch.testing.assert_close(layers(x, segments), wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_layers_with_hooks_see_all_prompts(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    layers, segments, seen = made(), Segments([(40, 5)], CPU), []
    hook = layers[1].register_forward_hook(lambda _, args, out: seen.append(out.shape))
    layers(torch.randn(1, 200, 32), segments)
    hook.remove()
    assert seen == [(1, 200, 32)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_parts_share_segments_out(count: int) -> None:
    segments = Segments([(7, 3), (2, 10), (5, 1)], CPU)
    parts = segments.parts(count)
    assert len(parts) <= count
    sizes = [size for part in parts for number, size in part.runs for _ in range(number)]
    assert sizes == [3] * 7 + [10] * 2 + [1] * 5
    assert max(part.length for part in parts) <= segments.length / count + 10


@pytest.mark.skipif(not compiled.available(), reason="numba is not installed")
def test_tasks_run_side_by_side() -> None:
    openmp = compiled.openmp()
    assert openmp.each([lambda n=n: n * n for n in range(9)], 2) == [n * n for n in range(9)]

    def fail() -> None:
        raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        openmp.each([lambda: None, lambda: None, fail], 2)
