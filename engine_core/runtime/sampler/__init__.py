"""From logits to tokens.

:class:`Sampler` holds the persistent batch's sampling state, one row per request. The choice itself
is :func:`~engine_core.kernels.sample_tokens`, which reads per-row parameters from device tensors
and never waits for the host. Three things do need the host: ``bad_words``, custom processors and
guided texts.
"""

from engine_core.runtime.sampler.logprobs import token_logprobs
from engine_core.runtime.sampler.sampler import REASONS, SampledTokens, Sampler, is_hosted

__all__ = ["REASONS", "SampledTokens", "Sampler", "is_hosted", "token_logprobs"]
