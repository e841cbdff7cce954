"""Tiny models of this family, for the conformance kit. Imports no torch.

Transformers has no class for them: the results are those of the original code, in golden files that
come with the package.
"""

from pathlib import Path

from engine_core.testing import ConformanceCase

_GOLDEN = Path(__file__).parent / "golden"

CASES = [
    ConformanceCase(
        name="chatglm1",
        architecture="ChatGLM1ForConditionalGeneration",
        reference=_GOLDEN / "chatglm1-tiny",
        unused_weights=("rotary_emb.inv_freq",),
    ),
    ConformanceCase(
        name="chatglm2",
        architecture="ChatGLM2ForConditionalGeneration",
        reference=_GOLDEN / "chatglm2-tiny",
        unused_weights=("rotary_pos_emb.inv_freq",),
    ),
    ConformanceCase(
        name="chatglm3",
        architecture="ChatGLM2ForConditionalGeneration",
        reference=_GOLDEN / "chatglm3-tiny",
        unused_weights=("rotary_pos_emb.inv_freq",),
    ),
]
