"""The conformance kit on this family."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_internlm2"
    in_full = ("internlm2-dynamic-rope",)
