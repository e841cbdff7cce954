"""Triton's interpreter, without doing the same again at every call.

At a launch it puts its own functions in the place of the language's, and for that looks at every
member of the language. It did so again at every call of one kernel function by another, where
nothing is left to be replaced: more than half of the time of the tests in this folder.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Let it remember the members, and leave what is replaced alone. Call it outside a kernel."""
    from triton import language
    from triton.runtime import interpreter

    @cache
    def builtins_of(owner: Any) -> tuple[str, ...]:
        members = ((name, getattr(owner, name, None)) for name in dir(owner))
        return tuple(name for name, member in members if language.core.is_builtin(member))

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(owner):
            member = getattr(owner, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, builder, scope)

    def patch_lang(function: Any) -> Any:
        seen = [x for x in function.__globals__.values() if x is language or x is language.core]
        if seen and not any(language.core.is_builtin(each.load) for each in seen):
            return interpreter._LangPatchScope()  # a launch has replaced it all
        return whole(function)

    for owner in (language, language.core, language.math, language.tensor):
        builtins_of(owner)
    builtins_of(language.core.tensor_descriptor_base)
    whole = interpreter._patch_lang
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
