"""The conformance kit on this family; what it shows of pictures is in the other tests."""

from engine_core.testing import ConformanceTests


class TestConformance(ConformanceTests):
    package = "engine_core_qwen_vl"
