"""Panels of a GGUF file's blocks; :mod:`engine_core.kernels.block_linear.forms` has both layouts.

``reference`` are torch's operations there.
"""
