"""The conformance kit on this family."""

from family_conformance import SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_qwen2"
    in_full = ("qwen2-window-from-layer-1", "qwen3-moe-dense-layers")
