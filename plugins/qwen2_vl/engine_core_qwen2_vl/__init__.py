"""Qwen2-VL and Qwen2.5-VL for engine-core: text, images and videos."""
