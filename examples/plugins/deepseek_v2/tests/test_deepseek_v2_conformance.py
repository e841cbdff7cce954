"""The conformance kit on this family's case."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_deepseek_v2"
    in_full = ("deepseek-v3",)
