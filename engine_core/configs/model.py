"""The family-independent description of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_serializer

from engine_core.configs.base import FrozenConfig
from engine_core.configs.dtypes import DType
from engine_core.configs.hf_config import HFConfig
from engine_core.configs.pooling import PoolingConfig
from engine_core.configs.tokenizer import SentencePieceFormat, TiktokenFormat


class ModelConfig(FrozenConfig):
    """A checkpoint's config, read by its family's builder into the names that the core uses.

    Attributes:
        architecture: key into the module map; the checkpoint's ``architectures[0]`` or a finer
            name that the builder chose.
        hf_config: the normalised config that the model's constructor receives.
        vocab_size: rows of the logits.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of a query and key head.
        max_position_embeddings: longest sequence that the model is made for.
        may_exceed_length: whether a user may ask for longer ones (dynamic rope scaling: there is
            no length at which it ends).
        reads_rope_scaling: whether a linear or YaRN ``rope_scaling`` in the config extends the
            longest sequence.
        dtype: element type of the weights in the checkpoint, or None if the config does not say.
        bos_token_id: begin-of-sequence token, or None.
        eos_token_ids: tokens that end a sequence.
        default_chat_template: the family's jinja template, for checkpoints whose tokenizer brings
            none; None if the family has no format of its own.
        chat_template: the family's jinja template where it counts before the tokenizer's, such as
            one that knows pictures; or None.
        sentencepiece: how the family's SentencePiece file is used, for checkpoints without a
            tokenizer.json; None leaves such a folder to transformers.
        tiktoken: the same of a file of tiktoken's ranks.
        tool_parser: name of the parser of this model's tool calls, one of the hook
            ``tool_parsers``; None if the config does not tell.
        reasoning_parser: name of the parser of its reasoning, one of the hook
            ``reasoning_parsers``; or None.
        caveat: what whoever starts the model should know of how it is run; or None.
        text_model: the config of the text model inside, where another family's is.
        pooling: how vectors or scores are made, in place of text; None if text is generated. The
            engine fills it in.
        texts: texts that the family's input processor puts into prompts. A builder leaves their
            tokens empty; the engine fills them in if it has a tokenizer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    architecture: str = Field(min_length=1)
    hf_config: HFConfig
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    may_exceed_length: bool = False
    reads_rope_scaling: bool = False
    dtype: DType | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    default_chat_template: str | None = None
    chat_template: str | None = None
    sentencepiece: SentencePieceFormat | None = None
    tiktoken: TiktokenFormat | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    caveat: str | None = None
    text_model: ModelConfig | None = None
    pooling: PoolingConfig | None = None
    texts: Mapping[str, tuple[int, ...]] = Field(default_factory=dict, exclude=True)

    @field_serializer("hf_config")
    def _plain(self, value: HFConfig) -> dict[str, Any]:
        return value.to_dict()
