"""Whose turn it is, where tenants share one worker: each in turn, whatever the others have waiting. Pure.

tenant a   j1 j2 j3 ┐
tenant b   j4       ├─▶ j1 j4 j5 j2 j6 j3
tenant c   j5 j6    ┘
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Turns(Generic[Job]):
    """Jobs that wait. Not for several threads at a time."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        """By tenant; the first one's turn is next. None is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return len(self._waiting.get(tenant, ()))

    def add(self, tenant: str, job: Job) -> None:
        self._waiting.setdefault(tenant, deque()).append(job)

    def next(self) -> Job | None:
        """The job whose turn it is; None: none waits."""
        if not self._waiting:
            return None
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job
