"""The conformance kit on this family."""

from family_conformance import POSITIONS, SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_qwen2"
    in_full = ("qwen3-moe-dense-layers",)
    in_part = (("qwen2-window-from-layer-1", POSITIONS),)
