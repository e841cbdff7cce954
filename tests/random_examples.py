"""How many examples a test of random inputs tries, and how many of all combinations another."""

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

# Set by ``make soak``, which tries all.
FULL = "ENGINE_CORE_TEST_FULL"


def examples(full: int) -> int:
    """A quarter of ``full``, and 20 at least; ``full`` in ``make soak``."""
    return full if os.environ.get(FULL) else min(full, max(20, full // 4))


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which any two values of different choices meet; all in ``make soak``."""
    everything = list(product(*(range(len(values)) for values in choices)))
    taken = everything if os.environ.get(FULL) else []
    pairs = {case: set(combinations(enumerate(case), 2)) for case in everything}
    left = set() if taken else set().union(*pairs.values())
    while left:
        best = max(everything, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        taken.append(best)
    return [tuple(v[i] for v, i in zip(choices, case, strict=True)) for case in sorted(taken)]
