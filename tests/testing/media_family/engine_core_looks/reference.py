"""The family as plain torch computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Eye(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.own = nn.Linear(3, hidden_size)
        self.mean = nn.Linear(3, hidden_size, bias=False)


class Reference(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        llama = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
        self.model, self.lm_head = llama.model, llama.lm_head
        self.eye = Eye(config["hidden_size"])
        self.rows = nn.Embedding(8, config["hidden_size"])
        self.counts = nn.Embedding(4, config["hidden_size"])

    def forward(
        self, input_ids: Tensor, pixels: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        embeds = self.model.embed_tokens(input_ids)[0]
        length = len(embeds)
        numbers, rows = torch.ones(length, dtype=torch.int64), torch.zeros(length).long()
        count = 0 if sizes is None else len(sizes)
        start = first = 0
        for high, wide in [] if sizes is None else sizes.tolist():
            while input_ids[0, start] != 3:
                start += 1
            own = pixels[first : first + high * wide]
            end = start + high * wide
            embeds[start:end] = self.eye.own(own) + self.eye.mean(own.mean(0))
            rows[start:end] = torch.arange(high).repeat_interleave(wide)
            numbers[start + 1 : end] = 0
            start, first = end, first + high * wide
        embeds = embeds + self.rows(rows) + self.counts(torch.tensor(count))
        positions = numbers.cumsum(0) - 1
        out = self.model(
            inputs_embeds=embeds[None],
            position_ids=positions[None],
            # Without one, positions that stay are taken for the beginning of another sequence.
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            use_cache=False,
        )
        return self.lm_head(out.last_hidden_state)
