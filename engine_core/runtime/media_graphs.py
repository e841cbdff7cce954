"""Encoders of pictures, videos and sounds as CUDA graphs, for items of sizes that come again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.runtime.capture import (
    Agreement,
    AttemptError,
    Capturer,
    CudaCapturer,
    Graph,
    capture,
)
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.platform import pinned

logger = logging.getLogger(__name__)

# Graphs at once, and sizes that are remembered.
_MOST, _REMEMBERED = 32, 256
# A larger item keeps the device busy for longer than the host takes to launch its kernels.
_LARGEST_BYTES = 64 * 2**20

Features = Mapping[str, Tensor]

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    inputs: list[dict[str, Tensor]]
    outputs: list[Tensor]


class MediaGraphs:
    """Graphs of a model's ``embed_media``, by the shapes of the features and their integers.

    What a model names in ``usual_media`` is captured before it comes, and any other size that came
    twice when the engine is idle next. The least recently used graphs give way to others. A model
    whose encoder cannot be captured has none from then on. Ranks capture together, as they do
    steps; which items there are is the same on all of them.
    """

    def __init__(
        self,
        forward: ForwardPass,
        device: torch.device,
        agreement: Agreement | None = None,
        capturer: Callable[[torch.device], Capturer] = CudaCapturer,
    ) -> None:
        """Nothing is captured yet; ``agreement`` is with the other ranks, if there are any."""
        self._forward = forward
        self._device = device
        self._graphs: OrderedDict[_Key, _Captured] = OrderedDict()
        self._seen: OrderedDict[_Key, int] = OrderedDict()
        self._wanted: dict[_Key, tuple[str, list[dict[str, Tensor]]]] = {}
        self._broken = False
        self._agreement = agreement or Agreement()
        self._capturer = capturer(device)
        for kind, items in forward.usual_media():
            self._wanted[_key_of(kind, items)] = kind, [dict(item) for item in items]

    def run(self, kind: str, items: Sequence[Features]) -> list[Tensor] | None:
        """The embeddings of items, whose features are on the host; None if no graph has them.

        The next call overwrites them.
        """
        key = _key_of(kind, items)
        captured = self._graphs.get(key)
        if captured is None:
            self._note(key, kind, items)
            return None
        self._graphs.move_to_end(key)
        for item, inputs in zip(items, captured.inputs, strict=True):
            for name, tensor in item.items():
                if is_content(tensor):
                    inputs[name].copy_(pinned(tensor, self._device), non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def capture_next(self) -> bool:
        """Capture what is wanted next; False if nothing is, or it could not be captured."""
        if not self._wanted or self._broken:
            return False
        key = next(iter(self._wanted))
        kind, items = self._wanted.pop(key)
        if len(self._graphs) >= _MOST:
            self._graphs.popitem(last=False)
        try:
            self._graphs[key] = self._capture(kind, items)
        except AttemptError as error:
            self._broken = True
            self._wanted.clear()
            if self._agreement.rank == 0:
                logger.warning(
                    "%s.embed_media could not be captured as a CUDA graph: %s; it launches its "
                    "kernels one by one",
                    self._forward.model_name,
                    error,
                )
            return False
        return True

    def _note(self, key: _Key, kind: str, items: Sequence[Features]) -> None:
        """Want a graph of what comes for the second time."""
        size = sum(tensor.nbytes for item in items for tensor in item.values())
        if self._broken or size > _LARGEST_BYTES:
            return
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        if self._seen[key] >= 2 and key not in self._wanted and len(self._wanted) < _MOST:
            self._wanted[key] = (
                kind,
                [
                    {
                        n: torch.zeros_like(x) if is_content(x) else x.clone()
                        for n, x in item.items()
                    }
                    for item in items
                ],
            )

    def _capture(self, kind: str, items: Sequence[Features]) -> _Captured:
        made: list[list[dict[str, Tensor]]] = []

        def prepare() -> Callable[[], list[Tensor]]:
            inputs = [
                {name: x.to(self._device) if is_content(x) else x for name, x in item.items()}
                for item in items
            ]
            made.append(inputs)
            return lambda: self._forward.embed_media(kind, inputs)

        graph, outputs = capture(self._capturer, self._agreement, prepare)
        return _Captured(graph, made[-1], outputs)


def is_content(tensor: Tensor) -> bool:
    """Whether a feature belongs on the device: integers say sizes, and stay on the host."""
    return tensor.is_floating_point() or tensor.dtype is torch.uint8


def _key_of(kind: str, items: Sequence[Features]) -> _Key:
    parts: list[object] = [kind]
    for item in items:
        for name in sorted(item):
            tensor = item[name]
            same = () if is_content(tensor) else tuple(tensor.flatten().tolist())
            parts.append((name, tensor.dtype, tuple(tensor.shape), same))
    return tuple(parts)
