"""Cache salts of prompts under dynamic rope scaling. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from engine_core.inputs import ProcessedPrompt, PromptState

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_SALTED = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")


class DynamicRopeProcessor:
    """Salts the block hashes of prompts beyond the trained length with their own length.

    There every key is rotated by an angle that depends on the length of the prompt, so that only
    prompts of the same length may share blocks.
    """

    prompt_state: ClassVar[PromptState] = PromptState()

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this package and has dynamic scaling."""
        rope = model_config.hf_config.get("rope_scaling", {})
        return model_config.architecture in _SALTED and rope.get("rope_type") == "dynamic"

    def __init__(self, model_config: ModelConfig) -> None:
        self._trained = int(model_config.hf_config.max_position_embeddings)

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """The prompt with its salt."""
        salts = (len(token_ids),) if len(token_ids) > self._trained else ()
        return ProcessedPrompt(token_ids=tuple(token_ids), cache_salts=salts)
