"""Products of float32 with bfloat16 or float16, compiled for a CPU.

A tile multiplies some rows of activations by one or more panels, and keeps its sums in registers.
Its loop is written in LLVM's language, so that it is vectors whatever LLVM finds. Each sum adds its
products one after the other, in every tile, so that a row's result does not depend on the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.compiled.numbers import all_parts, array, inline, this_part, unpack
from engine_core.kernels.half_linear.native import (
    EXPANDED,
    FLOAT16,
    LANES,
    MOST,
    PANEL,
    PANELS,
)

_types: Any = importlib.import_module("numba.types")
_cgutils: Any = importlib.import_module("numba.core.cgutils")
_ir: Any = importlib.import_module("llvmlite.ir")

_Function = Callable[..., Any]
_intrinsic: Callable[[_Function], _Function] = importlib.import_module("numba.extending").intrinsic(
    prefer_literal=True
)

# Columns that a pass of the loop takes.
_UNROLLED = 4

_I8, _I32, _I64, _F16, _F32 = (
    *(_ir.IntType(bits) for bits in (8, 32, 64)),
    _ir.HalfType(),
    _ir.FloatType(),
)
_VECTOR = _ir.VectorType(_F32, LANES)


class _Emitter:
    """Writes a tile's loop. Addresses are int64 and offsets bytes."""

    def __init__(self, builder: Any, code: int) -> None:
        """``code`` has the tile's constants: Numba keeps code by numbers."""
        code, self.kind = divmod(code, 4)
        self.rows, self.panels = divmod(code, 8)
        self.bytes = (4 if self.kind == EXPANDED else 2) * PANEL
        self.b = builder

    def _at(self, address: Any, offset: int) -> Any:
        return self.b.add(address, _ir.Constant(_I64, offset)) if offset else address

    def _load(self, address: Any, kind: Any) -> Any:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = 2
        return loaded

    def _prefetch(self, address: Any) -> None:
        pointer = self.b.inttoptr(address, _I8.as_pointer())
        kind = _ir.FunctionType(_ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = _cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        # To read, into the second cache, data. Into the first one it takes 3072 x 576 and one row a
        # third longer on a Zen 4: that waits for the few buffers that a core has for misses.
        self.b.call(function, [pointer, *(_ir.Constant(_I32, value) for value in (0, 2, 1))])

    def _splat(self, value: Any) -> Any:
        undefined = _ir.Constant(_VECTOR, _ir.Undefined)
        one = self.b.insert_element(undefined, value, _ir.Constant(_I32, 0))
        mask = _ir.Constant(_ir.VectorType(_I32, LANES), [_ir.Constant(_I32, 0)] * LANES)
        return self.b.shuffle_vector(one, undefined, mask)

    def _numbers(self, address: Any) -> tuple[Any, Any]:
        """One column of a panel: the first half of its rows and the second, as float32."""
        b = self.b
        if self.kind == EXPANDED:
            first, second = (self._load(self._at(address, 4 * LANES * i), _VECTOR) for i in (0, 1))
            return first, second
        if self.kind == FLOAT16:
            halves = _ir.VectorType(_F16, LANES)
            first, second = (self._load(self._at(address, 2 * LANES * i), halves) for i in (0, 1))
            return b.fpext(first, _VECTOR), b.fpext(second, _VECTOR)
        words = _ir.VectorType(_I32, LANES)
        both = self._load(address, words)

        def constant(value: int) -> Any:
            return _ir.Constant(words, [_ir.Constant(_I32, value)] * LANES)

        low, high = b.shl(both, constant(16)), b.and_(both, constant(0xFFFF0000))
        return b.bitcast(low, _VECTOR), b.bitcast(high, _VECTOR)

    def tile(
        self, panels: Any, panel_bytes: Any, out: Any, stride: Any, last: Any, bias: Any,
        count: Any, *rows: Any,
    ) -> None:  # fmt: skip
        """Write sums, ``[panels, 16]`` of each row, plus ``[panels, 16]`` from ``bias`` on.

        Rows of ``out`` lie ``stride`` bytes apart; those after the one with the number ``last`` are
        it again. ``rows`` are addresses of activations.
        """
        b = self.b
        zero = _ir.Constant(_VECTOR, [_ir.Constant(_F32, 0.0)] * LANES)
        sums = {
            (row, panel, half): _cgutils.alloca_once_value(b, zero)
            for row in range(self.rows)
            for panel in range(self.panels)
            for half in (0, 1)
        }
        for place in sums.values():
            b.store(zero, place)
        firsts = [
            b.add(panels, b.mul(panel_bytes, _ir.Constant(_I64, panel)))
            for panel in range(self.panels)
        ]
        fma = _cgutils.get_or_insert_function(
            b.module, _ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )

        distance = b.mul(panel_bytes, _ir.Constant(_I64, self.panels))

        def step(column: Any, columns: int) -> None:
            x_at = b.mul(column, _ir.Constant(_I64, 4))
            w_at = b.mul(column, _ir.Constant(_I64, self.bytes))
            xs = [b.add(row, x_at) for row in rows[: self.rows]]
            ws = [b.add(first, w_at) for first in firsts]
            if self.kind != EXPANDED and columns == _UNROLLED:
                for w in ws:
                    ahead = b.add(w, distance)
                    for line in range(0, self.bytes * columns, 64):
                        self._prefetch(self._at(ahead, line))
            for i in range(columns):
                for panel, w in enumerate(ws):
                    numbers = self._numbers(self._at(w, self.bytes * i))
                    for row, x in enumerate(xs):
                        value = self._splat(self._load(self._at(x, 4 * i), _F32))
                        for half, number in enumerate(numbers):
                            place = sums[row, panel, half]
                            b.store(b.call(fma, [value, number, b.load(place)]), place)

        whole = b.and_(count, _ir.Constant(_I64, -_UNROLLED))
        for begin, end, columns in ((_ir.Constant(_I64, 0), whole, _UNROLLED), (whole, count, 1)):
            width = _ir.Constant(_I64, columns)
            with _cgutils.for_range_slice(b, begin, end, width, intp=_I64, inc=True) as (column, _):
                step(column, columns)
        for (row, panel, half), place in sums.items():
            number = _ir.Constant(_I64, row)
            missing = b.icmp_signed(">", number, last)
            to_row = b.add(out, b.mul(stride, b.select(missing, last, number)))
            offset = 4 * (PANEL * panel + LANES * half)
            added = b.fadd(b.load(place), self._load(self._at(bias, offset), _VECTOR))
            pointer = b.inttoptr(self._at(to_row, offset), _VECTOR.as_pointer())
            b.store(added, pointer).align = 4

    def expand(self, panel: Any, to: Any, count: Any) -> None:
        """Write a panel's numbers as float32."""
        b = self.b
        with _cgutils.for_range(b, count) as loop:
            source = b.add(panel, b.mul(loop.index, _ir.Constant(_I64, self.bytes)))
            target = b.add(to, b.mul(loop.index, _ir.Constant(_I64, 4 * PANEL)))
            for half, numbers in enumerate(self._numbers(source)):
                pointer = b.inttoptr(self._at(target, 4 * LANES * half), _VECTOR.as_pointer())
                b.store(numbers, pointer).align = 4


@_intrinsic
def _expand(context: Any, code: Any, panel: Any, to: Any, count: Any) -> Any:
    constant = code.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Emitter(builder, constant).expand(*args[1:])
        return context.get_dummy_value()

    return _types.void(code, *[_types.int64] * 3), generate


@_intrinsic
def _tile(
    context: Any, code: Any, panels: Any, panel_bytes: Any, out: Any, stride: Any, last: Any,
    bias: Any, count: Any,
    x0: Any, x1: Any, x2: Any, x3: Any, x4: Any, x5: Any,
) -> Any:  # fmt: skip
    constant = code.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Emitter(builder, constant).tile(*args[1:])
        return context.get_dummy_value()

    return _types.void(code, *[_types.int64] * 13), generate


def make(rows: int, kind: int) -> Callable[..., None]:
    """Tiles of so many rows or one less, which multiply the panels as they are."""
    together, fewer = PANELS[rows], max(rows - 1, 1)
    many = (rows * 8 + together) * 4 + kind
    one = (rows * 8 + 1) * 4 + kind
    many_fewer = (fewer * 8 + together) * 4 + kind
    one_fewer = (fewer * 8 + 1) * 4 + kind

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        panels_at, x, to, bias_at, scratch = args[0], args[1], args[2], args[3], args[4]
        m, n, k, stride = args[5], args[6], args[7], args[8]
        part, parts = this_part(), all_parts()
        panels, panel_bytes = (n + PANEL - 1) // PANEL, k * 2 * PANEL
        zeros_at = scratch + part * (4 * (1 + rows) * together * PANEL)
        sums_at = zeros_at + 4 * together * PANEL
        array(zeros_at, np.float32, together * PANEL)[:] = 0
        panel, end = panels * part // parts, panels * (part + 1) // parts
        tiles = (m + rows - 1) // rows
        whole = m - tiles * fewer
        while panel < end:
            taken = together if panel + together <= end else 1
            at, first = panels_at + panel * panel_bytes, panel * PANEL
            width = min(taken * PANEL, n - first)
            fits = width == taken * PANEL
            bias = bias_at + 4 * first if fits and bias_at != 0 else zeros_at
            # Only the last panel has rows that are none of the matrix.
            step = 4 * stride if fits else 4 * taken * PANEL
            row = 0
            for tile in range(tiles):
                # Tiles of all rows come first.
                height = rows if tile < whole else fewer
                x0, x1, x2, x3, x4, x5 = _rows(x, row, m - 1, k)
                out = to + 4 * (row * stride + first) if fits else sums_at
                last = height - 1
                if height == rows:
                    if taken == together:
                        _tile(many, at, panel_bytes, out, step, last, bias, k,
                              x0, x1, x2, x3, x4, x5)  # fmt: skip
                    else:
                        _tile(one, at, panel_bytes, out, step, last, bias, k,
                              x0, x1, x2, x3, x4, x5)  # fmt: skip
                elif taken == together:
                    _tile(many_fewer, at, panel_bytes, out, step, last, bias, k,
                          x0, x1, x2, x3, x4, x5)  # fmt: skip
                else:
                    _tile(one_fewer, at, panel_bytes, out, step, last, bias, k,
                          x0, x1, x2, x3, x4, x5)  # fmt: skip
                if not fits:
                    _write(sums_at, taken, height, to, stride, n, row, first, width, bias_at)
                row += height
            panel += taken

    return body


def make_many(kind: int) -> Callable[..., None]:
    """Tiles of :data:`MOST` rows, which multiply panels that are expanded before."""
    rows = MOST
    code = (rows * 8 + 1) * 4 + EXPANDED

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        panels_at, x, to, bias_at, scratch = args[0], args[1], args[2], args[3], args[4]
        m, n, k, stride, chunk, group = args[5], args[6], args[7], args[8], args[9], args[10]
        part, parts = this_part(), all_parts()
        panels, panel_bytes = (n + PANEL - 1) // PANEL, k * 2 * PANEL
        expanded = 4 * PANEL * k
        zeros_at = scratch + part * (4 * PANEL * (1 + rows) + group * expanded)
        sums_at = zeros_at + 4 * PANEL
        group_at = sums_at + 4 * PANEL * rows
        array(zeros_at, np.float32, PANEL)[:] = 0
        begin, end = panels * part // parts, panels * (part + 1) // parts
        for start in range(0, m, chunk):
            stop = min(m, start + chunk)
            for low in range(begin, end, group):
                high = min(low + group, end)
                for panel in range(low, high):
                    to_panel = group_at + (panel - low) * expanded
                    _expand(kind, panels_at + panel * panel_bytes, to_panel, k)
                for row in range(start, stop, rows):
                    x0, x1, x2, x3, x4, x5 = _rows(x, row, stop - 1, k)
                    height = min(rows, stop - row)
                    for panel in range(low, high):
                        panel_at = group_at + (panel - low) * expanded
                        first = panel * PANEL
                        if first + PANEL <= n:
                            out = to + 4 * (row * stride + first)
                            bias = bias_at + 4 * first if bias_at != 0 else zeros_at
                            _tile(code, panel_at, 0, out, 4 * stride, height - 1, bias, k,
                                  x0, x1, x2, x3, x4, x5)  # fmt: skip
                        else:
                            _tile(code, panel_at, 0, sums_at, 4 * PANEL, height - 1, zeros_at, k,
                                  x0, x1, x2, x3, x4, x5)  # fmt: skip
                            _write(sums_at, 1, height, to, stride, n, row, first, n - first,
                                   bias_at)  # fmt: skip

    return body


@inline
def _rows(x: int, row: int, last: int, k: int) -> tuple[int, ...]:
    """Addresses of a tile's rows; those that are missing are the last one again."""
    size = k * 4
    return (
        x + row * size, x + min(row + 1, last) * size, x + min(row + 2, last) * size,
        x + min(row + 3, last) * size, x + min(row + 4, last) * size, x + min(row + 5, last) * size,
    )  # fmt: skip


@inline
def _write(
    sums_at: int, panels: int, rows: int, to: int, stride: int, n: int, row: int, first: int,
    width: int, bias_at: int,
) -> None:  # fmt: skip
    """Put a tile's sums, and the bias, in their place."""
    bias = array(bias_at, np.float32, n)
    for r in range(rows):
        sums = array(sums_at + 4 * PANEL * panels * r, np.float32, width)
        out = array(to + 4 * ((row + r) * stride + first), np.float32, width)
        if bias_at != 0:
            for i in range(width):
                out[i] = sums[i] + bias[first + i]
        else:
            for i in range(width):
                out[i] = sums[i]
