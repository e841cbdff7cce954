"""The conformance kit on this family."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_llama"
    in_full = ("llama-dynamic-rope", "mistral-window", "mixtral")
