"""Embeddings of pictures, videos and sounds on the device."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine_core.errors import ModelError
from engine_core.runtime.block_tables import IntArray
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.media_graphs import MediaGraphs, is_content
from engine_core.runtime.platform import to_device
from engine_core.steps import MediaWork

if TYPE_CHECKING:
    from engine_core.inputs import MediaItem


@dataclass(slots=True)
class _Begun:
    """An item that is computed in parts: those left, the share that is done, and how many in all.

    Their number is 0 before there was one.
    """

    left: Generator[float, None, list[Tensor]]
    done: float = 0.0
    parts: int = 0


class MediaEmbeddings:
    """Makes the embeddings of items, and keeps them in one tensor, by slot.

    Steps, captured ones too, take from that tensor what their tokens need, by its rows.

    Attributes:
        table: ``[capacity, H]``.
        graphs: of the encoder; None for none.
        parts: of what the last step computed, as of :class:`StepResult`.
    """

    def __init__(self, forward: ForwardPass, capacity: int, device: torch.device) -> None:
        """``capacity``: embeddings in all, at least 1."""
        none = torch.zeros(1, 1, dtype=torch.int64, device=device)
        like = forward.embed_tokens(none)
        self.table = like.new_empty(capacity, like.shape[-1])
        self.graphs: MediaGraphs | None = None
        self.parts: dict[tuple[str, int], int] = {}
        self._forward = forward
        self._device = device
        self._free = np.arange(capacity)
        self._rows: dict[int, IntArray] = {}
        # Items that are computed in parts.
        self._begun: dict[int, _Begun] = {}

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the embeddings in some slots."""
        for slot in slots:
            if self._begun.pop(slot, None) is None:
                self._free = np.concatenate((self._rows.pop(slot), self._free))

    def rows(self, slot: int) -> IntArray:
        """The rows of the table with an item's embeddings, in order."""
        return self._rows[slot]

    def run(self, planned: Sequence[tuple[MediaWork, MediaItem]]) -> None:
        """Compute what a plan says: items that are computed at once together, others in parts.

        Raises:
            ModelError: the model gives another number of embeddings than an item has positions.
        """
        self.parts = {}
        whole: dict[str, dict[int, MediaItem]] = {}
        for work, item in planned:
            if work.begin == 0 and work.end == work.size:
                whole.setdefault(item.kind, {})[work.slot] = item
            elif work.slot not in self._rows:  # else it came to its end earlier than expected
                self._go_on(work, item)
        for kind, items in whole.items():
            features = [_features(item) for item in items.values()]
            given = None
            if self.graphs is not None and not self._forward.watched:
                given = self.graphs.run(kind, features)
            if given is None:
                given = self._forward.embed_media(kind, [self._sent(each) for each in features])
            for (slot, item), embeddings in zip(items.items(), given, strict=True):
                self._keep(slot, item, embeddings)

    def _go_on(self, work: MediaWork, item: MediaItem) -> None:
        """Compute at least the share of an item that a plan wants."""
        if work.begin == 0:
            left = self._forward.embed_media_parts(item.kind, [self._sent(_features(item))])
            self._begun[work.slot] = _Begun(left)
        begun = self._begun[work.slot]
        try:
            while work.end == work.size or begun.done < work.end / work.size:
                begun.done = next(begun.left)
                if not begun.parts and begun.done > 0:
                    begun.parts = max(1, round(1 / begun.done))
        except StopIteration as end:
            del self._begun[work.slot]
            self._keep(work.slot, item, end.value[0])
        if begun.parts:
            self.parts[item.kind, work.size] = begun.parts

    def _sent(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An item's features, on the device but for integers, which say shapes: nobody waits."""
        return {
            name: to_device(tensor, self._device) if is_content(tensor) else tensor
            for name, tensor in features.items()
        }

    def _keep(self, slot: int, item: MediaItem, embeddings: Tensor) -> None:
        count = item.num_embeddings
        if len(embeddings) != count:
            raise ModelError(
                f"{self._forward.model_name}.embed_media gave {len(embeddings)} embeddings of "
                f"{item.kind} for which the input processor left {count} positions"
            )
        rows, self._free = self._free[:count], self._free[count:]
        self._rows[slot] = rows
        self.table[to_device(torch.from_numpy(rows), self._device)] = embeddings.to(
            self.table.dtype
        )


def _features(item: MediaItem) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        # Arrays of shared memory are read-only, and nobody writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.as_tensor(np.asarray(value)) for name, value in item.features.items()}
