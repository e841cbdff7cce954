"""Vectors and scores of a step's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.configs import PoolingConfig, PoolingParams
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.platform import to_device
from engine_core.steps import PlanRow


class Pooler:
    """Pools each row's hidden states, over as many steps as its prompt takes.

    Args:
        forward: the model; it has ``classify`` if it is to score.
        config: how to pool.
    """

    def __init__(self, forward: ForwardPass, config: PoolingConfig) -> None:
        self._forward = forward
        self._config = config
        # What earlier steps left of unfinished prompts: the sum, or the first state. By row.
        self._begun: dict[int, Tensor] = {}

    def __call__(
        self, rows: Sequence[PlanRow], hidden: Tensor, params: Mapping[int, PoolingParams]
    ) -> list[tuple[list[int], Tensor]]:
        """The results of the rows whose prompt ends with this step.

        Args:
            rows: those of the plan.
            hidden: ``[T, H]``, their tokens' states in this order.
            params: by row of the persistent batch.

        Returns:
            Places among ``rows``, and what they give: ``[N, D]`` float32 on the model's device, a
            part for each kind of result.
        """
        states = self._states(rows, hidden)
        by_kind: dict[PoolingParams, list[int]] = {}
        for place, row in enumerate(rows):
            if row.sample:
                by_kind.setdefault(params[row.row], []).append(place)
        results = []
        for kind, places in by_kind.items():
            own = states
            if len(places) < len(rows):
                own = states[to_device(torch.tensor(places), hidden.device)]
            results.append((places, self._finish(own, kind, hidden.dtype)))
        return results

    def _states(self, rows: Sequence[PlanRow], hidden: Tensor) -> Tensor:
        """The pooled state of each row so far, ``[R, H]`` float32; sums are divided at the end."""
        lengths = torch.tensor([row.num_tokens for row in rows])
        ends = lengths.cumsum(0)
        kind = self._config.kind
        if kind == "last":
            return hidden[to_device(ends - 1, hidden.device)].float()
        if kind == "cls":
            states = hidden[to_device(ends - lengths, hidden.device)].float()
        else:
            sizes = to_device(lengths, hidden.device)
            states = torch.segment_reduce(hidden.float(), "sum", lengths=sizes, axis=0)
        for place, row in enumerate(rows):
            if row.start:
                before = self._begun.pop(row.row)
                states[place] = before if kind == "cls" else states[place] + before
            if not row.sample:
                self._begun[row.row] = states[place].clone()
        if kind == "mean":
            totals = torch.tensor([row.start + row.num_tokens for row in rows])
            states /= to_device(totals, hidden.device).unsqueeze(1)
        return states

    def _finish(self, states: Tensor, params: PoolingParams, dtype: torch.dtype) -> Tensor:
        if self._config.task == "score":
            scores = self._forward.classify(states.to(dtype)).float()
            activate = params.activate and self._config.activation == "sigmoid"
            return scores.sigmoid() if activate else scores
        if params.dimensions is not None:
            states = states[:, : params.dimensions]
        return F.normalize(states, dim=1) if params.normalize else states
