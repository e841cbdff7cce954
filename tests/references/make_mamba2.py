"""Writes the golden fixture of Mamba-2, by transformers' own code.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/references/make_mamba2.py

It is made as those of ``make_gemma.py``, but every token's logits are computed over the whole
sequence again, by transformers' chunked scan, so that nothing depends on its own cache.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import make_gemma
import torch
import transformers

VALUES = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "bos_token_id": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 2,
    "num_heads": 8,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "residual_in_fp32": True,
    "state_size": 12,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 96,
}


class Mamba2ForCausalLM(transformers.Mamba2ForCausalLM):
    """Keeps the tokens that it was called with in the place of a cache."""

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, **_: Any
    ) -> SimpleNamespace:
        """Logits of the new tokens."""
        count = input_ids.shape[1]
        if past_key_values is not None:
            input_ids = torch.cat([past_key_values, input_ids], dim=1)
        logits = super().forward(input_ids, use_cache=False).logits[:, -count:]
        return SimpleNamespace(logits=logits, past_key_values=input_ids)


def main() -> None:
    torch.manual_seed(0)
    make_gemma.LENGTHS = {"one-token": 1, "short": 9, "chunks": 31, "many-chunks": 133}
    model = Mamba2ForCausalLM(transformers.Mamba2Config(**VALUES)).eval()
    make_gemma.write("mamba2-tiny", VALUES, model, "make_mamba2.py")


if __name__ == "__main__":
    main()
