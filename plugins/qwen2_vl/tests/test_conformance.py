"""The conformance kit on this family; what it shows of pictures is in the other tests."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_qwen2_vl"
    in_full = ("qwen2-vl",)
