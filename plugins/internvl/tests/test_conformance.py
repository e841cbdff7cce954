"""The conformance kit on this family; what it shows of pictures is in the other tests."""

from family_conformance import POSITIONS, SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_internvl"
    in_full = ("internvl-chat",)
    in_part = (("internvl-llama-dynamic-rope", POSITIONS),)
