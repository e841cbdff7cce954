"""The conformance kit on this family."""

from engine_core.testing import ConformanceTests


class TestConformance(ConformanceTests):
    package = "engine_core_bert"
