"""The conformance kit on this family."""

from family_conformance import POSITIONS, WEIGHTS, SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_llama"
    in_full = ("llama-dynamic-rope",)
    in_part = (("mistral-window", POSITIONS), ("mixtral", WEIGHTS))
