"""Bugs of gateways, put back by replacing methods of their classes in the process of a run."""

import functools
import time
from typing import Any

from services.gateway.batches import line_runner
from services.gateway.lifecycle.answers import Answers
from services.gateway.lifecycle.cancellation import Cancellations
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from shared.messages.records import Idempotency


def split_brain() -> None:
    """As before 7d2112fa: whose reader has gone is cancelled without asking who owns it, and the cancellation is kept
    until the broker is reached again, under no claim."""
    cancel = Cancellations.cancel

    def without_claim(self: Cancellations, generation: Any, *, by_owner: bool) -> None:
        cancel(self, generation, by_owner=False)

    def give_up(self: Answers, answer: Any) -> None:
        self.cancel(answer, by_owner=True)

    Cancellations.cancel = without_claim  # type: ignore[method-assign]
    Answers._give_up = give_up  # type: ignore[method-assign]


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
