"""A bounded pool of processes for work on what strangers send. Imports no torch."""

from engine_core.workers.pool import Limits, WorkerError, WorkerPool, Workers
from engine_core.workers.shared import SharedBytes
from engine_core.workers.turns import Member

__all__ = ["Limits", "Member", "SharedBytes", "WorkerError", "WorkerPool", "Workers"]
