"""The conformance kit on this family."""

from family_conformance import WEIGHTS, SomeInFull


class TestConformance(SomeInFull):
    package = "engine_core_chatglm"
    in_full = ("chatglm1",)
    in_part = (("chatglm3", WEIGHTS),)
