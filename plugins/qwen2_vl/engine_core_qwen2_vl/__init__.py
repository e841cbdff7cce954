"""Qwen2-VL for engine-core: text, images and videos."""
