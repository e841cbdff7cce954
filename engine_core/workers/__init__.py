"""A bounded pool of processes for work on what strangers send. Imports no torch."""

from engine_core.workers.pool import Limits, WorkerError, WorkerPool

__all__ = ["Limits", "WorkerError", "WorkerPool"]
