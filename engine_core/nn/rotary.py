"""Rotary position embeddings (Su et al., 2021) and the ways to stretch them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.kernels import apply_rotary, rotary_angles
from engine_core.nn.module import Module


class RotaryEmbedding(nn.Module):
    """Cosines and sines for token positions.

    Attributes:
        attention_factor: multiplies both (YaRN).
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, attention_factor: float = 1.0) -> None:
        """``inv_freq``: ``[half]`` float32 angles a position, made on the CPU."""
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_factor = attention_factor

    def forward(
        self, position_ids: Tensor, rope_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions ``[..., T]`` to cos and sin ``[..., T, half]``, float32.

        A leading dimension of 1, as ``position_ids`` have, is dropped. ``rope_lengths`` is only
        for :class:`DynamicNTKRotaryEmbedding`.
        """
        del rope_lengths
        if position_ids.dim() > 1 and position_ids.shape[0] == 1:
            position_ids = position_ids[0]
        return rotary_angles(position_ids, self.inv_freq, self.attention_factor)


class DynamicNTKRotaryEmbedding(RotaryEmbedding):
    """A base that grows with the length of the sequence.

    Transformers recomputes the base at each step beyond the limit, but keeps cached keys as they
    were rotated: its result depends on how a sequence was cut into steps. Here the length is a
    property of the token, ``max(prompt length, position + 1)``: the same angles as theirs when a
    prompt is computed at once and decoded token by token, and the same whatever the chunks,
    batches and recomputations.
    """

    def __init__(self, rotary_dim: int, base: float, factor: float, max_position: int) -> None:
        super().__init__(_inv_freq(rotary_dim, base))
        self.rotary_dim = rotary_dim
        self.base = base
        self.factor = factor
        self.max_position = max_position
        self.register_buffer("exponents", _exponents(rotary_dim), persistent=False)

    exponents: Tensor

    def forward(
        self, position_ids: Tensor, rope_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions and ``rope_lengths`` ``[T]`` to cos and sin ``[T, half]``, float32.

        Raises:
            ValueError: no ``rope_lengths`` were given.
        """
        if rope_lengths is None:
            raise ValueError(
                "dynamic rope scaling needs rope_lengths; have prepare_inputs_for_generation pass "
                "nn.rope_lengths(context)"
            )
        length = rope_lengths.clamp(min=self.max_position).float().unsqueeze(-1)
        stretch = self.factor * length / self.max_position - (self.factor - 1)
        base = self.base * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        inv_freq = 1.0 / base**self.exponents
        angles = position_ids.reshape(-1, 1).float() * inv_freq
        return angles.cos(), angles.sin()


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Three positions a token, in time, height and width, of which each angle uses one (M-RoPE).

    Qwen2-VL (Wang et al., 2024) gives the first ``sections[0]`` angles to time, and so on; Qwen3-VL
    deals them out in turn, and what is left over to time. A token of text has three equal
    positions, and is rotated as by :class:`RotaryEmbedding`.
    """

    axes: Tensor

    def __init__(self, inv_freq: Tensor, sections: Sequence[int], *, interleaved: bool) -> None:
        """``sections``: how many of the ``half`` angles go to each axis.

        Raises:
            ValueError: they are not three that add up to ``half``.
        """
        super().__init__(inv_freq)
        half = inv_freq.shape[0]
        if len(sections) != 3 or sum(sections) != half:
            raise ValueError(
                f"mrope_section must be three numbers that add up to {half}, half of the rotary "
                f"dimensions; got {list(sections)}"
            )
        if interleaved:
            axes = torch.zeros(half, dtype=torch.int64, device="cpu")
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        else:
            axes = torch.arange(3, device="cpu").repeat_interleave(
                torch.tensor(list(sections), device="cpu")
            )
        self.register_buffer("axes", axes, persistent=False)

    def forward(
        self, position_ids: Tensor, rope_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions ``[3, T]``, or ``[1, T]`` of text, to cos and sin ``[T, half]``, float32."""
        if position_ids.shape[0] == 1:
            return super().forward(position_ids, rope_lengths)
        angles = position_ids[self.axes].T.float() * self.inv_freq
        return angles.cos(), angles.sin()


def rope_lengths(context: Any) -> Tensor:
    """``[T]``: ``max(prompt_len, position + 1)`` of each token of a ``StepContext``."""
    prompt_len: Tensor = context.row_state["prompt_len"][context.row_ids]
    return torch.maximum(prompt_len, context.position_ids[0] + 1)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim


def _inv_freq(rotary_dim: int, base: float) -> Tensor:
    return 1.0 / base ** _exponents(rotary_dim)


Scaling = Mapping[str, Any]


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"rope_scaling needs a number {key!r}, got {value!r} in {dict(scaling)}")
    return float(value)


