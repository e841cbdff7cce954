"""The conformance kit on this family; what it shows of pictures is in the other tests."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_internvl"
    in_full = ("internvl-chat", "internvl-llama-dynamic-rope")
