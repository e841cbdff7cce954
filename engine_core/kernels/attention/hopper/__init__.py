"""Prefill attention for one generation of GPUs."""
