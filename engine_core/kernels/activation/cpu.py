"""The gated activations on a CPU: compiled where possible, else composed of torch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels import compiled


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of ``x [..., 2 * I]``; "silu", "gelu_tanh" or "gelu"."""
    if activation != "gelu" and compiled.takes(x):
        out: Tensor = compiled.kernels("activation").act_and_mul(x, activation)
        return out
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        # In float32 it is a new tensor too: silu's own result.
        gate32 = F.silu(gate.float(), inplace=gate.itemsize < 4)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        gate32 = F.gelu(gate.float(), approximate=approximate)
    return gate32.mul_(up).to(x.dtype)
