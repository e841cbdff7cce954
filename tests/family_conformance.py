"""The conformance kit on a family of several cases, in ``make test`` on some of them in full."""

from __future__ import annotations

from typing import ClassVar

import pytest

from engine_core.testing import ConformanceTests
from engine_core.testing.case import load_cases
from engine_core.testing.suite import cases_of

# Those that run a model over and over, or an engine.
DEAREST = {
    "test_chunked_prefill",
    "test_batching",
    "test_block_sizes",
    "test_no_state_between_steps",
    "test_state_dict_round_trip",
    "test_bfloat16",
    "test_engine",
    "test_prefix_caching",
    "test_shared_prefixes",
    "test_media_chunks",
    "test_media_neighbours",
    "test_media_caches",
    "test_quantised",
    "test_tensor_parallel",
}
# Those of them that may go wrong where attention sees a part of what was before, or positions are
# scaled by a length; and where weights are stored and split in another way.
POSITIONS = {"test_chunked_prefill", "test_batching", "test_prefix_caching", "test_shared_prefixes"}
WEIGHTS = {"test_engine", "test_bfloat16", "test_quantised", "test_tensor_parallel"}


class SomeInFull(ConformanceTests):
    """All of the kit on the cases ``in_full``, and all but the dearest checks on the others.

    Of these each case ``in_part`` has those that are named. ``make soak`` runs all on all. What
    cases differ in shows in their logits, which are compared with the reference's here too.
    """

    in_full: ClassVar[tuple[str, ...]]
    in_part: ClassVar[tuple[tuple[str, set[str]], ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "subject" not in metafunc.fixturenames:
            return
        assert self.package is not None, "the family's tests name it"
        name, every = metafunc.definition.originalname, load_cases(self.package)
        parts = dict(self.in_part)
        told = {*self.in_full, *parts}
        assert told < {case.name for case in every}, told
        assert set().union(*parts.values()) <= DEAREST, parts
        params = [
            pytest.param(
                case,
                id=case.name,
                marks=[pytest.mark.long]
                if name in DEAREST
                and case.name not in self.in_full
                and name not in parts.get(case.name, ())
                else [],
            )
            for case in cases_of(name, every)
        ]
        metafunc.parametrize("subject", params, indirect=True)
