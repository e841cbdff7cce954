"""The conformance kit on this family."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_bloom"
    in_full = ("bloom-6-heads",)
