"""The token embedding and the output head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from engine_core.kernels import CodedWeight, embed, linear
from engine_core.nn.distributed import all_gather_last_dim, all_reduce
from engine_core.nn.loading import (
    ShapeMismatchError,
    copy_checked,
    empty_parameter,
    set_weight_loader,
)
from engine_core.nn.packing import MatrixModule, PackedMatrix
from engine_core.step_context import current_build_context


class VocabularyMatrix(PackedMatrix, Protocol):
    """A packed matrix whose rows can be looked up, because embedding and head may share it."""

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids ``[...]`` int64 to ``[..., hidden]``."""


class VocabularyMethod(Protocol):
    """Packing of the vocabulary's matrix, chosen by a quantisation scheme."""

    def pack(self, weight: Tensor) -> VocabularyMatrix:
        """The matrix that takes the place of the loaded ``weight``."""

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Bytes of that matrix, under ``"weight"``."""


class VocabularySplit(MatrixModule):
    """A matrix ``[vocab, hidden]`` of which each rank keeps an equal run of rows, padded.

    Attributes:
        hidden_size: numbers of a row, however they are packed.
        dtype: of the weight as it was built, and of the activations.
        method: how the matrix is packed once it is loaded; None to leave it as it is.
    """

    method: VocabularyMethod | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.context = current_build_context()
        self.dtype = dtype or self.context.dtype or torch.get_default_dtype()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.rows = -(-vocab_size // self.context.tp_size)
        self.first = self.context.tp_rank * self.rows
        self.weight = empty_parameter(self.rows, hidden_size, dtype=dtype, device=device)
        set_weight_loader(self.weight, self._load)

    def _load(self, param: nn.Parameter, tensor: Tensor, shard_id: object = None) -> None:
        wanted = [self.vocab_size, *param.shape[1:]]
        if shard_id is not None or list(tensor.shape) != wanted:
            raise ShapeMismatchError(f"has shape {list(tensor.shape)}, the model wants {wanted}")
        mine = tensor[self.first : self.first + self.rows]
        copy_checked(param[: mine.shape[0]], mine)
        if not param.is_meta:
            param[mine.shape[0] :].zero_()


class Embedding(VocabularySplit):
    """Token ids to vectors."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[...]`` int64 to ``[..., hidden]``."""
        if self.context.tp_size == 1:
            return embed(input_ids, self.weight) if self.packed is None else self._take(input_ids)
        if self.packed is None:
            return all_reduce(embed(input_ids, self.weight, self.first), self.context)
        local = input_ids - self.first
        outside = (local < 0) | (local >= self.rows)
        out = self._take(local.masked_fill(outside, 0))
        return all_reduce(out.masked_fill(outside.unsqueeze(-1), 0), self.context)

    def _take(self, rows: Tensor) -> Tensor:
        """Rows of the matrix that is packed."""
        taken: Tensor = self.packed.take(rows)  # type: ignore[union-attr]
        return taken


class LMHead(VocabularySplit):
    """Hidden states to logits."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``, the same on every rank."""
        if self.packed is None or isinstance(self.packed, CodedWeight):
            weight = self.weight if self.packed is None else self.packed
            local = linear(hidden_states, weight, deterministic=self.context.deterministic)
        else:
            local = self.packed.multiply(hidden_states, None)
        return all_gather_last_dim(local, self.context)[..., : self.vocab_size]


build_embedding = Embedding


def build_lm_head(
    hidden_size: int,
    vocab_size: int,
    *,
    tied_to: Embedding | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> LMHead:
    """The output head; ``tied_to`` shares the embedding's matrix."""
    head = LMHead(vocab_size, hidden_size, dtype, device)
    head.input_width = hidden_size
    if tied_to is not None:
        head.weight = tied_to.weight
    return head
