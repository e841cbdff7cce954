"""Tiny random BERTs and RoBERTas of transformers, with a tokenizer, in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, RobertaConfig

WORDS = [
    *("the", "a", "cat", "dog", "sat", "on", "mat", "and", "ran", "far", "rain", "is", "near"),
    *("sun", "sea", "red", "blue", "old", "new"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make(folder: Path, kind: str = "bert", *, scores: bool = False, **more: Any) -> Any:
    """A model of transformers with random weights, saved in ``folder``; it is returned."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "max_position_embeddings": 40,
        "initializer_range": 0.2,
        **more,
    }
    torch.manual_seed(len(kind) + scores)
    if kind == "bert":
        config = BertConfig(pad_token_id=0, **sizes)
    else:
        sizes = {"pad_token_id": 1, **sizes}
        config = RobertaConfig(type_vocab_size=1, layer_norm_eps=1e-5, **sizes)
    if scores:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            # Also those that would be zeros or ones.
            param.add_(torch.randn_like(param) * 0.1)
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, as BERT's."""
    vocab = {token: index for index, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        **named,
    }
    # As BertTokenizer has them.
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_modules(
    folder: Path, pooling: dict[str, Any], *, normalize: bool = True, **sentence: Any
) -> None:
    """sentence-transformers' files; ``sentence`` is for ``config_sentence_transformers.json``."""
    kinds = ["Transformer", "Pooling", "Normalize"][: 2 + normalize]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(sentence))


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file, which need not exist."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **values}))


def states(model: Any, token_ids: list[int]) -> Tensor:
    """``[T, H]`` of transformers."""
    with torch.no_grad():
        out: Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return out
