"""The decoder that most families share but for their layers: rotary positions, pre-norm, a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn.attention import KVCacheLayer
from engine_core.nn.blocks import (
    DecoderLayer,
    PreNormed,
    link_layers,
    may_end,
    unlink_layer,
)
from engine_core.nn.causal_lm import CausalLM
from engine_core.nn.embedding import build_embedding, build_lm_head
from engine_core.nn.epilogue import CosSin
from engine_core.nn.loading import Weights, load_stacked_weights
from engine_core.nn.norm import RMSNorm
from engine_core.nn.rotary import (
    DynamicNTKRotaryEmbedding,
    RotaryEmbedding,
    build_rotary_embedding_from_config,
    rope_lengths,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager


class Link(Protocol):
    """A stage's place in a pipeline, and its neighbours."""

    first: bool
    last: bool

    def send(self, x: Tensor, residual: Tensor) -> None:
        """Send what a layer returned to the next stage: ``[1, T, H]`` each."""

    def receive(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the stage before; ``like [1, T, H]`` has its shape and dtype."""


class Decoder(nn.Module):
    """Token embedding, layers and final norm.

    A layer takes ``(x, residual, cos_sin, cache, attn_metadata)`` and returns ``(x, residual)``, as
    :class:`DecoderLayer` does.
    """

    def __init__(
        self,
        config: HFConfig,
        layers: list[nn.Module],
        *,
        norm: nn.Module | None = None,
        embedding_scale: float = 1.0,
    ) -> None:
        """Reads ``vocab_size`` and ``hidden_size``.

        Args:
            config: the model's.
            layers: the decoder layers in their order.
            norm: the final norm, which takes ``(x, residual)`` as :class:`RMSNorm` does; None for
                one of those, with the config's ``rms_norm_eps``.
            embedding_scale: multiplies the embeddings (Gemma), rounded to their dtype before.
        """
        super().__init__()
        self.embed_tokens = build_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm or RMSNorm(config.hidden_size, config.rms_norm_eps)
        link_layers(layers, self.norm)
        dtype = self.embed_tokens.dtype
        self.embedding_scale = torch.tensor(embedding_scale, dtype=dtype, device="cpu").item()
        self._span = range(len(layers))
        self._link: Link | None = None
        self._kept: Sequence[int] | None = None

    def cut(self, span: range, link: Link | None) -> None:
        """Keep the layers in ``span`` alone; ``link`` brings and takes what is between stages.

        It is None where all layers are kept.
        """
        self._span, self._link = span, link
        layers = [layer if i in span else nn.Identity() for i, layer in enumerate(self.layers)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            if isinstance(layer, DecoderLayer):
                # What is sent and received beside it may take a multiprocessor.
                layer.may_chain = link is None
        if link is not None and not link.last:
            unlink_layer(layers[span.stop - 1])

    def keep(self, kept: Sequence[int]) -> None:
        """Run these layers alone: for a pass of which only the launches matter."""
        self._kept = kept

    def forward(
        self,
        x: Tensor,
        cos_sins: Sequence[CosSin],
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Embeddings ``[1, T, H]`` to hidden states ``[1, T, H]``; ``cos_sins``: one per layer.

        With ``wanted [S]``, places among the T, to those of these tokens, ``[1, S, H]``.
        """
        span, link, residual = self._span, self._link, None
        if link is not None and not link.first:
            x, residual = link.receive(x)
        elif self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        layers: Sequence[nn.Module] = [*self.layers][span.start : span.stop]
        cos_sins = cos_sins[span.start : span.stop]
        if self._kept is not None:
            layers, cos_sins = [layers[i] for i in self._kept], [cos_sins[i] for i in self._kept]
            past_key_values = [past_key_values[i] for i in self._kept]
        steps = [*zip(layers, cos_sins, past_key_values, strict=True)]
        out: Any = x
        ending: Any = None
        if wanted is not None and (link is None or link.last) and may_end(layers[-1]):
            ending = steps.pop()
        for layer, cos_sin, cache in steps:
            out, residual = layer(out, residual, cos_sin, cache, attn_metadata)
        if ending is not None:
            layer, *inputs = ending
            out, residual = layer.ending(out, residual, *inputs, attn_metadata, wanted)
            wanted = None
        if link is not None and not link.last:
            assert residual is not None, "a layer returned it"
            link.send(out, residual)
        elif isinstance(out, PreNormed):
            out = out.values
        elif out.shape[1]:
            out = self.norm(out, residual)[0]
        states: Tensor = out
        return states if wanted is None else states[:, wanted]


class RotaryCausalLM(CausalLM, ABC):
    """A :class:`Decoder` under a language-model head; a family says what its layers are.

    Parameters are named as in transformers' checkpoints of Llama (``model.embed_tokens``,
    ``model.layers.0.self_attn.o_proj``, ``model.norm``, ``lm_head``), with q, k, v and gate, up
    merged.

    Attributes:
        norm_offset: that of :meth:`build_norm`, as :class:`RMSNorm` takes it; 1 in Gemma.
        stacked_weights: layers of the checkpoint that are merged, as :func:`load_stacked_weights`
            takes them.
        unused_weights: beginnings or ends of the names of tensors that the model has no use for, as
            the checkpoint has them or as :meth:`weight_name` gives them.
    """

    norm_offset = 0.0
    stacked_weights: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    # Old checkpoints store the table.
    unused_weights: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Reads ``num_hidden_layers`` and ``tie_word_embeddings``.

        What :class:`Decoder`, :meth:`build_rotary`, :meth:`build_norm` and :meth:`build_layer` read
        must be there too.
        """
        super().__init__()
        self.model = Decoder(
            config,
            [self.build_layer(config, index) for index in range(config.num_hidden_layers)],
            norm=self.build_norm(config),
            embedding_scale=self.embedding_scale(config),
        )
        self.rotary_embs = nn.ModuleList(self.build_rotary(config))
        self.lm_head = build_lm_head(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens, beside which those of pictures and sounds are put."""
        return self.model.embed_tokens

    def embedding_scale(self, config: HFConfig) -> float:
        """The factor of the embeddings; the root of ``hidden_size`` in Gemma."""
        del config
        return 1.0

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        """The rotary embedding of each layer. One that several layers have is computed once a step.

        Here all have the one that :func:`build_rotary_embedding_from_config` makes.
        """
        return [build_rotary_embedding_from_config(config)] * config.num_hidden_layers

    def build_norm(self, config: HFConfig) -> nn.Module:
        """The final norm, of ``hidden_size``; a family's layers may take theirs from here too."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=self.norm_offset)

    @abstractmethod
    def build_layer(self, config: HFConfig, index: int) -> nn.Module:
        """The decoder layer ``index``, counted from 0; usually a :class:`DecoderLayer`."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
        rope_lengths: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """``[1, T]`` to hidden states ``[1, T, H]``; with ``wanted [S]``, to those of these tokens.

        ``[1, S, H]`` then; ``wanted`` has their places among the T.
        """
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = {
            each: each(position_ids, rope_lengths) for each in dict.fromkeys(self.rotary_embs)
        }
        cos_sins = [angles[each] for each in self.rotary_embs]
        out: Tensor = self.model(x, cos_sins, past_key_values, attn_metadata, wanted)
        return out

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step."""
        inputs = super().prepare_inputs_for_generation(past_key_values, inputs_embeds, context)
        assert context is not None, "the runner passes the step's context"
        if any(isinstance(rotary, DynamicNTKRotaryEmbedding) for rotary in self.rotary_embs):
            inputs["rope_lengths"] = rope_lengths(context)
        return inputs

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in transformers' naming."""
        load_stacked_weights(
            self, weights, self.stacked_weights, rename=self.weight_name, ignore=self.unused_weights
        )

    def weight_name(self, name: str) -> str:
        """A tensor's name in transformers' naming, of the one that the checkpoint has."""
        return name
