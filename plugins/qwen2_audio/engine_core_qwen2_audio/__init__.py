"""Qwen2-Audio for engine-core: text and sounds."""
