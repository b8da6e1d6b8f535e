"""What every job that outlives its gateway has, whatever its kind: batches and fine-tuning jobs extend it. And what
hosts say of those that run beside models, whatever their kind (`HostBeat.jobs`)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class _Named(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    tenant: str
    created_at: float


class JobRecord(_Named, frozen=True, omit_defaults=True, kw_only=True):
    """A job in a KV bucket; every change is a compare-and-set. Times are unix seconds, 0: not yet."""

    metadata: dict[str, str] | None = None
    # The gateway that looks after it; empty: whoever comes first. It writes the record every other second, so that a
    # record that stands still has lost its owner.
    owner: str = ""
    beat: int = 0  # grows with each of these writings
    clean: bool = False  # whether nothing is left to do: what it kept while it ran is gone again
    # Of the request under its idempotency key: another request under the same key is a mistake.
    fingerprint: str = ""
    key: str = ""  # id of the API key that it came under, whose limits it keeps; empty: none
    # Of the span that created it, where that was sampled: the traces of its work link to it.
    traceparent: str = ""


class HostJob(Protocol):
    """What a host says of a job that it has."""

    @property
    def job(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def memory(self) -> int:
        """Bytes that it was promised."""
        ...


class HostJobs(NamedTuple):
    """Of one kind, on one host."""

    places: int  # how many it takes at a time; 0: none
    jobs: Sequence[HostJob]  # those that it has
