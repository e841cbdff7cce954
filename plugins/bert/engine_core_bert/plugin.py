"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_bert.config import BertConfigBuilder, RobertaConfigBuilder

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "BertModel": "engine_core_bert.model.BertModel",
        "BertForSequenceClassification": "engine_core_bert.model.BertForSequenceClassification",
        "RobertaModel": "engine_core_bert.model.RobertaModel",
        "RobertaForSequenceClassification": (
            "engine_core_bert.model.RobertaForSequenceClassification"
        ),
        "XLMRobertaModel": "engine_core_bert.model.RobertaModel",
        "XLMRobertaForSequenceClassification": (
            "engine_core_bert.model.RobertaForSequenceClassification"
        ),
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of BERT and RoBERTa."""
    return [BertConfigBuilder, RobertaConfigBuilder]
