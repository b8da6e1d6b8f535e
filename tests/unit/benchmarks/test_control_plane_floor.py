"""The bare servers give what the load client calls right, and messages arrive at both clients' receivers."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.control_plane.bench import Bench
from benchmarks.control_plane.floor import streams as floor
from benchmarks.control_plane.floor.messages import AT_ONCE, BARE, OURS, Messages
from benchmarks.control_plane.floor.streams import Floor, Server
from benchmarks.errors import BenchError


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the servers and their client need a C compiler")
async def test_each_server_answers_the_client_rightly(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 16, 8, 0.5, lambda text: None)
    found = await floor.streams(bench, tmp_path, 16, 2, lambda text: None)
    assert list(found) == ["C, one write", "C, a write for each event", "uvicorn"]
    for runs in found.values():
        assert len(runs) == 2
        assert all(run.figures.clean and run.cpu_ms["server"] > 0 for run in runs)
        assert all(run.figures.events_per_second >= 16 * run.figures.requests_per_second for run in runs)
    report = Floor(date="", command="", machine="m", tokens=16, connections=8, streams=found, messages=[])
    assert report.clean
    console = Console(width=200)
    with console.capture() as captured:
        floor.show(report, console)
    assert "uvicorn" in captured.get()


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
    console = Console(width=200)
    with console.capture() as captured:
        empty = Floor(date="", command="", machine="m", tokens=1, connections=1, streams={}, messages=costs)
        floor.show(empty, console)
    assert "stored" in captured.get()
