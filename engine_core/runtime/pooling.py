"""Vectors and scores of a step's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.checkpoint.bin_file import BinFile
from engine_core.checkpoint.safetensors_file import SafetensorsFile
from engine_core.configs import PoolingConfig, PoolingParams
from engine_core.configs.pooling import DenseActivation, DenseConfig
from engine_core.errors import ConfigError
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.platform import to_device
from engine_core.steps import PlanRow

_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


class _Dense:
    """A linear layer and its activation, in float32 on the device of what it is given."""

    def __init__(self, config: DenseConfig) -> None:
        """Read the weights; see :func:`read_dense`."""
        folder = Path(config.folder)
        safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
        if not safe.exists() and not pickled.exists():
            raise ConfigError(f"{folder} has neither {safe.name} nor {pickled.name}")
        file = SafetensorsFile(safe) if safe.exists() else BinFile(pickled)
        self._tensors = {name: tensor.float().clone() for name, tensor in file.tensors()}
        wanted = {"linear.weight": [config.out_features, config.in_features]}
        if config.bias:
            wanted["linear.bias"] = [config.out_features]
        given = {name: list(tensor.shape) for name, tensor in self._tensors.items()}
        if given != wanted:
            raise ConfigError(f"{folder} has the tensors {given}; its config.json says {wanted}")
        self._activate = _ACTIVATIONS[config.activation]

    def __call__(self, states: Tensor) -> Tensor:
        """``[S, in_features]`` to ``[S, out_features]``."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor.to(states.device)  # in the first step
        weight, bias = self._tensors["linear.weight"], self._tensors.get("linear.bias")
        return self._activate(F.linear(states, weight, bias))


def read_dense(config: PoolingConfig) -> list[Callable[[Tensor], Tensor]]:
    """The layers that follow the pooling, with their weights; each takes and gives ``[S, D]``.

    Raises:
        ConfigError: one has no weights, or not of its config's shapes; names its folder.
        CheckpointError: they cannot be read.
    """
    return [_Dense(each) for each in config.dense]


class Pooler:
    """Pools each row's hidden states, over as many steps as its prompt takes.

    Args:
        forward: the model; it has ``classify`` if it is to score.
        config: how to pool.
    """

    def __init__(self, forward: ForwardPass, config: PoolingConfig) -> None:
        self._forward = forward
        self._config = config
        # What earlier steps left of unfinished prompts, by row and kind: a sum, say.
        self._begun: dict[tuple[int, str], Tensor] = {}
        self._dense = read_dense(config)

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
        """The pooled state of each row so far, ``[R, H]`` float32 for each kind, side by side."""
        return torch.cat([self._of_kind(kind, rows, hidden) for kind in self._config.kinds], 1)

    def _of_kind(self, kind: str, rows: Sequence[PlanRow], hidden: Tensor) -> Tensor:
        """Those of one kind; sums are divided at the end."""
        lengths = torch.tensor([row.num_tokens for row in rows])
        ends = lengths.cumsum(0)
        if kind == "last":
            return hidden[to_device(ends - 1, hidden.device)].float()
        if kind == "cls":
            states = hidden[to_device(ends - lengths, hidden.device)].float()
        else:
            values, how = hidden.float(), "max" if kind == "max" else "sum"
            if kind == "weighted_mean":
                spans = [range(row.start + 1, row.start + row.num_tokens + 1) for row in rows]
                weights = torch.tensor([float(place) for span in spans for place in span])
                values = values * to_device(weights, hidden.device).unsqueeze(1)
            sizes = to_device(lengths, hidden.device)
            states = torch.segment_reduce(values, how, lengths=sizes, axis=0)
        for place, row in enumerate(rows):
            if row.start:
                before = self._begun.pop((row.row, kind))
                if kind == "max":
                    states[place] = states[place].maximum(before)
                else:
                    states[place] = before if kind == "cls" else states[place] + before
            if not row.sample:
                self._begun[row.row, kind] = states[place].clone()
        if kind in ("mean", "mean_sqrt", "weighted_mean"):
            totals = torch.tensor([float(row.start + row.num_tokens) for row in rows])
            if kind == "mean_sqrt":
                totals = totals.sqrt()
            elif kind == "weighted_mean":
                totals = totals * (totals + 1) / 2
            states /= to_device(totals, hidden.device).unsqueeze(1)
        return states

    def _finish(self, states: Tensor, params: PoolingParams, dtype: torch.dtype) -> Tensor:
        if self._config.task == "score":
            scores = self._forward.classify(states.to(dtype)).float()
            activate = params.activate and self._config.activation == "sigmoid"
            return scores.sigmoid() if activate else scores
        for layer in self._dense:
            states = layer(states)
        if params.dimensions is not None:
            states = states[:, : params.dimensions]
        states = F.normalize(states, dim=1) if params.normalize else states
        cut = self._config.cut if params.dimensions is None else None
        return states if cut is None else states[:, :cut]
