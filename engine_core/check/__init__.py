"""The pre-flight check: whether a checkpoint will run, without loading it."""

from engine_core.check.preflight import check_model
from engine_core.check.report import CheckReport, Problem

__all__ = ["CheckReport", "Problem", "check_model"]
