"""Vectors and scores as users get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.configs.pooling import Similarity
from engine_core.errors import EngineDeadError, ModelError, RequestError
from engine_core.steps import CompletionOutput

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """A prompt's vector.

    Attributes:
        vector: ``[D]`` float32.
    """

    vector: Vector

    @property
    def embedding(self) -> list[float]:
        """The same as a list."""
        listed: list[float] = self.vector.tolist()
        return listed


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts.

    Attributes:
        score: higher for texts that belong together.
    """

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRequestOutput:
    """Result of :meth:`LLM.embed` for a prompt; named as in vLLM.

    Attributes:
        request_id: the engine's.
        prompt_token_ids: the prompt's tokens, special ones included.
        outputs: the vector.
        finished: always true.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ScoringRequestOutput:
    """Result of :meth:`LLM.score` for a pair; named as in vLLM.

    Attributes:
        request_id: the engine's.
        prompt_token_ids: the tokens of both texts.
        outputs: the score.
        finished: always true.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def vector(output: CompletionOutput) -> Vector:
    """The vector, or the score, of a prompt that was pooled.

    Raises:
        ModelError: the model gave none that is finite.
        EngineDeadError: the request was ended before it was run.
    """
    if output.pooled is None:
        if output.error is not None:
            raise ModelError(f"prompt {output.index}: {output.error}")
        raise EngineDeadError(f"prompt {output.index} was ended before it was run")
    return np.frombuffer(output.pooled, np.float32)


def paired(one: Any, other: Any) -> tuple[list[Any], list[Any]]:
    """One text or a list each as two lists of one length: a single one stands for all.

    Raises:
        RequestError: their lengths differ, and none is 1; or one is no text or list.
    """
    lists = []
    for name, given in (("first", one), ("second", other)):
        listed = [given] if isinstance(given, str) else given
        plain = isinstance(listed, Sequence) and not isinstance(listed, bytes | bytearray)
        if not plain or not all(isinstance(each, str) for each in listed):
            raise RequestError(f"the {name} texts must be a text or a list of texts")
        lists.append(list(listed))
    ones, others = lists
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise RequestError(
            f"{len(ones)} texts are given with {len(others)} others; give one, or as many"
        )
    return ones, others


def similarities(one: Vector, other: Vector, kind: Similarity) -> list[float]:
    """How alike the rows of two arrays ``[N, D]`` are, one by one; distances are negative."""
    if kind in ("euclidean", "manhattan"):
        distances = np.linalg.norm(one - other, ord=2 if kind == "euclidean" else 1, axis=1)
        negated: list[float] = (-distances).tolist()
        return negated
    products = np.einsum("nd,nd->n", one, other)
    if kind == "cosine":
        sizes = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        products = products / np.maximum(sizes, 1e-12)
    listed: list[float] = products.tolist()
    return listed
