"""Embeddings of pictures, videos and sounds on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine_core.errors import ModelError
from engine_core.runtime.block_tables import IntArray
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.platform import to_device

if TYPE_CHECKING:
    from engine_core.inputs import MediaItem


class MediaEmbeddings:
    """Makes the embeddings of items, and keeps them in one tensor, by slot.

    Steps, captured ones too, take from that tensor what their tokens need, by its rows.

    Attributes:
        table: ``[capacity, H]``.
    """

    def __init__(self, forward: ForwardPass, capacity: int, device: torch.device) -> None:
        """``capacity``: embeddings in all, at least 1."""
        none = torch.zeros(1, 1, dtype=torch.int64, device=device)
        like = forward.embed_tokens(none)
        self.table = like.new_empty(capacity, like.shape[-1])
        self._forward = forward
        self._device = device
        self._free = np.arange(capacity)
        self._rows: dict[int, IntArray] = {}

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the embeddings in some slots."""
        for slot in slots:
            self._free = np.concatenate((self._rows.pop(slot), self._free))

    def rows(self, slot: int) -> IntArray:
        """The rows of the table with an item's embeddings, in order."""
        return self._rows[slot]

    def compute(self, new: Mapping[int, MediaItem]) -> None:
        """Compute the embeddings of items by slot, all of a kind at once.

        Raises:
            ModelError: the model gives another number of embeddings than an item has positions.
        """
        for kind in dict.fromkeys(item.kind for item in new.values()):
            items = {slot: item for slot, item in new.items() if item.kind == kind}
            given = self._forward.embed_media(kind, [self._sent(item) for item in items.values()])
            for (slot, item), embeddings in zip(items.items(), given, strict=True):
                self._keep(slot, item, embeddings)

    def _sent(self, item: MediaItem) -> dict[str, Tensor]:
        """An item's features, on the device but for integers, which say shapes: nobody waits."""
        tensors = {
            name: torch.as_tensor(np.asarray(value)) for name, value in item.features.items()
        }
        return {
            name: to_device(tensor, self._device) if _is_content(tensor) else tensor
            for name, tensor in tensors.items()
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


def _is_content(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.uint8
