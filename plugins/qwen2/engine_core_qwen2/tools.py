"""Tool calls of Qwen2.5 and Qwen3. Imports no torch."""

from __future__ import annotations

from engine_core.parsers import TaggedCallParser


class HermesToolParser(TaggedCallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Nous Research's
    Hermes models: https://github.com/NousResearch/Hermes-Function-Calling.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
