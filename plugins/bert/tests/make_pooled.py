"""Make ``pooled``: a tiny model as sentence-transformers saves it, and the vectors that it gives.

    python plugins/bert/tests/make_pooled.py

It needs ``pip install sentence-transformers`` (made with 6.2.0). All ways of pooling are
concatenated, and two dense layers and a normalisation follow; ``expected.json`` also has each way
of pooling alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[2] / "tests"))
from tiny_bert import make  # noqa: E402

TEXTS = ["rain", "the cat sat on the mat", "a dog ran far and far", "old sea new sun red blue"]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def main() -> None:
    folder = HERE / "pooled"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    make(folder, "bert", **sizes, num_hidden_layers=1)
    body = Transformer(str(folder))
    torch.manual_seed(0)
    dense = [
        Dense(16 * len(MODES), 12, activation_function=torch.nn.Tanh()),
        Dense(12, 8, bias=False, activation_function=torch.nn.Identity()),
    ]
    modules = [body, Pooling(16, MODES), *dense, Normalize()]
    whole = SentenceTransformer(modules=modules, device="cpu")
    expected = {"all": whole.encode(TEXTS).tolist()}
    for mode in MODES:
        model = SentenceTransformer(modules=[body, Pooling(16, mode)], device="cpu")
        expected[mode] = model.encode(TEXTS).tolist()
    whole.save(str(folder), create_model_card=False)
    (folder / "expected.json").write_text(json.dumps({"texts": TEXTS, "vectors": expected}))


if __name__ == "__main__":
    main()
