"""The conformance kit on this family."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_gemma"
    in_full = ("gemma2", "gemma3")
