"""The engine: requests in, outputs out, and the loop between."""

from engine_core.engine.engine import Engine, Prompt
from engine_core.engine.llm import LLM

__all__ = ["LLM", "Engine", "Prompt"]
