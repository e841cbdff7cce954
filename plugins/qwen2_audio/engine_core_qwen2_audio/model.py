"""Qwen2-Audio (Chu et al., 2024), as transformers computes it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.kernels import Segments, attend_segments
from engine_core.nn import (
    AroundTextModel,
    LayerNorm,
    Weights,
    build_colwise_linear,
    build_replicated_linear,
    build_rowwise_linear,
    empty_parameter,
    finished,
    stacked_loader,
)
from engine_core.step_context import StepContextManager


class AudioAttention(nn.Module):
    """Attention between the positions of a sound, in both directions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = build_replicated_linear(width, width, bias=True)
        self.k_proj = build_replicated_linear(width, width)
        self.v_proj = build_replicated_linear(width, width, bias=True)
        self.out_proj = build_replicated_linear(width, width, bias=True)

    def forward(self, x: Tensor, sounds: Segments) -> Tensor:
        """``[N, E]`` to ``[N, E]``."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.out_proj(attend_segments(q, k, v, sounds).flatten(1))
        return out


class AudioLayer(nn.Module):
    """A pre-norm layer of the encoder. The ranks share its feed-forward part."""

    def __init__(self, audio: HFConfig) -> None:
        super().__init__()
        width, inner = audio.d_model, audio.encoder_ffn_dim
        self.self_attn = AudioAttention(width, audio.encoder_attention_heads)
        self.self_attn_layer_norm = LayerNorm(width)
        self.fc1 = build_colwise_linear(width, inner, bias=True)
        self.fc2 = build_rowwise_linear(inner, width, bias=True)
        self.final_layer_norm = LayerNorm(width)

    def forward(self, x: Tensor, sounds: Segments) -> Tensor:
        """``[N, E]`` to ``[N, E]``."""
        normed, x = self.final_layer_norm(self.self_attn(self.self_attn_layer_norm(x), sounds), x)
        x = x + self.fc2(F.gelu(self.fc1(normed)))
        if x.dtype == torch.float16:
            most = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-most, most)
        return x


class Convolution(nn.Module):
    """A convolution over time with a kernel of three: a linear of each three neighbours."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = build_replicated_linear(3 * channels, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, channels]`` to ``[ceil(T / stride), E]``, with zeros before the first and after
        the last.
        """
        around = F.pad(x, (0, 0, 1, 1)).unfold(0, 3, self.stride)
        out: Tensor = self.conv(around.flatten(1))
        return out


class Positions(nn.Module):
    """A learned or, as published, sinusoidal vector for each position."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = empty_parameter(count, width)


class AudioTower(nn.Module):
    """Whisper's encoder, whose positions are averaged in pairs; parameters are named as there."""

    def __init__(self, audio: HFConfig) -> None:
        super().__init__()
        width = audio.d_model
        self.conv1 = Convolution(audio.num_mel_bins, width, 1)
        self.conv2 = Convolution(width, width, 2)
        self.embed_positions = Positions(audio.max_source_positions, width)
        self.layers = nn.ModuleList([AudioLayer(audio) for _ in range(audio.encoder_layers)])
        self.layer_norm = LayerNorm(width)

    def forward(self, sounds: Sequence[Tensor]) -> list[Tensor]:
        """Features ``[bins, frames]`` of each sound to its encoding ``[frames // 4, E]``."""
        return finished(self.parts(sounds))

    def parts(self, sounds: Sequence[Tensor]) -> Generator[float, None, list[Tensor]]:
        """As :meth:`forward`; says after each layer which share of them is done."""
        begun = [self._begin(features) for features in sounds]
        lengths = [len(x) for x in begun]
        x = torch.cat(begun)
        # A sound's embeddings do not depend on those beside it.
        segments = Segments(((1, length) for length in lengths), x.device)
        for number, layer in enumerate(self.layers):
            x = layer(x, segments)
            yield (number + 1) / len(self.layers)
        pooled = [
            sound[: len(sound) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for sound in x.split(lengths)
        ]
        normed: Tensor = self.layer_norm(torch.cat(pooled))
        return list(normed.split([len(sound) for sound in pooled]))

    def _begin(self, features: Tensor) -> Tensor:
        """``[bins, frames]`` to ``[frames // 2, E]``; an odd frame is there for its neighbour."""
        x = features.T.to(self.embed_positions.weight.dtype)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x))))[: features.shape[1] // 2]
        return x + self.embed_positions.weight[: len(x)]


class Projector(nn.Module):
    """From the encoder's width to the text model's."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = build_replicated_linear(width, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, E]`` to ``[N, H]``."""
        out: Tensor = self.linear(x)
        return out


class Qwen2AudioForConditionalGeneration(AroundTextModel):
    """A text model, Qwen2, with an encoder that makes embeddings of sounds."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        text, audio = HFConfig(config.text_config), HFConfig(config.audio_config)
        super().__init__(text, ctx_mgr, dtype, device)
        self.audio_tower = AudioTower(audio)
        self.multi_modal_projector = Projector(audio.d_model, text.hidden_size)

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[frames // 4, H]`` of each of some sounds, computed together.

        Args:
            kind: "audio".
            items: ``features [bins, frames]`` of each.
        """
        return finished(self.embed_media_parts(kind, items))

    def embed_media_parts(
        self, kind: str, items: Sequence[Mapping[str, Tensor]]
    ) -> Generator[float, None, list[Tensor]]:
        """As :meth:`embed_media`; says after each layer which share of the work is done."""
        del kind
        encoded = yield from self.audio_tower.parts([item["features"] for item in items])
        embeddings: Tensor = self.multi_modal_projector(torch.cat(encoded))
        return list(embeddings.split([len(sound) for sound in encoded]))

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in any naming that transformers has written.

        These are the published one, that of its modules since 5.10
        (``save_original_format=False``), and what 5.10 to 5.22 take for the published one.
        """

        def published() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                for theirs, ours in _NAMES:
                    name = name.replace(theirs, ours) if name.startswith(theirs) else name
                # A convolution's kernel as the weight of a linear.
                yield name, tensor.flatten(1) if name.endswith("conv.weight") else tensor

        self.load_text_weights(published(), "language_model.", stacked_loader(self, {}))


# Of transformers 5, and of convolutions.
_NAMES = (
    ("language_model.model.model.", "language_model.model."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("audio_tower.conv1.", "audio_tower.conv1.conv."),
    ("audio_tower.conv2.", "audio_tower.conv2.conv."),
)
