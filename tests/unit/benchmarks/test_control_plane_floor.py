"""The bare servers give what the load client calls right, and messages arrive at both clients' receivers."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane.bench import Bench
from benchmarks.control_plane.floor import streams as floor
from benchmarks.control_plane.floor.messages import AT_ONCE, BARE, OURS, Messages
from benchmarks.control_plane.floor.streams import Floor, Server
from benchmarks.control_plane.floor.wake_ups import PAUSES, RATES, WakeUps, measure_wake_ups
from benchmarks.errors import BenchError
from tests.unit.benchmarks.terminal import shown


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the servers and their client need a C compiler")
async def test_each_server_answers_the_client_rightly(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 16, 8, 0.5, lambda text: None)
    found = await floor.streams(bench, tmp_path, 16, 2, lambda text: None)
    assert list(found) == ["C, one write", "C, a write for each event", "uvicorn"]
    for runs in found.values():
        assert len(runs) == 2
        assert all(run.figures.clean and run.cpu_ms["server"] > 0 for run in runs)
        assert all(run.figures.events_per_second >= 16 * run.figures.requests_per_second for run in runs)
    assert "uvicorn" in told(streams=found)


def told(**found: Any) -> str:
    nothing: dict[str, Any] = {"streams": {}, "messages": [], "wake_ups": WakeUps(woken_us={}, work_us={})}
    report = Floor(date="", command="", machine="m", tokens=16, connections=8, **nothing | found)
    assert report.clean
    return shown(*report.parts())


async def test_a_server_that_does_not_start_is_told() -> None:
    server = Server("broken", ["false"])
    with pytest.raises(BenchError, match="broken did not start"):
        await server.start()
    await server.stop()


async def test_every_kind_of_message_is_sent_by_both_clients(tmp_path: Path) -> None:
    async with Messages.session(tmp_path) as messages:
        await messages.round(2 * AT_ONCE)
        await messages.round(2 * AT_ONCE)
        costs = messages.costs()
    kinds = [(cost.kind, cost.client) for cost in costs]
    assert kinds == [(kind, client) for kind in ("frame", "stored", "request") for client in (BARE, OURS)]
    assert all(cost.sender_us > 0 and cost.broker_us > 0 for cost in costs)
    assert all(cost.receiver_us > 0 for cost in costs if cost.kind != "stored")
    sizes = {cost.kind: {each.size for each in costs if each.kind == cost.kind} for cost in costs}
    assert all(len(size) == 1 for size in sizes.values())  # both send the same bytes
    assert "stored" in told(messages=costs)


async def test_wake_ups_are_counted_at_each_rate_and_pause() -> None:
    found = await measure_wake_ups(seconds=0.05, times=2)
    assert list(found.woken_us) == [str(rate) for rate in RATES]
    assert list(found.work_us) == [f"{pause * 1e3:g}" for pause in PAUSES]
    assert all(us > 0 for us in (*found.woken_us.values(), *found.work_us.values()))
    assert "after 20 ms" in told(wake_ups=found)
