"""How many examples a test of random inputs tries."""

import os

# Set by ``make soak``, which tries all.
FULL = "ENGINE_CORE_TEST_FULL"


def examples(full: int) -> int:
    """A quarter of ``full``, and 20 at least; ``full`` in ``make soak``."""
    return full if os.environ.get(FULL) else min(full, max(20, full // 4))
