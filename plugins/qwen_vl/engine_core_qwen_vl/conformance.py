"""A tiny model of this family, for the conformance kit. Imports no torch.

Transformers has no class for it: the results are those of the original code, in golden files that
come with the package.
"""

from pathlib import Path

from engine_core.testing import ConformanceCase

CASES = [
    ConformanceCase(
        name="qwen-vl",
        architecture="QWenLMHeadModel",
        reference=Path(__file__).parent / "golden" / "qwenvl1-ntk-logn",
        unused_weights=("rotary_emb.inv_freq",),
    ),
]