def _positive(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = _number(scaling, key, default)
    if not 0 < value < math.inf:
        raise ValueError(
            f"rope_scaling needs a positive number {key!r}, got {value!r} in {dict(scaling)}"
        )
    return value


def _llama3(dim: int, base: float, max_position: int, scaling: Scaling) -> RotaryEmbedding:
    """Low frequencies are divided by the factor, high ones kept, those between are blended."""
    factor = _positive(scaling, "factor")
    low = _positive(scaling, "low_freq_factor")
    high = _positive(scaling, "high_freq_factor")
    original = _positive(scaling, "original_max_position_embeddings", max_position)
    inv_freq = _inv_freq(dim, base)
    turns = original * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return RotaryEmbedding(keep * inv_freq + (1 - keep) * inv_freq / factor)


def _yarn(dim: int, base: float, max_position: int, scaling: Scaling) -> RotaryEmbedding:
    """YaRN (Peng et al., 2023), with the parameters that transformers reads."""
    original = _positive(scaling, "original_max_position_embeddings", max_position)
    factor = _positive(scaling, "factor", max_position / original)
    mscale, mscale_all = _number(scaling, "mscale", 0.0), _number(scaling, "mscale_all_dim", 0.0)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else None
    attention_factor = _number(
        scaling, "attention_factor", temperature(1.0) if both is None else both
    )
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(
            f"rope_scaling needs true or false for 'truncate', got {truncate!r} in {dict(scaling)}"
        )

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(_positive(scaling, "beta_fast", 32))
    high = dimension_of(_positive(scaling, "beta_slow", 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    interpolate = ((index - low) / (high - low)).clamp(0.0, 1.0)
    inv_freq = _inv_freq(dim, base)
    return RotaryEmbedding(
        inv_freq / factor * interpolate + inv_freq * (1 - interpolate), attention_factor
    )


def _multimodal(dim: int, base: float, max_position: int, scaling: Scaling) -> RotaryEmbedding:
    del max_position
    sections = scaling.get("mrope_section")
    if not isinstance(sections, Sequence) or not all(isinstance(size, int) for size in sections):
        raise ValueError(f"rope_scaling needs a list 'mrope_section', got {dict(scaling)}")
    return MultimodalRotaryEmbedding(
        _inv_freq(dim, base), sections, interleaved=bool(scaling.get("mrope_interleaved", False))
    )


_VARIANTS: dict[str, Callable[[int, float, int, Scaling], RotaryEmbedding]] = {
    "default": lambda dim, base, *_: RotaryEmbedding(_inv_freq(dim, base)),
    "linear": lambda dim, base, _, scaling: RotaryEmbedding(
        _inv_freq(dim, base) / _positive(scaling, "factor")
    ),
    "dynamic": lambda dim, base, max_position, scaling: DynamicNTKRotaryEmbedding(
        dim, base, _positive(scaling, "factor"), max_position
    ),
    "llama3": _llama3,
    "yarn": _yarn,
    "mrope": _multimodal,
}


def build_rotary_embedding(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    max_position_embeddings: int = 2048,
    scaling: Scaling | None = None,
) -> RotaryEmbedding:
    """The rotary embedding of ``rotary_dim`` dimensions.

    Args:
        rotary_dim: dimensions of a head that rotate; even.
        base: of the angles, ``rope_theta``.
        max_position_embeddings: the length that the model was trained for.
        scaling: ``rope_scaling`` as checkpoints write it, with ``rope_type`` or the older ``type``.

    Raises:
        ValueError: the type is not known, or one of its numbers is missing.
    """
    scaling = scaling or {}
    variant = scaling.get("rope_type", scaling.get("type", "default"))
    if variant == "default" and "mrope_section" in scaling:
        variant = "mrope"  # as newer checkpoints write it
    if variant not in _VARIANTS:
        raise ValueError(f"rope_scaling type {variant!r} is not one of {', '.join(_VARIANTS)}")
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, got {rotary_dim}")
    return _VARIANTS[variant](rotary_dim, base, max_position_embeddings, scaling)


def build_rotary_embedding_from_config(config: Any) -> RotaryEmbedding:
    """The rotary embedding that a config describes.

    Reads ``head_dim`` (or ``hidden_size / num_attention_heads``), ``partial_rotary_factor``,
    ``rope_theta``, ``rope_scaling`` and the newer ``rope_parameters``, and
    ``max_position_embeddings``. What the scaling holds itself counts before what stands beside it.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or parameters
    theta = scaling.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    partial = (
        scaling.get("partial_rotary_factor")
        or getattr(config, "partial_rotary_factor", None)
        or 1.0
    )
    return build_rotary_embedding(
        int(head_dim * partial),
        base=theta,
        max_position_embeddings=config.max_position_embeddings,
        scaling=scaling,
    )


class ApplyRotaryEmb(Module):
    """Rotates queries and keys in place."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``q [T, Hq, D]`` and ``k [T, Hk, D]`` by ``cos`` and ``sin [T, half]``."""
        return apply_rotary(q, k, cos, sin, interleaved=self.interleaved)
