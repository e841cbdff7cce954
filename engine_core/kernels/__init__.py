"""Operations with kernels of their own, chosen by the device of the tensors.

One folder per operation: ``__init__`` holds the public wrapper, ``reference`` the plain PyTorch
that defines it, ``triton`` the GPU kernels and, where the reference is too slow for a CPU,
``native`` the compiled kernels (see :mod:`engine_core.kernels.compiled`), ``numba`` their bodies,
and ``cpu`` the choice between these kernels and torch's operations. Triton is imported when a CUDA
tensor is first given, and numba when a kernel for a CPU tensor must be compiled.
"""

from engine_core.kernels.activation import (
    gelu_and_mul,
    gelu_and_mul_codes,
    quick_gelu,
    silu_and_mul,
    silu_and_mul_codes,
)
from engine_core.kernels.attention import paged_attention
from engine_core.kernels.decode_inputs import DecodeInputs, decode_inputs
from engine_core.kernels.embedding import embed
from engine_core.kernels.experts import (
    Routing,
    are_few_tokens,
    choose_experts,
    fits_route,
    route,
    run_experts,
    run_experts_add,
    run_experts_add_norm,
)
from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.greedy import choose_greedy
from engine_core.kernels.kv_store import store_kv
from engine_core.kernels.latent_attention import latent_attention
from engine_core.kernels.linear import (
    Activation,
    CodedWeight,
    DeferredRMSNorm,
    Fp8Weight,
    GroupWeight,
    adds_residual,
    fits_head_norms,
    has_activated_kernel,
    has_kernel,
    linear,
    linear_add,
    linear_add_norm,
    linear_rotary_store,
)
from engine_core.kernels.linear.chain import (
    Chain,
    ChainForm,
    ChainNorm,
    chain_declined,
    chains_run_on,
    linear_chain,
)
from engine_core.kernels.norm import layer_norm, layer_norm_codes, rms_norm, rms_norm_codes
from engine_core.kernels.rank_sum import (
    RankMemory,
    fits_fused_sum,
    fits_rank_sum,
    rank_gather,
    rank_sum,
    rank_sum_add_norm,
)
from engine_core.kernels.rotary import apply_rotary, rotary_angles
from engine_core.kernels.rotary_store import is_fused as rotary_store_is_fused
from engine_core.kernels.rotary_store import rotary_store
from engine_core.kernels.row_codes import CodedRows, RowForm
from engine_core.kernels.sampling import sample_tokens
from engine_core.kernels.segments import Segments, attend_segments
from engine_core.kernels.state_space import (
    StateCache,
    StateRows,
    StateSpaceWeights,
    run_state_space,
)
from engine_core.kernels.turns import Turns

__all__ = [
    "GPU",
    "Activation",
    "Chain",
    "ChainForm",
    "ChainNorm",
    "CodedRows",
    "CodedWeight",
    "DecodeInputs",
    "DeferredRMSNorm",
    "Fp8Weight",
    "GroupWeight",
    "RankMemory",
    "Routing",
    "RowForm",
    "Segments",
    "StateCache",
    "StateRows",
    "StateSpaceWeights",
    "Turns",
    "adds_residual",
    "apply_rotary",
    "are_few_tokens",
    "attend_segments",
    "chain_declined",
    "chains_run_on",
    "choose_experts",
    "choose_greedy",
    "decode_inputs",
    "embed",
    "fits_fused_sum",
    "fits_head_norms",
    "fits_rank_sum",
    "fits_route",
    "gelu_and_mul",
    "gelu_and_mul_codes",
    "gpu_of",
    "has_activated_kernel",
    "has_kernel",
    "latent_attention",
    "layer_norm",
    "layer_norm_codes",
    "linear",
    "linear_add",
    "linear_add_norm",
    "linear_chain",
    "linear_rotary_store",
    "paged_attention",
    "quick_gelu",
    "rank_gather",
    "rank_sum",
    "rank_sum_add_norm",
    "rms_norm",
    "rms_norm_codes",
    "rotary_angles",
    "rotary_store",
    "rotary_store_is_fused",
    "route",
    "run_experts",
    "run_experts_add",
    "run_experts_add_norm",
    "run_state_space",
    "sample_tokens",
    "silu_and_mul",
    "silu_and_mul_codes",
    "store_kv",
]
