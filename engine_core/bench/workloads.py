"""The workloads that engine-core and its peers are measured with.

Greedy, end of sequence ignored, no prefix caching. This module imports nothing but the standard
library, so that peers are measured by the same code in an environment of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

BATCHES = (1, 8, 32, 128, 256)
"""Batch sizes of the decode and prefill measurements."""

MIX = 256
"""Requests of the mix."""

LONGEST = 4097
"""Tokens of the longest sequence of :func:`measure`."""

Run = Callable[[list[list[int]], list[int]], float]
"""Completes prompts with exactly so many tokens each; returns the seconds it took."""


def random_ids(count: int, vocab: int, generator: random.Random) -> list[int]:
    """Token ids away from the special ones, which stand at both ends of a vocabulary."""
    low, high = min(1000, vocab // 4), vocab - min(3000, vocab // 4)
    return [generator.randrange(low, high) for _ in range(count)]


def mix_requests(vocab: int, count: int = MIX) -> tuple[list[list[int]], list[int]]:
    """The mix's prompts, and how many tokens each is completed with."""
    generator = random.Random(0)
    prompts = [random_ids(generator.randint(100, 1024), vocab, generator) for _ in range(count)]
    return prompts, [generator.randint(100, 1024) for _ in range(count)]


def measure(
    run: Run, vocab: int, *, batches: Sequence[int] = BATCHES, mix: int = MIX
) -> dict[str, float]:
    """Run the shared workloads.

    Args:
        run: the engine.
        vocab: size of its vocabulary.
        batches: the sizes of batch.
        mix: how many requests the mix has, whose prompt and output lengths are uniform in
            100..1024; 0 leaves it out.

    Returns:
        Figures by name. For each batch ``tpot_ms_bN``, the milliseconds of a decode step at a
        context of about 1000 tokens: (time for 129 tokens - time for 1) / 128; and
        ``prefill_tok_s_bN``, prompt tokens per second. ``ttft_ms_4k``: milliseconds to the first
        token of a prompt of 4096. ``mix_out_tok_s`` and ``mix_s``: generated tokens per second of
        the mix, and its seconds.
    """
    generator = random.Random(0)
    out: dict[str, float] = {}

    def fresh(batch: int, length: int) -> list[list[int]]:
        return [random_ids(length, vocab, generator) for _ in range(batch)]

    run(fresh(4, 64), [8] * 4)
    for batch in batches:
        once = min(run(fresh(batch, 1024), [1] * batch) for _ in range(2))
        many = min(run(fresh(batch, 1024), [129] * batch) for _ in range(2))
        out[f"tpot_ms_b{batch}"] = (many - once) / 128 * 1e3
        out[f"prefill_tok_s_b{batch}"] = batch * 1024 / once
    out["ttft_ms_4k"] = min(run(fresh(1, 4096), [1]) for _ in range(3)) * 1e3
    if mix:
        prompts, lengths = mix_requests(vocab, mix)
        seconds = run(prompts, lengths)
        out["mix_out_tok_s"] = sum(lengths) / seconds
        out["mix_s"] = seconds
    return out
