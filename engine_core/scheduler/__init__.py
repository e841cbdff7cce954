"""Planning of steps: which request computes which tokens. Pure Python."""

from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.scheduler import Scheduler, check_request

__all__ = ["Request", "RequestStatus", "Scheduler", "check_request"]
