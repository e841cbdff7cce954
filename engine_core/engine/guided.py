"""Grammar compilers for tokenizers. Imports no torch."""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

from engine_core.configs import SamplingParams
from engine_core.errors import RequestError
from engine_core.runtime.guided import GrammarCompiler
from engine_core.text import Tokenizer, token_bytes

_compilers: WeakKeyDictionary[Tokenizer, GrammarCompiler] = WeakKeyDictionary()


def check_guided(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Refuse a guided request whose grammar cannot be compiled.

    The first one of a tokenizer takes the time to read its vocabulary, and a large grammar some
    more. The GIL is released while a grammar is compiled.

    Raises:
        RequestError: there is no tokenizer, llguidance is not installed, or what the text must be
            cannot be compiled; the message says what and where.
    """
    if params.guided is None:
        return
    if tokenizer is None:
        raise RequestError("guided decoding needs a tokenizer, and this engine has none")
    grammar_compiler(tokenizer, vocab_size).check(params.guided)


def grammar_compiler(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler:
    """The compiler of a tokenizer's vocabulary, made when first asked for.

    Raises:
        RequestError: llguidance is not installed.
    """
    compiler = _compilers.get(tokenizer)
    if compiler is None:
        reference = ref(tokenizer)  # The dictionary's values must not keep its keys alive.

        def encode(text: str) -> list[int]:
            alive = reference()
            assert alive is not None, "a tokenizer lives as long as its engine"
            return alive.encode(text, add_special_tokens=False)

        compiler = GrammarCompiler(token_bytes(tokenizer), encode, vocab_size)
        _compilers[tokenizer] = compiler
    return compiler


__all__ = ["check_guided", "grammar_compiler"]
