"""The conformance kit on this family."""

from family_conformance import WEIGHTS, SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_gemma"
    in_full = ("gemma3",)
    in_part = (("gemma2", WEIGHTS),)
