"""From logits to tokens.

:class:`Sampler` holds the persistent batch's sampling state, a row a request. ``transforms`` and
``draws`` are the mathematics: functions of device tensors alone, with parameters a row, that
never wait for the device. Four things do need the host: ``bad_words``, custom processors, guided
texts, and the second look at a nucleus of many tokens.
"""

from engine_core.runtime.sampler.logprobs import token_logprobs
from engine_core.runtime.sampler.sampler import SampledTokens, Sampler

__all__ = ["SampledTokens", "Sampler", "token_logprobs"]
