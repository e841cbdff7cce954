"""Qwen-VL and Qwen (v1) for engine-core: text and images."""
