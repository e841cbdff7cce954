"""Tiny models of this family, for the conformance kit. Imports no torch."""

from typing import Any

from engine_core.testing import ConformanceCase

_BERT = {
    "model_type": "bert",
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "layer_norm_eps": 1e-5,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
# Positions begin after that of the padding.
_ROBERTA = {
    **_BERT,
    "model_type": "roberta",
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "hidden_act": "gelu_new",
}
_PROMPTS = [[(7 * i + n) % 110 + 5 for i in range(n)] for n in (1, 5, 11, 23, 40)]


def _case(name: str, architecture: str, config: dict[str, Any], **more: Any) -> ConformanceCase:
    return ConformanceCase(
        name=name,
        architecture=architecture,
        config={"architectures": [architecture], **config},
        prompts=_PROMPTS,
        encodes=True,
        **more,
    )


_SCORES = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
# Of the state of the first token that BERT was also trained with.
_POOLER = {"unused_weights": ("pooler.dense.weight", "pooler.dense.bias")}

CASES = [
    ConformanceCase(
        name="bert",
        architecture="BertModel",
        config={"architectures": ["BertModel"], **_BERT},
        prompts=_PROMPTS,
        unused_weights=("pooler.dense.weight", "pooler.dense.bias"),
        encodes=True,
    ),
    _case("bert-scores", "BertForSequenceClassification", {**_BERT, **_SCORES}),
    _case("roberta", "RobertaModel", _ROBERTA, **_POOLER),
    _case("roberta-scores", "RobertaForSequenceClassification", {**_ROBERTA, **_SCORES}),
    _case("xlm-roberta", "XLMRobertaModel", {**_ROBERTA, "model_type": "xlm-roberta"}, **_POOLER),
    _case(
        "xlm-roberta-scores",
        "XLMRobertaForSequenceClassification",
        {**_ROBERTA, "model_type": "xlm-roberta", **_SCORES},
    ),
]
