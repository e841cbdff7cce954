"""A bounded pool of processes for work on what strangers send. Imports no torch."""

from engine_core.workers.pool import Limits, WorkerError, WorkerPool, Workers
from engine_core.workers.shared import SharedBytes

__all__ = ["Limits", "SharedBytes", "WorkerError", "WorkerPool", "Workers"]
