"""Whether a checkpoint will run, found out in seconds and without loading it."""

from engine_core.check.preflight import check_model
from engine_core.check.report import CheckReport, Problem

__all__ = ["CheckReport", "Problem", "check_model"]
