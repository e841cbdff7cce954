"""The conformance kit on this family's cases."""

from engine_core.testing import ConformanceTests


class TestConformance(ConformanceTests):
    package = "engine_core_mamba2"
