"""Products with blocks, compiled for a CPU.

Activations are quantised to 8 bits, with a scale for each 32, as llama.cpp does it. A group's
products are added up as integers, by the instructions of VNNI or AVX2, and then scaled in float32.
A row's result does not depend on the other rows.

The loops over a panel are written in LLVM's language: of loops in Python LLVM makes no such
instructions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from engine_core.kernels.block_linear.forms import BLOCK, FORMS, PANEL, BlockForm
from engine_core.kernels.block_linear.native import AVX2, META, NAMES, PORTABLE, VNNI_256, VNNI_512
from engine_core.kernels.codes import INT8_TOP
from engine_core.kernels.compiled.numbers import (
    STORED,
    all_parts,
    array,
    float32,
    narrow,
    this_part,
    unpack,
    widen,
)

_types: Any = importlib.import_module("numba.types")
_cgutils: Any = importlib.import_module("numba.core.cgutils")
_ir: Any = importlib.import_module("llvmlite.ir")

_Function = Callable[..., Any]
_intrinsic: Callable[[_Function], _Function] = importlib.import_module("numba.extending").intrinsic(
    prefer_literal=True
)

_I1, _I8, _I16, _I32, _I64 = (_ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F16, _F32 = _ir.HalfType(), _ir.FloatType()


def _repeated(element: Any, value: float, count: int) -> Any:
    return _ir.Constant(_ir.VectorType(element, count), [_ir.Constant(element, value)] * count)


class _Emitter:
    """Writes the loops over one panel.

    Addresses are int64 and offsets bytes. A vector holds four columns of all rows of the panel, or
    of one half of them.
    """

    def __init__(self, builder: Any, code: int = 0) -> None:
        code, unpacked = divmod(code, 2)
        code, self.rows = divmod(code, 16)
        name, self.kind = divmod(code, 4)
        self.b = builder
        self.unpacked = bool(unpacked)
        self.form: BlockForm = FORMS[NAMES[name]]
        self.lanes = PANEL if self.kind == VNNI_512 else PANEL // 2
        self.halves = range(PANEL // self.lanes)
        # Codes of 8 bits are signed with AVX2; VNNI takes them with an offset.
        self.signed = self.form.bits == 8 and self.kind in (AVX2, PORTABLE)
        self._seen: dict[Hashable, Any] = {}

    def at(self, address: Any, offset: Any) -> Any:
        """An address some bytes on."""
        if isinstance(offset, int):
            offset = _ir.Constant(_I64, offset)
        return self.b.add(address, offset)

    def times(self, value: Any, factor: int) -> Any:
        """An int64 times a constant."""
        return self.b.mul(value, _ir.Constant(_I64, factor))

    def load(self, address: Any, offset: int, element: Any, count: int = 0) -> Any:
        """A vector, or with a count of 0 a number."""
        kind = _ir.VectorType(element, count) if count else element
        pointer = self.b.inttoptr(self.at(address, offset), kind.as_pointer())
        loaded = self.b.load(pointer)
        loaded.align = 1
        return loaded

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Store a vector or a number."""
        pointer = self.b.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.b.store(value, pointer).align = 1

    def splat(self, value: Any, count: int) -> Any:
        """A vector of equal numbers."""
        undefined = _ir.Constant(_ir.VectorType(value.type, count), _ir.Undefined)
        one = self.b.insert_element(undefined, value, _ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, undefined, _repeated(_I32, 0, count))

    def pick(self, vector: Any, elements: Iterable[int]) -> Any:
        """Some elements of a vector as another one."""
        order = [_ir.Constant(_I32, element) for element in elements]
        mask = _ir.Constant(_ir.VectorType(_I32, len(order)), order)
        return self.b.shuffle_vector(vector, vector, mask)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call one of LLVM's intrinsics."""
        kind = _ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(_cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value that was made under this key in this block."""
        if key not in self._seen:
            self._seen[key] = make()
        return self._seen[key]

    def codes(self, block: Any, j: int, half: int) -> Any:
        """The codes of columns ``4 j`` to ``4 j + 3``; signed ones if :attr:`signed`."""
        b, count, at, bits = self.b, 4 * self.lanes, 32 * half, self.form.bits
        if self.unpacked or bits == 8:
            whole = self.load(block, 64 * j + at, _I8, count)
            if self.unpacked or self.signed:
                return whole
            return b.xor(whole, _repeated(_I8, 0x80, count))

        def loaded(row: int) -> Any:
            return self.once((row, half), lambda: self.load(block, 64 * row + at, _I8, count))

        low = loaded(j // 2)
        if j % 2:
            low = b.lshr(low, _repeated(_I8, 4, count))
        else:
            low = b.and_(low, _repeated(_I8, 15, count))
        if bits == 4:
            return low
        per = 8 // (bits - 4)
        high, left = loaded(4 + j // per), 4 - (bits - 4) * (j % per)
        if left > 0:
            high = b.shl(high, _repeated(_I8, left, count))
        elif left < 0:
            high = b.lshr(high, _repeated(_I8, -left, count))
        return b.or_(low, b.and_(high, _repeated(_I8, (1 << bits) - 16, count)))

    def header(self, address: Any) -> dict[tuple[bool, int], Any]:
        """The header's scales, and minima (True), of each half, as float32."""
        if not self.form.layered or self.unpacked:
            return {}
        kind = _ir.VectorType(_F32, self.lanes)
        return {
            (bool(i), half): self.b.fpext(
                self.load(address, 32 * i + 16 * half, _F16, self.lanes), kind
            )
            for i in range(1 + self.form.affine)
            for half in self.halves
        }

    def scales(self, block: Any, header: dict[tuple[bool, int], Any], half: int) -> list[Any]:
        """A block's scales, and then the minima if it has them, as float32."""
        b, form, found = self.b, self.form, []
        kind = _ir.VectorType(_F32, self.lanes)
        for i in range(form.scales + form.affine):
            at = form.bits * 64
            if self.unpacked:
                found.append(self.load(block, 512 + 64 * i + 32 * half, _F32, self.lanes))
            elif form.layered:
                factor = self.load(block, at + 16 * i + 8 * half, _I8, self.lanes)
                top = header[form.affine and i == form.scales, half]
                found.append(b.fmul(b.sitofp(factor, kind), top))
            else:
                stored = self.load(block, at + 32 * i + 16 * half, _F16, self.lanes)
                found.append(b.fpext(stored, kind))
        return found

    def each_block(
        self, panel: Any, count: Any, body: Callable[[Any, dict[tuple[bool, int], Any], Any], None]
    ) -> None:
        """A loop over a panel's blocks; ``body`` is given address, header and number."""
        step, run, head = self.form.block_bytes, self.form.run, self.form.header_bytes
        if self.unpacked:
            step, run, head = self.form.unpacked_bytes, 1, 0
        runs = self.b.sdiv(count, _ir.Constant(_I64, run))
        with _cgutils.for_range(self.b, runs) as outer:
            start = self.at(panel, self.times(outer.index, head + run * step))
            header = self.header(start)
            start, first = self.at(start, head), self.times(outer.index, run)
            with _cgutils.for_range(self.b, _ir.Constant(_I64, run)) as inner:
                self._seen = {}
                block = self.at(start, self.times(inner.index, step))
                body(block, header, self.b.add(first, inner.index))

    def products(self, w: Any, x: Any) -> Any:
        """AVX2: products of bytes, added in pairs."""
        if self.signed:
            x = self.call("llvm.x86.avx2.psign.b", x.type, x, w)
            w = self.call("llvm.abs.v32i8", w.type, w, _ir.Constant(_I1, 0))
        return self.call("llvm.x86.avx2.pmadd.ub.sw", _ir.VectorType(_I16, 2 * self.lanes), w, x)

    def add_products(self, total: Any, w: Any, x: Any) -> Any:
        """``total`` and the products of four columns of each row."""
        b, count = self.b, self.lanes
        if self.kind in (VNNI_512, VNNI_256):
            kind = _ir.VectorType(_I32, count)
            w, x = b.bitcast(w, kind), b.bitcast(x, kind)
            return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * count}", kind, total, w, x)
        wide = _ir.VectorType(_I32, 4 * count)
        widened = b.sext(w, wide) if self.signed else b.zext(w, wide)
        sums = b.mul(widened, b.sext(x, wide))
        for size in (4 * count, 2 * count):
            sums = b.add(self.pick(sums, range(0, size, 2)), self.pick(sums, range(1, size, 2)))
        return b.add(total, sums)

    def group_sums(self, block: Any, xs: list[Any], group: int, half: int, start: Any) -> list[Any]:
        """Sums over a group of columns, int32, for each row of activations."""
        b, count = self.b, self.lanes
        per = self.form.group // 4
        # So many pairs of products of AVX2 stay within 16 bits.
        most = {4: 8, 5: 4, 6: 2, 8: 1}[self.form.bits]
        ones, kind = _repeated(_I16, 1, 2 * count), _ir.VectorType(_I32, count)
        sums = list(start)
        short: list[Any] = [None] * self.rows
        for i in range(per):
            j = group * per + i
            w = self.codes(block, j, half)
            for row in range(self.rows):
                x = self.splat(self.load(xs[row], 4 * j, _I32), count)
                x = b.bitcast(x, _ir.VectorType(_I8, 4 * count))
                if self.kind != AVX2:
                    sums[row] = self.add_products(sums[row], w, x)
                    continue
                pairs = self.products(w, x)
                short[row] = pairs if i % most == 0 else b.add(short[row], pairs)
                if i % most == min(most, per) - 1:
                    added = self.call("llvm.x86.avx2.pmadd.wd", kind, short[row], ones)
                    sums[row] = b.add(sums[row], added)
        return sums

    def offset(self, meta: Any, group: int) -> Any:
        """The part of a group's products that the codes' offset makes, in each lane."""
        form = self.form
        if form.offset is None or self.signed:
            return _repeated(_I32, 0, self.lanes)
        total = self.load(meta, 8 + 4 * group, _I32)
        if form.group == BLOCK:
            total = self.b.add(total, self.load(meta, 12, _I32))
        return self.splat(self.b.mul(total, _ir.Constant(_I32, -form.offset)), self.lanes)

    def tile(self, panel: Any, x: Any, meta: Any, out: Any, count: Any) -> None:
        """Multiply :attr:`rows` rows of quantised activations: float32 ``[rows, 16]``."""
        # Twice over the panel takes fewer registers.
        sides = [[half] for half in self.halves] if self.rows > 2 else [list(self.halves)]
        for side in sides:
            self._tile(panel, x, meta, out, count, side)

    def _tile(self, panel: Any, x: Any, meta: Any, out: Any, count: Any, side: list[int]) -> None:
        b, lanes, form = self.b, self.lanes, self.form
        kind = _ir.VectorType(_F32, lanes)
        zero = _repeated(_F32, 0.0, lanes)
        sums = {
            (row, half): _cgutils.alloca_once_value(b, zero)
            for row in range(self.rows)
            for half in side
        }
        for place in sums.values():
            b.store(zero, place)
        fma = partial(self.call, f"llvm.fma.v{lanes}f32", kind)

        def body(block: Any, header: dict[tuple[bool, int], Any], number: Any) -> None:
            xs, metas = (
                [
                    self.at(first, self.times(b.add(self.times(count, row), number), size))
                    if row
                    else self.at(first, self.times(number, size))
                    for row in range(self.rows)
                ]
                for first, size in ((x, BLOCK), (meta, META))
            )
            for half in side:
                scales = self.scales(block, header, half)
                for group in range(form.scales):
                    start = [self.offset(each, group) for each in metas]
                    dots = self.group_sums(block, xs, group, half, start)
                    for row, each in enumerate(metas):
                        place = sums[row, half]
                        scale = self.splat(self.load(each, 0, _F32), lanes)
                        total = fma(
                            b.sitofp(dots[row], kind), b.fmul(scales[group], scale), b.load(place)
                        )
                        if form.affine:
                            total = fma(
                                scales[-1], self.splat(self.load(each, 4, _F32), lanes), total
                            )
                        b.store(total, place)

        self.each_block(panel, count, body)
        for (row, half), place in sums.items():
            self.store(b.load(place), out, 4 * (PANEL * row + lanes * half))

    def unpack(self, panel: Any, out: Any, count: Any) -> None:
        """Write a panel's codes as bytes, ``[8, 16, 4]`` a block, and scales in float32."""

        def body(block: Any, header: dict[tuple[bool, int], Any], number: Any) -> None:
            to = self.at(out, self.times(number, self.form.unpacked_bytes))
            for half in self.halves:
                for j in range(8):
                    self.store(self.codes(block, j, half), to, 64 * j + 32 * half)
                for i, scale in enumerate(self.scales(block, header, half)):
                    self.store(scale, to, 512 + 64 * i + 32 * half)

        self.each_block(panel, count, body)

    def quantize(self, x: Any, codes: Any, meta: Any, count: Any, bfloat16: int) -> None:
        """Quantise a row of activations; a NaN or an infinity makes its block's scale NaN."""
        b = self.b
        numbers, whole = _ir.VectorType(_F32, BLOCK), _ir.VectorType(_I32, BLOCK)
        with _cgutils.for_range(b, count) as loop:
            at = self.at(x, self.times(loop.index, BLOCK * (2 if bfloat16 else 4)))
            if bfloat16:
                bits = b.zext(self.load(at, 0, _I16, BLOCK), whole)
                values = b.bitcast(b.shl(bits, _repeated(_I32, 16, BLOCK)), numbers)
            else:
                values = self.load(at, 0, _F32, BLOCK)
            most = self.call(f"llvm.fabs.v{BLOCK}f32", numbers, values)
            for size in (16, 8, 4, 2, 1):
                one, other = self.pick(most, range(size)), self.pick(most, range(size, 2 * size))
                # True of a NaN in either; the other comparison keeps that of the second.
                most = b.select(b.fcmp_unordered("ugt", one, other), one, other)
                most = b.select(b.fcmp_unordered("uno", other, other), other, most)
            most = b.extract_element(most, _ir.Constant(_I32, 0))
            nothing = b.fcmp_ordered("oeq", most, _ir.Constant(_F32, 0.0))
            inverse = b.fdiv(_ir.Constant(_F32, INT8_TOP), most)
            inverse = b.select(nothing, _ir.Constant(_F32, 0.0), inverse)
            scale = b.fmul(most, _ir.Constant(_F32, 1 / INT8_TOP))
            # Infinity by infinity.
            scale = b.fadd(scale, b.fsub(scale, scale))
            near = self.call(
                f"llvm.rint.v{BLOCK}f32", numbers, b.fmul(values, self.splat(inverse, BLOCK))
            )
            quantized = self.call(f"llvm.fptosi.sat.v{BLOCK}i32.v{BLOCK}f32", whole, near)
            self.store(
                b.trunc(quantized, _ir.VectorType(_I8, BLOCK)),
                self.at(codes, self.times(loop.index, BLOCK)),
            )
            sums = [
                self.call("llvm.vector.reduce.add.v16i32", _I32, self.pick(quantized, half))
                for half in (range(16), range(16, 32))
            ]
            to = self.at(meta, self.times(loop.index, META))
            self.store(scale, to)
            self.store(b.fmul(b.sitofp(b.add(*sums), _F32), scale), to, 4)
            for i, total in enumerate(sums):
                self.store(total, to, 8 + 4 * i)


