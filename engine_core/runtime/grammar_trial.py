"""The trial of a stranger's grammar, in a process made for it. Imports no torch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from engine_core.configs import GuidedParams
from engine_core.errors import RequestError
from engine_core.runtime.guided import GrammarCompiler

# Random texts that a grammar is followed along, the tokens of each, and the seconds for all.
_WALKS = 4
_WALK_TOKENS = 48
_WALK_SECONDS = 0.2


def open_compiler(tokens: Sequence[bytes], vocab_size: int) -> GrammarCompiler:
    """The compiler of a vocabulary that writes forced text in the longest tokens."""
    # Without ids of a text the compiler takes the longest tokens that fit.
    return GrammarCompiler(tokens, lambda text: [], vocab_size)


def try_grammar(compiler: GrammarCompiler, params: GuidedParams) -> None:
    """Compile a grammar, and time the masks along random texts that it allows.

    Raises:
        RequestError: it cannot be compiled, no text satisfies it, or a mask is over a limit.
    """
    try:
        compiler.check(params)
        _walk(compiler, params)
    except (RequestError, MemoryError):
        raise
    except BaseException as error:  # a panic of llguidance's is no Exception
        param = f"guided.{params.kind}"
        raise RequestError(f"{param}: it cannot be compiled: {error}", param=param) from None


def _walk(compiler: GrammarCompiler, params: GuidedParams) -> None:
    choose = random.Random(0)
    deadline = time.monotonic() + _WALK_SECONDS
    for _ in range(_WALKS):
        guide = compiler.guide(params, ())
        for _ in range(_WALK_TOKENS):
            (mask,) = compiler.masks([guide])
            if guide.error is not None and guide.error.code != "grammar-without-end":
                param = f"guided.{params.kind}"
                raise RequestError(f"{param}: {guide.error.message}", param=param)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < compiler.vocab_size]
            if guide.error is not None or not len(allowed) or time.monotonic() > deadline:
                break
            guide.advance([int(choose.choice(allowed))])


__all__ = ["open_compiler", "try_grammar"]
