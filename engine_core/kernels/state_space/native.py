"""One token's step of states, by a kernel compiled for a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads

# Numbers of states per thread, at least.
_LEAST = 2**15


def step_states(
    mixed: Tensor, steps: Tensor, decays: Tensor, d: Tensor, states: Tensor, places: Tensor
) -> Tensor:
    """Each row's next state, written to its place, and the results ``[R, heads, P]`` float32.

    Args:
        mixed: ``[R, channels]`` float32, x, B and C.
        steps: ``[R, heads]`` float32.
        decays: ``[R, heads]`` float32.
        d: ``[heads]`` float32.
        states: ``[num_blocks, 2, heads, P, N]`` float32.
        places: ``[2, R]`` int64, where a row's state is read and written, in numbers from the first
            one of ``states``; a negative one is read as zeros.
    """
    count, channels = mixed.shape
    heads, width, size = states.shape[2:]
    mixed, steps, decays = mixed.contiguous(), steps.contiguous(), decays.contiguous()
    out = mixed.new_empty(count, heads, width)
    _KERNEL.run(
        (),
        threads(out.numel() * size, _LEAST),
        *(each.data_ptr() for each in (out, mixed, steps, decays, d, states, places)),
        *(count, channels, heads, width, size, states.shape[0] * states.stride(0)),
    )
    return out


_KERNEL = Kernel("engine_core.kernels.state_space.numba:make", "13q")
