"""The conformance kit on this family's case."""

from engine_core.testing import ConformanceTests


class TestConformance(ConformanceTests):
    package = "engine_core_deepseek_v2"
