"""all-MiniLM-L6-v2 itself: sentences as transformers embeds them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from engine_core import LLM, PoolingParams

REPOSITORY = Path(__file__).parents[3]
MINILM = REPOSITORY / ".cache" / "models" / "all-MiniLM-L6-v2"


def sentences(count: int) -> list[str]:
    """Random words, from 2 to 12 in a sentence."""
    vocab = json.loads((MINILM / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word, index in vocab.items() if index > 2000 and word.isalpha()]
    chosen = random.Random(1)
    return [" ".join(chosen.choices(words, k=chosen.randint(2, 12))) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_sentences_are_embedded_as_by_transformers(count: int) -> None:
    texts = sentences(count)
    with LLM(MINILM) as llm:
        ours = np.stack([output.outputs.vector for output in llm.embed(texts)])
        raw = llm.embed(texts[:2], PoolingParams(normalize=False))
        near, far = llm.score("A cat sits on the mat.", ["A kitten rests.", "Stocks fell today."])
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM)
    theirs = []
    with torch.no_grad():
        for first in range(0, len(texts), 50):
            batch = tokenizer(texts[first : first + 50], padding=True, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            theirs.append((hidden * mask).sum(1) / mask.sum(1))
    expected = torch.cat(theirs).numpy()
    np.testing.assert_allclose(raw[1].outputs.vector, expected[1], atol=1e-5)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert near.outputs.score > far.outputs.score + 0.2
