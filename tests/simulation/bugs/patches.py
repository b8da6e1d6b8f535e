"""Bugs that were mended, put back by replacing methods of their classes in the process of a run.

Each is the code as it was before the commit that it names, as far as it was wrong.
"""

import functools
import time
from typing import Any

from services.gateway.batches import line_runner, states
from services.gateway.core.catalog import Catalog
from services.gateway.lifecycle.cancellation import Cancellations
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from services.gateway.lifecycle.records import RecordWriter
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.scheduler.fair_queue import FairQueue
from shared.errors import LinkLost
from shared.messages.records import Idempotency
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.tenants import Holdings


def split_brain() -> None:
    """As before 7d2112fa: whose reader has gone is cancelled without asking who owns it, and the cancellation is kept
    until the broker is reached again, under no claim."""
    cancel = Cancellations.cancel

    def without_claim(self: Cancellations, generation: Any, *, by_owner: bool) -> None:
        cancel(self, generation, by_owner=False)

    def give_up(self: RequestTracker, answer: Any) -> None:
        self.cancel(answer, by_owner=True)

    Cancellations.cancel = without_claim  # type: ignore[method-assign]
    RequestTracker._give_up = give_up  # type: ignore[method-assign]


def keys_without_compare_and_set() -> None:
    """Who comes last has an idempotency key, and who came first generates too."""

    async def take(self: IdempotencyKeys, name: str, identity: str, print_: str, stale: object) -> bool:
        await self.bucket.put(name, Idempotency(identity, print_, time.time()))
        return True

    IdempotencyKeys.take = take  # type: ignore[method-assign]


def lines_without_keys() -> None:
    """A batch's line that was begun by a gateway that died is computed once more."""
    context = line_runner.Context

    @functools.wraps(context)
    def without_key(*args: Any, **named: Any) -> Any:
        return context(*args, **{**named, "key": ""})

    line_runner.Context = without_key  # type: ignore[misc,assignment]


def flush_ends_claims() -> None:
    """As before 4edb18ab: a flush that takes too long raises nats-py's own error, which nobody expects."""

    async def flush(self: Bus) -> None:
        await self._client._flush_pending(force_flush=True)
        await self._client.flush()

    Bus.flush = flush  # type: ignore[method-assign]


def records_given_up() -> None:
    """As before 074aa6a7: a record is stored a second time where the link was lost, and given up where nobody
    answers."""

    async def store(self: RecordWriter, batch: Any) -> None:
        subject, message = subjects.records(self._writer, batch.slot), {"records": batch.payloads}
        try:
            number = await self._bus.publish_durable(subject, message)
        except LinkLost:
            number = await self._bus.publish_durable(subject, message)
        self._journal.on_stored(number)

    RecordWriter._store = store  # type: ignore[method-assign]


def models_unknown_elsewhere() -> None:
    """As before 9f597b4d: a gateway whose watch of the registry is behind says that a model does not exist."""

    async def resolve(self: Catalog, name: str, tenant: str | None = None) -> Any:
        return self.resolve(name, tenant)

    Catalog.resolve_or_look_up = resolve  # type: ignore[method-assign]


def one_turn_for_all() -> None:
    """Requests wait in the order in which they came, whosever they are."""
    push = FairQueue.push

    def together(self: FairQueue, item: Any) -> None:
        item.tenant = ""
        push(self, item)

    FairQueue.push = together  # type: ignore[method-assign]


def lines_never_struck() -> None:
    """As before 06206ee2: nobody counts the gateways that a batch's line has ended."""
    states.losses = lambda job, line: 0


def one_quota_for_all() -> None:
    """What all tenants have together is held against the quota of each."""

    def of(self: Holdings, tenant: str) -> tuple[int, int]:
        sums = list(self._sums.values())
        return sum(entries for entries, _ in sums), sum(size for _, size in sums)

    Holdings.of = of  # type: ignore[method-assign]
