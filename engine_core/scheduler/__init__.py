"""Planning of steps: which sequence computes which tokens. Imports no torch."""

from engine_core.scheduler.scheduler import Scheduler, check_sequence
from engine_core.scheduler.sequence import Sequence, SequenceStatus

__all__ = ["Scheduler", "Sequence", "SequenceStatus", "check_sequence"]
