"""Tests that ``pytest --pyargs engine_core.testing --model-package PACKAGE`` collects."""

from engine_core.testing.suite import ConformanceTests


class TestConformance(ConformanceTests):
    """Every check on every case of the package."""
