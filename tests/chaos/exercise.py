"""One fault under load, from the first token before it to the last request that it touched."""

import time
from dataclasses import dataclass

from tests.chaos.cluster_fixture import House
from tests.chaos.faults import Fault
from tests.chaos.load import Load, Record, median


@dataclass(frozen=True)
class Row:
    """What a fault cost. Seconds, unless said otherwise; None: does not apply."""

    fault: str
    detected: float | None  # from the fault to the news of it
    streaming: float  # from the fault until the longest wait of every stream that was under way was over
    whole: float  # from the fault until everything was as before, restarts by the supervisor included
    # Milliseconds from the detection to the next token, median of the streams that changed their ring.
    gap_ms: float | None
    moved: int  # streams that changed their ring
    stall: float  # the longest wait for a token, the first one included, of any stream
    requests: int
    again: int  # requests that clients sent again, because their connection broke or they were told to


async def exercise(house: House, fault: Fault, load: Load) -> Row:
    """Injects, waits until it is noticed, heals, waits until every client is served as before."""
    await load.flowing()
    await house.watch.until(house.all_work, 60, "every ring has work")
    at, detected, whole = await struck(house, fault)
    await load.settled(whole)
    return row_of(fault.name, load.records, house.watch.moved, at, detected, whole)


async def struck(house: House, fault: Fault) -> tuple[float, float | None, float]:
    """Injects, waits until it is noticed, heals: when it came, was noticed, and was over."""
    at = time.monotonic()
    await fault.inject(house)
    detected = await fault.detected(house, at)
    healed = time.monotonic()
    await fault.heal(house)
    return at, detected, await fault.recovered(house, at if detected is None else min(healed, detected))


def row_of(
    name: str, records: list[Record], moved: dict[str, float], at: float, detected: float | None, whole: float
) -> Row:
    told = at if detected is None else detected
    streams = [r for r in records if r.kind != "plain"]
    under_way = [r for r in streams if r.under_way(at)]
    hit = [r for r in streams if r.under_way(told) and r.generation in moved]
    gaps = [gap for r in hit if not r.broken and (gap := r.gap_after(told)) is not None]
    return Row(
        name,
        None if detected is None else detected - at,
        max((r.flowing_again(at, told) - at for r in under_way), default=0.0),
        whole - at,
        median(gaps) * 1e3 if gaps and detected is not None else None,
        len(hit),
        max((r.stall() for r in streams if r.started <= whole and (not r.ended or r.ended > at)), default=0.0),
        len(records),
        sum(bool(r.broken or r.refused) for r in records),
    )


def markdown(rows: list[Row]) -> str:
    """The table of docs/reliability.md."""
    lines = [
        "| fault | detected after | streams flow after | gap after detection (median) | longest wait for a token | "
        "recovered after | streams moved | requests | retried |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for row in rows:
        told = "-" if row.detected is None else f"{row.detected:.2f} s"
        gap = "-" if row.gap_ms is None else f"{row.gap_ms:.0f} ms"
        lines.append(
            f"| {row.fault} | {told} | {row.streaming:.2f} s | {gap} | {row.stall:.2f} s | {row.whole:.2f} s | "
            f"{row.moved} | {row.requests} | {row.again} |"
        )
    return "\n".join(lines)
