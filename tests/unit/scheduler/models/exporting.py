"""A kind of jobs that no part of the product knows: what hosts say of it."""

import msgspec

from shared.messages import HostBeat
from shared.messages.jobs import HostJobs


class Export(msgspec.Struct, frozen=True):
    job: str
    tenant: str = "t"
    attempt: int = 1
    memory: int = 0
    done: int = 0


class ExportingBeat(HostBeat, frozen=True, omit_defaults=True):
    """Of a host that takes exports too."""

    exports: list[Export] = []

    @property
    def jobs(self) -> dict[str, HostJobs]:
        return super().jobs | {"exports": HostJobs(2, self.exports)}
