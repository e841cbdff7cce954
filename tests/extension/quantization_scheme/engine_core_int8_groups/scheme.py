"""A checkpoint's linears as ``codes * scales``, multiplied by plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.errors import ConfigError, OptionError
from engine_core.nn import Linear, LinearMethod, SiluAndMul
from engine_core.nn.epilogue import Activated, Call, Epilogue
from engine_core.nn.quantization import QuantizationScheme


class Int8GroupsScheme(QuantizationScheme):
    """Reads checkpoints whose ``quantization_config`` has the ``quant_method`` int8_groups.

    Every linear is quantised but those whose names end in one of ``ignore``; the vocabulary is not.
    """

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        given = dict(settings or {})
        size = given.pop("group_size", 32)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"config.json: quantization_config.group_size is {size!r}")
        self.group_size = size
        self.ignore = tuple(given.pop("ignore", ()))
        unknown = sorted(given.keys() - {"quant_method"})
        if unknown:
            raise ConfigError(f"config.json: quantization_config has unknown keys {unknown}")

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name."""
        return settings.get("quant_method") == "int8_groups"

    def check_checkpoint(self, checkpoint: Any, model: str) -> None:
        """The option alone quantises nothing."""
        if checkpoint.hf_config.get("quantization_config") is None:
            raise OptionError(
                f"quantization {self.name!r} is for checkpoints that are quantised so, and {model} "
                "is not; leave it out"
            )

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Codes and scales."""
        return None if name.endswith(self.ignore) else Int8GroupsMethod(self.group_size)


class Int8GroupsMethod(LinearMethod):
    """Codes ``qweight [in, out]`` int8 and ``scales [in / group, out]`` float32.

    A gated SiLU is fused; other epilogues are left to the core.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """The two parameters, whose outputs lie in dimension 1."""
        codes = torch.empty(in_features, out_features, dtype=torch.int8, device=device)
        layer.add_parameter("qweight", codes, output_dim=1, input_dim=0)
        groups = -(-in_features // self._group_size)
        scales = torch.empty(groups, out_features, dtype=torch.float32, device=device)
        layer.add_parameter(
            "scales", scales, output_dim=1, input_dim=0, group_size=self._group_size
        )

    def process_after_load(self, layer: Linear) -> None:
        """Nothing is repacked."""

    def apply(self, layer: Linear, x: Any, bias: Tensor | None) -> Tensor:
        """Dequantise, then multiply."""
        codes, scales = layer.get_parameter("qweight"), layer.get_parameter("scales")
        spread = scales.repeat_interleave(self._group_size, dim=0)[: codes.shape[0]]
        out = x @ (codes * spread).to(x.dtype)
        return out if bias is None else out + bias

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        """None for a gated SiLU."""
        if isinstance(epilogue, Activated) and isinstance(epilogue.module, SiluAndMul):
            return None
        return super().declined(layer, epilogue, call)

    def apply_with(self, layer: Linear, x: Any, epilogue: Epilogue, *operands: Any) -> Tensor:
        """The product of gate and up, and ``silu(gate) * up``."""
        gate, up = self.apply(layer, x, layer.bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
