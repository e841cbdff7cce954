"""A Llama whose even layers are a recurrence; a block of the cache has the state at its end.

Written as an author would outside of the engine: from public names, with the recurrence in plain
torch. The other layers attend, so that two specs share one pool.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine_core.configs import CacheSpec, CacheTensor, HFConfig
from engine_core.nn import (
    CachedLayer,
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    build_rowwise_linear,
)
from engine_core.step_context import AttentionMetadata
from engine_core_llama.config import LlamaConfigBuilder

DECAY = 0.9


class StateSpec(CacheSpec):
    """The state after the last token of a block.

    Attributes:
        width: numbers of the state.
    """

    width: int

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """One state, whatever the number of tokens."""
        return (CacheTensor(name="state", shape=(self.width,), dtype="float32"),)

    def first_needed(self, position: int) -> int:
        """The token before: its block has the state."""
        return max(0, position - 1)


class Recurrence(CachedLayer):
    """``state = DECAY * state + x``, token by token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def cache_spec(self) -> StateSpec:
        """A state for each block."""
        return StateSpec(width=self.width)

    def forward(self, x: Tensor, cache: KVCacheLayer, metadata: AttentionMetadata) -> Tensor:
        """``x [T, width]`` to the states after each token."""
        (states,) = cache
        tables = metadata.groups[self.group_id].block_tables
        out = x.new_empty(x.shape)
        starts = metadata.query_start.tolist()
        for row, length in enumerate(metadata.kv_lens.tolist()):
            first = length - (starts[row + 1] - starts[row])
            state = x.new_zeros(self.width)
            if first > 0:
                state = states[tables[row, (first - 1) // self.block_size]].clone()
            for place, position in enumerate(range(first, length), starts[row]):
                out[place] = state = DECAY * state + x[place]
                # In the place of the state before, where this is not the block's first token.
                states[tables[row, position // self.block_size]] = state
        return out


class Mixer(nn.Module):
    """A recurrence and a linear, in the place of attention."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.recur = Recurrence(config.hidden_size)
        self.o_proj = build_rowwise_linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """``x [1, T, H]`` to ``[1, T, H]``."""
        out: Tensor = self.o_proj(self.recur(x[0], cache, metadata).unsqueeze(0))
        return out


class RecurrentLlama(RotaryCausalLM):
    """Llama with a recurrence in every other layer."""

    # A step that runs twice moves the states on twice.
    support_cuda_graph = False

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """Even layers recur."""
        mixer = (
            Mixer(config)
            if index % 2 == 0
            else SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
            )
        )
        return DecoderLayer(
            mixer,
            GatedMLP(config.hidden_size, config.intermediate_size),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )


class RecurrentLlamaBuilder(LlamaConfigBuilder):
    """Llama's config under the name of this model."""

    architecture = "RecurrentLlama"


MODULE_MAP = {"RecurrentLlama": "RecurrentLlama"}
CONFIG_BUILDERS = [RecurrentLlamaBuilder]
