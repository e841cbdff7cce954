"""Early launches, as in ``kernels.launch``, for kernels in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents(PDL: gl.constexpr):
    """Let the next kernel be launched, as soon as all programs of this one have called this."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def wait(PDL: gl.constexpr):
    """Wait until the kernel before is complete and its writes are visible."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
