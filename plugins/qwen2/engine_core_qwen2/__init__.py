"""Qwen2, Qwen2.5 and dense Qwen3 for engine-core."""