def _written(method: str, constants: int, addresses: int) -> Any:
    """A function for bodies: some constants, then numbers; it writes a method's loops."""

    def typed(context: Any, *kinds: Any) -> Any:
        first, *more = (kind.literal_value for kind in kinds[:constants])

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            getattr(_Emitter(builder, first), method)(*args[constants:], *more)
            return context.get_dummy_value()

        return _types.void(*kinds[:constants], *[_types.int64] * addresses), generate

    return typed


@_intrinsic
def _tile(context: Any, code: Any, panel: Any, x: Any, meta: Any, out: Any, count: Any) -> Any:
    return _written("tile", 1, 5)(context, code)


@_intrinsic
def _unpack(context: Any, code: Any, panel: Any, out: Any, count: Any) -> Any:
    return _written("unpack", 1, 3)(context, code)


@_intrinsic
def _quantize(
    context: Any, code: Any, bfloat16: Any, x: Any, codes: Any, meta: Any, count: Any
) -> Any:
    return _written("quantize", 2, 4)(context, code, bfloat16)


def make_few(code: int, dtype: torch.dtype) -> Callable[..., None]:
    """At most four rows, which each part quantises for itself."""
    stored = STORED[dtype]
    bfloat16, size = int(dtype is torch.bfloat16), dtype.itemsize
    rows = code // 2 % 16

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        panels_at, panel_bytes, x, to, bias_at, scratch = (
            args[0], args[1], args[2], args[3], args[4], args[5]
        )  # fmt: skip
        m, n, stride, count = args[6], args[7], args[8], args[9]
        part, parts = this_part(), all_parts()
        panels = (n + PANEL - 1) // PANEL
        codes = scratch + part * (rows * (count * (BLOCK + META) + PANEL * 4))
        meta = codes + rows * count * BLOCK
        sums_at = meta + rows * count * META
        # The last rows of a tile that has fewer are the first again.
        for row in range(rows):
            source = x + row % m * count * BLOCK * size
            _quantize(0, bfloat16, source, codes + row * count * BLOCK, meta + row * count * META,
                      count)  # fmt: skip
        sums = array(sums_at, np.float32, rows * PANEL)
        out = array(to, stored, (m - 1) * stride + n)
        bias = array(bias_at, stored, n)
        for panel in range(panels * part // parts, panels * (part + 1) // parts):
            _tile(code, panels_at + panel * panel_bytes, codes, meta, sums_at, count)
            first = panel * PANEL
            width = min(PANEL, n - first)
            for row in range(m):
                for i in range(width):
                    value = sums[row * PANEL + i]
                    if bias_at != 0:
                        value += widen(bias[first + i])
                    out[row * stride + first + i] = narrow(value, out[0])

    return body


def make_quantize(dtype: torch.dtype) -> Callable[..., None]:
    """Rows of activations as codes and what is known of each block."""
    bfloat16, size = int(dtype is torch.bfloat16), dtype.itemsize

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        x, codes, meta, m, padded, count = args[0], args[1], args[2], args[3], args[4], args[5]
        part, parts = this_part(), all_parts()
        for row in range(padded * part // parts, padded * (part + 1) // parts):
            source = x + row % m * count * BLOCK * size
            _quantize(0, bfloat16, source, codes + row * count * BLOCK, meta + row * count * META,
                      count)  # fmt: skip

    return body


def make_many(code: int, packed: int, dtype: torch.dtype) -> Callable[..., None]:
    """Quantised rows, a whole number of tiles."""
    stored = STORED[dtype]
    rows = code // 2 % 16

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        panels_at, panel_bytes, codes, meta, to, bias_at, scratch = (
            args[0], args[1], args[2], args[3], args[4], args[5], args[6]
        )  # fmt: skip
        m, n, stride, count, unpacked_bytes, chunk = (
            args[7], args[8], args[9], args[10], args[11], args[12]
        )  # fmt: skip
        part, parts = this_part(), all_parts()
        panels = (n + PANEL - 1) // PANEL
        panel_at = scratch + part * (count * unpacked_bytes + rows * PANEL * 4)
        sums_at = panel_at + count * unpacked_bytes
        sums = array(sums_at, np.float32, rows * PANEL)
        out = array(to, stored, (m - 1) * stride + n)
        bias = array(bias_at, stored, n)
        for start in range(0, m, chunk):
            end = min(m, start + chunk)
            for panel in range(panels * part // parts, panels * (part + 1) // parts):
                _unpack(packed, panels_at + panel * panel_bytes, panel_at, count)
                first = panel * PANEL
                width = min(PANEL, n - first)
                for row in range(start, end, rows):
                    _tile(code, panel_at, codes + row * count * BLOCK, meta + row * count * META,
                          sums_at, count)  # fmt: skip
                    for r in range(min(rows, end - row)):
                        for i in range(width):
                            value = sums[r * PANEL + i]
                            if bias_at != 0:
                                value += widen(bias[first + i])
                            out[(row + r) * stride + first + i] = narrow(value, out[0])

    return body


def make_take(code: int, dtype: torch.dtype) -> Callable[..., None]:
    """Rows of a matrix as numbers."""
    stored = STORED[dtype]
    emitted = _Emitter(None, code)
    form, group = emitted.form, emitted.form.group
    offset = 0 if form.offset is None or emitted.signed else form.offset
    signed, affine, block_bytes = emitted.signed, form.affine, form.unpacked_bytes
    codes_type = np.int8 if signed else np.uint8

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        panels_at, panel_bytes, ids_at, to, scratch, m, count = (
            args[0], args[1], args[2], args[3], args[4], args[5], args[6]
        )  # fmt: skip
        part, parts = this_part(), all_parts()
        panel_at = scratch + part * count * block_bytes
        ids = array(ids_at, np.int64, m)
        out = array(to, stored, m * count * BLOCK)
        last = -1
        for row in range(m * part // parts, m * (part + 1) // parts):
            panel, lane = ids[row] // PANEL, ids[row] % PANEL
            if panel != last:
                _unpack(code, panels_at + panel * panel_bytes, panel_at, count)
                last = panel
            for block in range(count):
                at = panel_at + block * block_bytes
                codes = array(at, codes_type, 512)
                scales = array(at + 512, np.float32, block_bytes // 4 - 128)
                for i in range(BLOCK):
                    number = np.int32(codes[i // 4 * 64 + lane * 4 + i % 4]) - np.int32(offset)
                    value = float32(number) * scales[i // group * PANEL + lane]
                    if affine:
                        value += scales[BLOCK // group * PANEL + lane]
                    to_number = row * count * BLOCK + block * BLOCK + i
                    out[to_number] = narrow(value, out[0])

    return body
