"""Eight-bit floats: e4m3 weights with a scale for each row, or for each 128 of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engine_core.kernels import Fp8Weight
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.packing import MatrixModule, PackedMatrix
from engine_core.nn.quantization.fp8_checkpoint import Fp8CheckpointScheme, Fp8Method, check_value

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount


class Fp8LinearMethod(Fp8Method):
    """Weights that are quantised to :class:`Fp8Weight` once they are loaded.

    A CPU, which has no kernel for them, multiplies by the numbers that the codes stand for.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        self.on_cpu = on_cpu

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """The quantised weight."""
        matrix = Fp8Weight.quantized(weight)
        if weight.is_cuda:
            return matrix
        weight.copy_(matrix.dense())
        return super().pack(weight)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales instead of the weight, where it is not on a CPU."""
        n, k = layer.weight.shape
        return {} if self.on_cpu else {"weight": n * (k + 4)}


class Fp8Scheme(Fp8CheckpointScheme):
    """Any checkpoint's linears, quantised to e4m3 once they are loaded; not the vocabulary.

    Or those of a checkpoint whose ``quant_method`` is fp8: Hugging Face's, of 128 x 128 blocks, and
    older ones of a scale for each tensor.
    """

    takes = "linear layer has inputs and outputs in multiples of 16"
    keys = (
        *("activation_scheme", "dequantize", "expert_dtype", "fmt", "ignored_layers"),
        *("kv_cache_scheme", "modules_to_convert", "modules_to_not_convert", "quant_method"),
        *("scale_fmt", "weight_block_size"),
    )

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        given = dict(settings or {})
        for key, known in (
            ("activation_scheme", (None, "dynamic", "static")),
            ("weight_block_size", (None, [128, 128])),
            ("fmt", (None, "e4m3", "float8_e4m3fn")),
            ("expert_dtype", (None, "fp8")),
            # Powers of 2 are kept in bytes of their own type; the tensors say which they are.
            ("scale_fmt", (None, "float", "ue8m0")),
        ):
            check_value(key, given.get(key), known)

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name."""
        return settings.get("quant_method") == "fp8"

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """Any checkpoint will do."""

    def plain(self, checkpoint: Any) -> Any:
        """As it is, unless it is quantised already."""
        return checkpoint if self.settings is None else super().plain(checkpoint)

    def prepare(self, model: nn.Module) -> None:
        """Give all methods at once, unless the checkpoint is quantised already."""
        if self.settings is None:
            self.give_methods(model)

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Checkpoint:
        """Look at the tensors of a checkpoint that is quantised already."""
        return checkpoint if self.settings is None else super().match(model, checkpoint, account)

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8-bit floats, for a shape that fits."""
        if self.settings is not None:
            return super().linear_method(name, layer)
        n, k = layer.matrix_shape
        return Fp8LinearMethod(self._on_cpu) if n % 16 == k % 16 == 0 else None
