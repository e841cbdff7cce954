"""Early launches, as in ``kernels.launch``, for kernels in Gluon, and what releases renamed.

Triton 3.7 renamed the barrier of threads, 3.8 the copies between global and shared memory, and 3.9
the other view of shared memory. All else that the kernels use has one name from 3.6 to 3.9.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Synchronises the threads of a warp group, or of all of a program outside of one.
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED = hasattr(tma, "async_load")
# A tile from global to shared memory, which a barrier in shared memory counts; and back.
tma_load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
tma_store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
# Shared memory as of another dtype, shape and layout, in this order.
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


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
