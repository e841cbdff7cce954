"""Loops that are vectors whatever LLVM finds, written in LLVM's language.

Addresses are int64. Vectors have eight numbers, which AVX2 computes at once and others in parts.
This module imports Numba. To a type checker its functions are ordinary ones of Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from engine_core.kernels.compiled.sizes import DOTS, LANES, PANEL, ROWS

_types: Any = importlib.import_module("numba.types")
_cgutils: Any = importlib.import_module("numba.core.cgutils")
_ir: Any = importlib.import_module("llvmlite.ir")

_Function = Callable[..., Any]
_intrinsic: Callable[[_Function], _Function] = importlib.import_module("numba.extending").intrinsic(
    prefer_literal=True
)

# Sums that stay in registers; AVX2 has 16, of which the operands take some.
_MOST_SUMS = 12
# Shares of queries, or of a head's numbers, that are written one after the other.
_MOST_SHARES = 4
# Columns of a pass of the loop of multiply.
_UNROLLED = 4

_I8, _I16, _I32, _I64 = (_ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = _ir.FloatType()
_VECTOR = _ir.VectorType(_F32, LANES)
_ZERO = _ir.Constant(_VECTOR, [_ir.Constant(_F32, 0.0)] * LANES)
_UNDEFINED = _ir.Constant(_VECTOR, _ir.Undefined)


class _Emitter:
    """Writes loops; offsets are bytes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: int) -> Any:
        return self.b.add(address, _ir.Constant(_I64, offset)) if offset else address

    def times(self, value: Any, factor: int) -> Any:
        return self.b.mul(value, _ir.Constant(_I64, factor))

    def load(self, address: Any, kind: Any, align: int = 2) -> Any:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 4

    def numbers(self, address: Any, size: int) -> Any:
        """A vector of stored numbers as float32; of two bytes they are bfloat16."""
        if size == 4:
            return self.load(address, _VECTOR)
        words = _ir.VectorType(_I32, LANES)
        wide = self.b.zext(self.load(address, _ir.VectorType(_I16, LANES)), words)
        sixteen = _ir.Constant(words, [_ir.Constant(_I32, 16)] * LANES)
        return self.b.bitcast(self.b.shl(wide, sixteen), _VECTOR)

    def splat(self, value: Any) -> Any:
        one = self.b.insert_element(_UNDEFINED, value, _ir.Constant(_I32, 0))
        return self.shuffle(one, one, [0] * LANES)

    def shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        kind = _ir.VectorType(_I32, len(places))
        mask = _ir.Constant(kind, [_ir.Constant(_I32, place) for place in places])
        return self.b.shuffle_vector(a, b, mask)

    def pairs(self, a: Any, b: Any) -> Any:
        """Sums of neighbours: two of ``a`` and two of ``b``, in each half."""
        even = self.shuffle(a, b, [0, 2, 8, 10, 4, 6, 12, 14])
        odd = self.shuffle(a, b, [1, 3, 9, 11, 5, 7, 13, 15])
        return self.b.fadd(even, odd)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        kind = _ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return self.b.call(_cgutils.get_or_insert_function(self.b.module, kind, name), [a, b, c])

    def fetch(self, address: Any) -> None:
        pointer = self.b.inttoptr(address, _I8.as_pointer())
        kind = _ir.FunctionType(_ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = _cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        # To read, into the second cache, data.
        self.b.call(function, [pointer, *(_ir.Constant(_I32, value) for value in (0, 2, 1))])

    def shares(self, total: int, most: int) -> Iterator[tuple[int, Any]]:
        """The sizes and beginnings of as few nearly equal shares up to ``most`` as there may be.

        If they are many, what the caller writes for one is a loop over all of that size. LLVM
        takes 19 s for the queries of 16 heads of 576 one after the other, and 2 s for loops.
        """
        count = -(-total // most)
        size, longer = divmod(total, count)
        first = 0
        for share, times in ((size + 1, longer), (size, count - longer)):
            if count <= _MOST_SHARES:
                for i in range(times):
                    yield share, _ir.Constant(_I64, first + share * i)
            elif times:
                with _cgutils.for_range(self.b, _ir.Constant(_I64, times)) as loop:
                    yield share, self.at(self.times(loop.index, share), first)
            first += share * times

    def dots(self, queries: int, dim: int, size: int, args: tuple[Any, ...]) -> None:
        b = self.b
        q, to, to_stride, ahead, keys = args[0], args[1], args[2], args[3], args[4:]
        places = [
            [_cgutils.alloca_once_value(b, _ZERO) for _ in range(DOTS)] for _ in range(queries)
        ]
        # A pass of the loop takes two vectors, which of float32 are a line.
        taken = 2 * LANES if dim % (2 * LANES) == 0 else LANES
        with _cgutils.for_range_slice(
            b, _ir.Constant(_I64, 0), _ir.Constant(_I64, dim), _ir.Constant(_I64, taken),
            intp=_I64, inc=True,
        ) as (column, _):  # fmt: skip
            key_at = self.times(column, size)
            q_at = b.add(q, self.times(column, 4))
            firsts = [b.add(key, key_at) for key in keys]
            if ahead is not None:
                for first in firsts:
                    self.fetch(b.add(first, ahead))
            for j in range(0, taken, LANES):
                numbers = [self.numbers(self.at(first, size * j), size) for first in firsts]
                for i in range(queries):
                    query = self.load(self.at(q_at, 4 * (dim * i + j)), _VECTOR)
                    for place, number in zip(places[i], numbers, strict=True):
                        b.store(self.multiply_add(query, number, b.load(place)), place)
        for i in range(queries):
            first, second, third, fourth = (b.load(place) for place in places[i])
            four = self.pairs(self.pairs(first, second), self.pairs(third, fourth))
            halves = [self.shuffle(four, four, list(range(h, h + 4))) for h in (0, 4)]
            address = b.add(to, self.times(to_stride, i))
            self.store(b.fadd(*halves), address)

    def greatest(self, address: Any, count: Any, least: Any) -> Any:
        b = self.b
        most = _cgutils.alloca_once_value(b, self.splat(least))
        one = _cgutils.alloca_once_value(b, least)
        whole = b.and_(count, _ir.Constant(_I64, -LANES))
        zero, lanes = _ir.Constant(_I64, 0), _ir.Constant(_I64, LANES)

        def update(begin: Any, end: Any, step: Any, place: Any, kind: Any) -> None:
            with _cgutils.for_range_slice(b, begin, end, step, intp=_I64, inc=True) as (i, _):
                value = self.load(b.add(address, self.times(i, 4)), kind)
                held = b.load(place)
                b.store(b.select(b.fcmp_ordered(">", value, held), value, held), place)

        update(zero, whole, lanes, most, _VECTOR)
        update(whole, count, _ir.Constant(_I64, 1), one, _F32)
        result, held = b.load(one), b.load(most)
        for i in range(LANES):
            value = b.extract_element(held, _ir.Constant(_I32, i))
            result = b.select(b.fcmp_ordered(">", value, result), value, result)
        return result

    def weigh(self, queries: int, vectors: int, dim: int, size: int, args: tuple[Any, ...]) -> None:
        b = self.b
        sums, weights, weights_stride, values, stride, count, ahead = args
        addresses = {
            (i, v): self.at(sums, 4 * (dim * i + LANES * v))
            for i in range(queries)
            for v in range(vectors)
        }
        places = {
            key: _cgutils.alloca_once_value(b, self.load(address, _VECTOR))
            for key, address in addresses.items()
        }
        rows = [b.add(weights, self.times(weights_stride, i)) for i in range(queries)]
        with _cgutils.for_range(b, count, intp=_I64) as loop:
            value = b.add(values, b.mul(loop.index, stride))
            if ahead is not None:
                for line in range(0, size * LANES * vectors, 64):
                    self.fetch(self.at(b.add(value, ahead), line))
            numbers = [self.numbers(self.at(value, size * LANES * v), size) for v in range(vectors)]
            for i, row in enumerate(rows):
                place_at = b.add(row, self.times(loop.index, 4))
                weight = self.splat(self.load(place_at, _F32))
                for v, number in enumerate(numbers):
                    place = places[i, v]
                    b.store(self.multiply_add(weight, number, b.load(place)), place)
        for key, address in addresses.items():
            self.store(b.load(places[key]), address)

    def multiply(self, onto: bool, args: tuple[Any, ...]) -> None:
        b = self.b
        panel, count, xs, outs = args[0], args[1], args[2 : 2 + ROWS], args[2 + ROWS :]
        places = {}
        for row, out in enumerate(outs):
            for half in (0, 1):
                before = self.load(self.at(out, 4 * LANES * half), _VECTOR) if onto else _ZERO
                places[row, half] = _cgutils.alloca_once_value(b, before)

        def step(column: Any, columns: int) -> None:
            at = b.add(panel, self.times(column, 4 * PANEL))
            x_at = self.times(column, 4)
            rows = [b.add(x, x_at) for x in xs]
            for i in range(columns):
                numbers = [
                    self.load(self.at(at, 4 * (PANEL * i + LANES * half)), _VECTOR)
                    for half in (0, 1)
                ]
                for row, x in enumerate(rows):
                    value = self.splat(self.load(self.at(x, 4 * i), _F32))
                    for half, number in enumerate(numbers):
                        place = places[row, half]
                        b.store(self.multiply_add(value, number, b.load(place)), place)

        whole = b.and_(count, _ir.Constant(_I64, -_UNROLLED))
        for begin, end, columns in ((_ir.Constant(_I64, 0), whole, _UNROLLED), (whole, count, 1)):
            width = _ir.Constant(_I64, columns)
            with _cgutils.for_range_slice(b, begin, end, width, intp=_I64, inc=True) as (column, _):
                step(column, columns)
        for (row, half), place in places.items():
            self.store(b.load(place), self.at(outs[row], 4 * LANES * half))


def _literals(*values: Any) -> list[int]:
    return [value.literal_value for value in values]


@_intrinsic
def dots(
    context: Any, group: Any, dim: Any, size: Any, queries: Any, to: Any, to_stride: Any,
    ahead: Any, k0: Any, k1: Any, k2: Any, k3: Any,
) -> Any:  # fmt: skip
    """Write the products of ``group`` queries with the keys of ``DOTS`` tokens.

    Args:
        group: a constant, as ``dim`` and ``size`` are.
        dim: the numbers of a head, a multiple of ``LANES``.
        size: the bytes of a key's number: 4 of float32, 2 of bfloat16.
        queries: the address of ``[group, dim]`` float32.
        to: where a query's products go, side by side as float32.
        to_stride: bytes from one query's products to the next one's.
        ahead: bytes from a key to what is fetched meanwhile into the second cache.
        k0: the address of a token's key, as the others are.
    """
    count, width, bytes_ = _literals(group, dim, size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = _Emitter(builder)
        q, to, stride, ahead, *keys = args[3:]
        for part, first in emit.shares(count, _MOST_SUMS // DOTS):
            q_at = builder.add(q, emit.times(first, 4 * width))
            out = builder.add(to, builder.mul(first, stride))
            emit.dots(part, width, bytes_, (q_at, out, stride, ahead, *keys))
        return context.get_dummy_value()

    return _types.void(group, dim, size, *[_types.int64] * 8), generate


@_intrinsic
def weigh(
    context: Any, group: Any, dim: Any, size: Any, sums: Any, weights: Any, weights_stride: Any,
    values: Any, stride: Any, tokens: Any, ahead: Any,
) -> Any:  # fmt: skip
    """Add to each query's sums the values of some tokens by that query's weights.

    Args:
        group: a constant, as ``dim`` and ``size`` are, which are those of values.
        dim: the numbers of a head, a multiple of ``LANES``.
        size: the bytes of a value's number: 4 of float32, 2 of bfloat16.
        sums: the address of ``[group, dim]`` float32.
        weights: the address of the first query's weights, side by side as float32.
        weights_stride: bytes from one query's weights to the next one's.
        values: the address of the first token's values.
        stride: bytes from one token's values to the next one's.
        tokens: how many.
        ahead: bytes from a value to what is fetched meanwhile into the second cache.
    """
    count, width, bytes_ = _literals(group, dim, size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = _Emitter(builder)
        sums, weights, weights_stride, values, stride, tokens, ahead = args[3:]
        for part, first in emit.shares(count, 3):
            own = builder.add(weights, builder.mul(first, weights_stride))
            sums_at = builder.add(sums, emit.times(first, 4 * width))
            for vectors, vector in emit.shares(width // LANES, _MOST_SUMS // part):
                to = builder.add(sums_at, emit.times(vector, 4 * LANES))
                value = builder.add(values, emit.times(vector, bytes_ * LANES))
                given = (to, own, weights_stride, value, stride, tokens, ahead)
                emit.weigh(part, vectors, width, bytes_, given)
        return context.get_dummy_value()

    return _types.void(group, dim, size, *[_types.int64] * 7), generate


@_intrinsic
def multiply(
    context: Any, onto: Any, panel: Any, count: Any,
    x0: Any, x1: Any, x2: Any, x3: Any, x4: Any, x5: Any,
    out0: Any, out1: Any, out2: Any, out3: Any, out4: Any, out5: Any,
) -> Any:  # fmt: skip
    """Write the products of ``ROWS`` rows with a panel, each ``PANEL`` numbers.

    Args:
        onto: a constant: whether they are added to what is there.
        panel: the address of ``[count, PANEL]`` float32.
        count: how many.
        x0: the address of a row of ``count`` float32, as the others are.
        out0: where its products go, as the others are.
    """
    (constant,) = _literals(onto)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Emitter(builder).multiply(bool(constant), args[1:])
        return context.get_dummy_value()

    return _types.void(onto, *[_types.int64] * (2 + 2 * ROWS)), generate


@_intrinsic
def greatest(context: Any, address: Any, count: Any, least: Any) -> Any:
    """The greatest of ``count`` float32 and ``least``; those that are NaN are passed over."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _Emitter(builder).greatest(*args)

    return _types.float32(_types.int64, _types.int64, _types.float32), generate
