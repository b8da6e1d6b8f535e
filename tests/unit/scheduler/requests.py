"""Requests and groups for scheduler tests."""

import math
from typing import Literal

from services.scheduler.request import Prefix, WaitingRequest
from shared.messages import GroupLoad, GroupRecord, GroupStatus, GroupTraits, Lane, SparseKind


class Settled:
    """A delivery that only counts its acknowledgements."""

    def __init__(self) -> None:
        self.count = 0

    async def ack(self) -> None:
        self.count += 1

    def ours(self, now: float) -> bool:
        return True

    def drop(self) -> None:
        raise AssertionError("it is ours")


def waiting(
    name: str,
    *,
    model: str = "m",
    lane: Lane = "interactive",
    order: int = 0,
    attempt: int = 0,
    deadline: float = 0.0,
    tokens: int = 10,
    raw: bytes = b"x",
    tenant: str = "",
    cost: int = 1,
    due: float = math.inf,
    prefixes: tuple[Prefix, ...] = (),
    priority: int = 0,
    adapter: str = "",
    session: str = "",
    sparse: SparseKind | Literal[""] = "",
) -> WaitingRequest:
    return WaitingRequest(
        priority=priority,
        adapter=adapter,
        sparse=sparse,
        generation_id=name,
        request_id=f"r-{name}",
        model=model,
        consumer="c",
        lane=lane,
        tenant=tenant,
        session=session,
        deadline=deadline,
        attempt=attempt,
        position=0,
        tokens=tokens,
        order=order,
        raw=raw,
        delivery=Settled(),
        cost=cost,
        due=due,
        prefixes=prefixes,
    )


def group(
    name: str,
    *,
    model: str = "m",
    epoch: int = 1,
    state: GroupStatus = "ready",
    load: GroupLoad | None = None,
    updated_at: float = 0.0,
    traits: GroupTraits | None = None,
) -> GroupRecord:
    return GroupRecord(
        group=name,
        model=model,
        state=state,
        epoch=epoch,
        ranks=[],
        load=load or GroupLoad(free_blocks=100, total_blocks=100),
        updated_at=updated_at,
        traits=traits,
    )
