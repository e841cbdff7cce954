"""The tiny model for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

CASES = [
    ConformanceCase(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        config={
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 101,
            "n_embd": 48,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
        },
    ),
]
