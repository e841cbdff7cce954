"""Triton's interpreter, without doing the same again at every call, and with exact conversions.

It truncates what it converts to bfloat16, takes integers for the bits of one, multiplies these
bits, and forgets the carry when it rounds to 8-bit floats.

At a launch it puts its own functions in the place of the language's, and for that looks at every
member of the language. It did so again at every call of one kernel function by another, where
nothing is left to be replaced: more than half of the time of the tests in this folder.

It makes the type, shape and name of every intermediate result anew, and with each sum or product of
integers a check for overflow whose verdict it drops: three quarters of what was left.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch


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

    @cache
    def languages_of(function: Any) -> list[Any]:
        members = function.__globals__.values()
        return [x for x in members if x is language or x is language.core]

    def patch_lang(function: Any) -> Any:
        seen = languages_of(function)
        if seen and not any(language.core.is_builtin(each.load) for each in seen):
            return interpreter._LangPatchScope()  # a launch has replaced it all
        return whole(function)

    for owner in (language, language.core, language.math, language.tensor):
        builtins_of(owner)
    builtins_of(language.core.tensor_descriptor_base)
    whole = interpreter._patch_lang
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    _share_shapes(interpreter, language.core)
    _convert_exactly(interpreter, language)


def _share_shapes(interpreter: Any, core: Any) -> None:
    """Make what follows from a shape once, and know equal shapes by their being one."""
    blocks: dict[Any, tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {(): (core.tuple([]), core.constexpr(1))}
    dtypes: dict[str, Any] = {}
    whole_block, whole_tensor = core.block_type.__init__, core.tensor.__init__
    whole_dtype = interpreter._get_np_dtype
    semantic = type(interpreter.interpreter_semantic)
    whole_broadcast = semantic.broadcast_impl_value
    whole_checking = semantic.binary_op_type_checking_impl
    exact = {"int1", "int32", "int64", "fp32", "fp64"}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key not in blocks:
            whole_block(self, element_ty, shape)
            blocks[key] = shapes.setdefault(sizes, self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in tensors:
            whole_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    def dtype_of(triton_type: Any) -> Any:
        if triton_type.name not in dtypes:
            dtypes[triton_type.name] = whole_dtype(triton_type)
        return dtypes[triton_type.name]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = (x.type.shape if x.type.is_block() else None for x in (lhs, rhs))
        return (lhs, rhs) if one is other else whole_broadcast(self, lhs, rhs)

    def check_types(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> Any:
        are_tensors = type(lhs) is type(rhs) is core.tensor
        # Of these, two of a kind are computed in it whatever the operator.
        if are_tensors and lhs.shape is rhs.shape and lhs.dtype.name == rhs.dtype.name in exact:
            return lhs, rhs
        return whole_checking(self, lhs, rhs, *options, **more)

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    interpreter._get_np_dtype = dtype_of
    semantic.broadcast_impl_value = broadcast
    semantic.binary_op_type_checking_impl = check_types
    # Without "debug" it computes whether a sum overflows, and asserts nothing.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _convert_exactly(interpreter: Any, language: Any) -> None:
    """Let torch convert what is, or becomes, a float that numpy does not know."""
    as_bits = {
        language.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        language.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
    }
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_float_cast = builder.cast_impl, builder.create_fp_to_fp

    def convert(src: Any, dst_type: Any) -> Any:
        numbers = np.array(src.data)
        if src.dtype.scalar in as_bits:
            dtype, bits, _ = as_bits[src.dtype.scalar]
            x = torch.from_numpy(numbers.view(f"i{bits.itemsize}")).view(dtype).float()
        else:
            x = torch.from_numpy(numbers).float()
        if dst_type.scalar in as_bits:
            dtype, bits, held = as_bits[dst_type.scalar]
            data = x.to(dtype).view(bits).numpy().view(held)
        else:
            data = x.numpy().astype(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, dst_type.scalar)

    def exactly(src: Any, dst_type: Any) -> bool:
        return src.dtype.scalar in as_bits or dst_type.scalar in as_bits

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        return convert(src, dst_type) if exactly(src, dst_type) else plain_cast(self, src, dst_type)

    def float_cast(self: Any, src: Any, dst_type: Any, mode: Any) -> Any:
        if exactly(src, dst_type) and mode in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return convert(src, dst_type)
        return plain_float_cast(self, src, dst_type, mode)

    plain_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if exactly(a, a.dtype):
            a, b = convert(a, language.float32), convert(b, language.float32)
        return plain_dot(self, a, b, *others)

    builder.create_dot = dot
    builder.cast_impl = cast
    builder.create_fp_to_fp = float_cast
