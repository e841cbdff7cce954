"""Config builders of BERT and RoBERTa checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import DefaultConfigBuilder, HFConfig, check_kinds, stated_keys
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig


class BertConfigBuilder:
    """Reads the configs of BERT, MiniLM and models published under its architecture."""

    architectures: ClassVar[tuple[str, ...]] = ("BertModel", "BertForSequenceClassification")
    # Published with a head that these models have no use for; beside them the one without it.
    headed: ClassVar[dict[str, str]] = {
        "BertForMaskedLM": "BertModel",
        "BertForPreTraining": "BertModel",
    }
    # Of keys that checkpoints leave out, from transformers' config class.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    # The position of a prompt's first token; checked among the defaults it would have to be above.
    first_position: ClassVar[int | None] = 0

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by one of these architectures."""
        return hf_config.get("architectures") in [[n] for n in (*cls.architectures, *cls.headed)]

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless, or asks for what is not supported.
        """
        stated = stated_keys(hf_config.to_dict())
        values = {**cls.defaults, **stated}
        positions = values.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise ConfigError(
                f"config.json: position_embedding_type {positions!r} is not supported; 'absolute' "
                "is"
            )
        for key in ("is_decoder", "add_cross_attention"):
            if values.get(key):
                raise ConfigError(
                    f"config.json: {key} is set, and a model of this family only encodes here"
                )
        check_kinds(values, {"intermediate_size": 1, **cls.defaults})
        first = cls.first_position
        if first is None:
            padding = values.get("pad_token_id", 1)
            if type(padding) is not int or padding < 0:
                raise ConfigError(
                    f"config.json: pad_token_id must be a token id, got {padding!r}: positions "
                    "begin after it"
                )
            first = padding + 1
        values["first_position"] = first
        kwargs.setdefault("max_position_embeddings", values["max_position_embeddings"] - first)
        name = values["architectures"][0]
        kwargs.setdefault("architecture", cls.headed.get(name, name))
        return DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)


class RobertaConfigBuilder(BertConfigBuilder):
    """Reads the configs of RoBERTa and XLM-RoBERTa, whose positions begin after the padding's."""

    architectures: ClassVar[tuple[str, ...]] = tuple(
        f"{family}{kind}"
        for family in ("Roberta", "XLMRoberta")
        for kind in ("Model", "ForSequenceClassification")
    )
    headed: ClassVar[dict[str, str]] = {
        f"{family}ForMaskedLM": f"{family}Model" for family in ("Roberta", "XLMRoberta")
    }
    first_position: ClassVar[int | None] = None
