"""Which request computes which tokens in the next step. Pure Python."""

from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.scheduler import Scheduler, check_request

__all__ = ["Request", "RequestStatus", "Scheduler", "check_request"]
