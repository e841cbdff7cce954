"""Source of the grammar compiler, which needs a tokenizer, for the processes that sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine_core.configs import EngineConfig, ModelConfig
from engine_core.engine.frontend import choose_tokenizer
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.source import ModelSource
from engine_core.text import Tokenizer, token_bytes


def find_grammar_compiler(
    source: ModelSource, config: EngineConfig, tokenizer: Tokenizer | None
) -> Callable[[], GrammarCompiler] | None:
    """A callable that makes the grammar compiler in the processes that sample, on first use.

    Args:
        source: the model.
        config: the engine's settings.
        tokenizer: the model's if this process has it.

    Returns:
        A callable, picklable if there are several ranks; None if the engine has no tokenizer.
    """
    if config.skip_tokenizer_init:
        return None
    if tokenizer is not None and config.num_ranks == 1:
        return partial(_compiler, tokenizer, source.model_config)
    own = None if config.tokenizer is not None else source.checkpoint.tokenizer_folder
    return _GrammarSource(config, source.model_config, own)


@dataclass(frozen=True, slots=True)
class _GrammarSource:
    """Makes the compiler of an engine's tokenizer in whichever process it is called in.

    Attributes:
        config: the engine's settings.
        model_config: the model's.
        folder: that of the model's own tokenizer, or None if ``config`` names another.
    """

    config: EngineConfig
    model_config: ModelConfig
    folder: Path | None

    def __call__(self) -> GrammarCompiler:
        """Load the tokenizer and make its compiler.

        Raises:
            TokenizerError: it cannot be read.
            RequestError: llguidance is not installed.
        """
        tokenizer = choose_tokenizer(self.config, self._own_folder, self.model_config)
        assert tokenizer is not None, "requests are not guided without a tokenizer"
        return _compiler(tokenizer, self.model_config)

    def _own_folder(self) -> Path:
        assert self.folder is not None, "the config names no tokenizer"
        return self.folder


def _compiler(tokenizer: Tokenizer, model_config: ModelConfig) -> GrammarCompiler:
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return GrammarCompiler(token_bytes(tokenizer), encode, model_config.vocab_size)
