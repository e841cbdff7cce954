"""The conformance kit on this family; what it shows of sounds is in the other tests."""

from engine_core.testing import ConformanceTests


class TestConformance(ConformanceTests):
    package = "engine_core_qwen2_audio"
