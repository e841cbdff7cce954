"""Bidirectional context of ChatGLM-6B prompts. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from engine_core.errors import RequestError
from engine_core.inputs import ProcessedPrompt, PromptState

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig


class BidirectionalContextProcessor:
    """Finds the mask and the begin-of-sequence token, as ``modeling_chatglm.py`` does.

    The tokens before the first bos are the context: each sees all of it. The others stand for what
    belongs at the mask, which is the first [gMASK], or the first [MASK] if there is no [gMASK].
    """

    prompt_state: ClassVar[PromptState] = PromptState(
        row_state={"mask_pos": ("int64", ()), "context_len": ("int64", ())}
    )

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is the first version."""
        return model_config.architecture == "ChatGLM1ForConditionalGeneration"

    def __init__(self, model_config: ModelConfig) -> None:
        config = model_config.hf_config
        self._bos: int = config.bos_token_id
        self._masks: tuple[int, ...] = (config.gmask_token_id, config.mask_token_id)

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """The prompt with its context as one atomic span, and the row state of the positions.

        Raises:
            RequestError: it has no bos, or neither mask.
        """
        ids = tuple(token_ids)
        mask = next((mask for mask in self._masks if mask in ids), None)
        if self._bos not in ids or mask is None:
            raise RequestError(
                f"a ChatGLM-6B prompt needs the token <sop> ({self._bos}) after its context, and "
                f"[gMASK] ({self._masks[0]}) or [MASK] ({self._masks[1]}) where the answer "
                f"belongs; got {len(ids)} tokens without "
                f"{'<sop>' if self._bos not in ids else 'a mask'}. End the prompt with "
                "[gMASK]<sop>, as the original tokenizer does"
            )
        context_len = ids.index(self._bos)
        mask_pos = ids.index(mask)
        return ProcessedPrompt(
            token_ids=ids,
            row_state={"mask_pos": mask_pos, "context_len": context_len},
            atomic_spans=((0, context_len),) if context_len else (),
            # A mask after the bos moves the tokens before it, too.
            cache_salts=(mask_pos,),
        )
