"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019), as transformers computes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.kernels import Segments
from engine_core.nn import (
    MLP,
    EncoderAttention,
    EncoderLayers,
    LayerNorm,
    Weights,
    build_embedding,
    build_replicated_linear,
    empty_parameter,
    load_stacked_weights,
    step_segments,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager


class Embeddings(nn.Module):
    """The normalised sum of the embeddings of token, position and token type."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.first_position = config.first_position
        self.word_embeddings = build_embedding(config.vocab_size, size)
        self.position_embeddings = empty_parameter(config.max_position_embeddings, size)
        self.token_type_embeddings = empty_parameter(config.type_vocab_size, size)
        # RoBERTa has one type, whatever a tokenizer says of the texts of a pair.
        self.has_types = config.type_vocab_size > 1
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor, types: Tensor | None) -> Tensor:
        """``[1, T]`` each to ``[1, T, H]``; all tokens have type 0 if ``types`` is None."""
        table = self.position_embeddings
        if self.first_position:
            position_ids = self._counted(input_ids, position_ids)
        if types is None or not self.has_types:
            others = F.embedding(position_ids, table + self.token_type_embeddings[0])
        else:
            others = F.embedding(position_ids, table) + F.embedding(
                types, self.token_type_embeddings
            )
        out: Tensor = self.LayerNorm(self.word_embeddings(input_ids), others)[0]
        return out

    def _counted(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Positions as RoBERTa has them: a padding token that a text names is not counted."""
        padding = self.first_position - 1
        padded = input_ids == padding
        # Of all tokens of the step; those before a token's own prompt are taken off again.
        passed = padded.cumsum(1) - padded.int()
        first = torch.arange(input_ids.shape[1], device=input_ids.device) - position_ids
        counted = position_ids - passed + passed.gather(1, first) + self.first_position
        out: Tensor = counted.masked_fill(padded, padding)
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        self.attention = EncoderAttention(size, heads, size // heads)
        self.attention_norm = LayerNorm(size, config.layer_norm_eps)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, bias=True)
        self.mlp_norm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        x = self.attention_norm(self.attention(x, segments), x)[0]
        out: Tensor = self.mlp_norm(self.mlp(x), x)[0]
        return out


class BertModel(nn.Module):
    """BERT: states of all tokens, each of which sees all others of its prompt.

    Attributes:
        encoder_only: it keeps no cache and chooses no tokens.
        prefix: of the parameters in a checkpoint of a model with a head.
    """

    encoder_only = True
    prefix = "bert."

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layer = EncoderLayers(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attn_metadata: AttentionMetadata,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """``[1, T]`` to hidden states ``[1, T, H]``."""
        segments = step_segments(attn_metadata)
        x: Tensor = self.embeddings(input_ids, position_ids, token_type_ids)
        out: Tensor = self.layer(x, segments)
        return out

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[Any],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step."""
        assert context is not None, "the runner passes the step's context"
        return {
            "input_ids": context.input_ids,
            "position_ids": context.position_ids,
            "attn_metadata": context.attn_metadata,
            "token_type_ids": context.token_state.get("token_type_ids"),
        }

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in transformers' naming, with a head or without."""
        load_stacked_weights(
            self,
            weights,
            {"query": ("qkv_proj", "q"), "key": ("qkv_proj", "k"), "value": ("qkv_proj", "v")},
            rename=self._renamed,
            ignore=(*self.unused, "position_ids", "token_type_ids"),
        )

    # Of a masked language model, and the pooled state that BERT was also trained with.
    unused: tuple[str, ...] = ("cls.", "lm_head.", "pooler.")

    def _renamed(self, name: str) -> str:
        name = name.removeprefix(self.prefix)
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        return name


_NAMES = (
    ("encoder.layer.", "layer."),
    (".attention.self.", ".attention."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".mlp_norm."),
    ("position_embeddings.weight", "position_embeddings"),
    ("token_type_embeddings.weight", "token_type_embeddings"),
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
    ("_norm.gamma", "_norm.weight"),
    ("_norm.beta", "_norm.bias"),
)


class RobertaModel(BertModel):
    """RoBERTa and XLM-RoBERTa: BERT with other positions, which the config counts."""

    prefix = "roberta."


class BertForSequenceClassification(BertModel):
    """BERT as a cross encoder: one score of the first token's state.

    Attributes:
        pooling: the token whose state :meth:`classify` takes.
    """

    pooling = "cls"
    unused: tuple[str, ...] = ("cls.",)

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, ctx_mgr, dtype, device)
        self.dense = build_replicated_linear(config.hidden_size, config.hidden_size, bias=True)
        self.out_proj = build_replicated_linear(config.hidden_size, 1, bias=True)

    def classify(self, states: Tensor) -> Tensor:
        """``[S, H]`` to scores ``[S, 1]``."""
        scores: Tensor = self.out_proj(torch.tanh(self.dense(states)))
        return scores

    def _renamed(self, name: str) -> str:
        name = super()._renamed(name)
        for theirs, ours in (("pooler.dense.", "dense."), ("classifier.", "out_proj.")):
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        return name


class RobertaForSequenceClassification(BertForSequenceClassification):
    """RoBERTa as a cross encoder, such as bge-reranker."""

    prefix = "roberta."
    unused = ("lm_head.", "pooler.")

    def _renamed(self, name: str) -> str:
        return BertModel._renamed(self, name).removeprefix("classifier.")
