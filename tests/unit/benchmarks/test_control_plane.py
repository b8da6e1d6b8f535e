"""The load client in C against a server that answers rightly and wrongly, and the figures made of its records."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.control_plane.__main__ import Plan, run
from benchmarks.control_plane.bench import Bench
from benchmarks.control_plane.load_client import (
    Added,
    Figures,
    Load,
    Measured,
    Outcome,
    Record,
    compiled,
    drive,
    figures,
    holds,
    http_request,
    mark_line,
    median_run,
)
from benchmarks.control_plane.systems import HOST, Ours, body
from benchmarks.serve.stats import Spread
from tests.unit.benchmarks.terminal import shown

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the load client needs a C compiler")

TEXT = ["one ", "two ", "three"]


def events(text: list[str] = TEXT, finish: str = "length", tokens: int = 3, done: bool = True) -> list[bytes]:
    deltas = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in ["", *text]]
    last = {"choices": [{"delta": {}, "finish_reason": finish}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}
    found = [json.dumps(each, separators=(",", ":")).encode() for each in [*deltas, last, usage]]
    return [b"data: " + each + b"\n\n" for each in found] + ([b"data: [DONE]\n\n"] if done else [])


def chunked(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def server(
    answer: Callable[[], bytes | None], piece: int = 1 << 16, pause: float = 0.0
) -> AsyncIterator[tuple[int, list[str]]]:
    """Answers every request with `answer()` in pieces of that many bytes; None: closes. Gives port and bodies."""
    bodies: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                bodies.append((await reader.readexactly(int(length[1]))).decode())
                data = answer()
                if data is None:
                    return
                for start in range(0, len(data), piece):
                    writer.write(data[start : start + piece])
                    await writer.drain()
                    if pause:
                        await asyncio.sleep(pause)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, HOST, 0)
    try:
        yield listening.sockets[0].getsockname()[1], bodies
    finally:
        listening.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("client"))


async def load(program: Path, port: int, *, rate: float = 0.0, text: str = "".join(TEXT)) -> Figures:
    request = http_request(HOST, port, body("m", 3, {}))
    plan = Load(host=HOST, port=port, request=request, tokens=3, text=text, connections=4, rate=rate, seconds=0.3)
    return await asyncio.to_thread(drive, program, plan)


async def test_right_answers_count_and_no_two_prompts_are_alike(program: Path) -> None:
    async with server(lambda: chunked(events())) as (port, bodies):
        found = await load(program, port)
    assert found.clean
    assert found.requests > 4
    assert found.events_per_second == pytest.approx(3 * found.requests_per_second)
    assert found.whole_ms is not None
    assert found.first_ms is not None
    assert found.first_ms.p50 <= found.whole_ms.p50
    assert len(set(bodies)) == len(bodies)


async def test_answers_in_pieces_are_put_together(program: Path) -> None:
    async with server(lambda: chunked(events()), piece=7) as (port, _):
        assert (await load(program, port)).clean


async def test_an_open_loop_asks_at_its_rate(program: Path) -> None:
    async with server(lambda: chunked(events())) as (port, bodies):
        found = await load(program, port, rate=200)
    assert found.clean
    assert 20 <= len(bodies) <= 120  # 60 expected


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (chunked(events(["one ", "two ", "four"])), "wrong text"),
        (chunked(events(tokens=2)), "wrong number of tokens"),
        (chunked(events(finish="stop")), "wrong finish_reason"),
        (chunked(events(done=False)), "no [DONE]"),
        (chunked([*events()[:2], b'data: {"error":{"message":"no"}}\n\n']), "error event"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}", "status is not 200"),
        (None, "cut off"),
    ],
)
async def test_wrong_answers_are_faults(program: Path, data: bytes | None, fault: str) -> None:
    async with server(lambda: data) as (port, _):
        found = await load(program, port)
    assert set(found.faults) == {fault}
    assert found.requests == found.faults[fault] > 0
    assert found.whole_ms is None


async def test_a_port_without_a_server_is_a_fault(program: Path) -> None:
    async with server(lambda: None) as (port, _):
        pass
    assert set((await load(program, port)).faults) == {"not connected"}


def test_figures_of_known_records() -> None:
    plan = Load(host=HOST, port=1, request=b"", tokens=3, seconds=2.0)
    records = [
        Record(0.0, 0.010, 0.030, 0.040, 3, 0),
        Record(1.0, 1.020, 1.060, 1.080, 3, 0),
        Record(1.9, 1.950, 2.000, 2.100, 2, 0),  # ended after the time of the run
        Record(0.5, 0.0, 0.0, 0.6, 0, 1),
    ]
    found = figures(records, plan, 0.25)
    assert (found.requests, found.faults) == (4, {"status is not 200": 1})
    assert found.requests_per_second == 1.0
    assert found.events_per_second == 3.0
    assert found.whole_ms is not None
    assert (found.whole_ms.p50, found.whole_ms.p99) == pytest.approx((80, 200))
    assert found.token_ms is not None
    assert found.token_ms.p50 == pytest.approx(20)


def measured(rate: float, p99: float, faults: dict[str, int] | None = None) -> Measured:
    spread = Spread(p99 / 2, p99)
    return Measured(
        system="ryzanstein",
        figures=Figures(
            requests=10,
            faults=faults or {},
            requests_per_second=rate,
            events_per_second=rate * 16,
            whole_ms=spread,
            first_ms=spread,
            token_ms=spread,
            client_cpu_seconds=0.1,
        ),
        cpu_ms={"gateway": 0.5, "client": 0.1},
    )


def test_a_run_holds_that_is_clean_and_below_the_limit() -> None:
    tried = [measured(800, 20), measured(1200, 60), measured(1000, 49), measured(1100, 30, {"cut off": 1})]
    assert [holds(each, 50) for each in tried] == [True, False, True, False]
    assert median_run(tried).figures.requests_per_second == 1000


def test_the_report_shows_the_ratio() -> None:
    outcome = Outcome(
        date="2026-01-01",
        command="c",
        machine="m",
        tokens=16,
        connections=64,
        closed={"ryzanstein": [measured(1500, 50)], "dynamo": [measured(3000, 40)]},
        limit_ms=50,
        at_mark=measured(1000, 60),
        added=Added(
            step_ms=20,
            streams=64,
            first_token_ms=Spread(3.0, 9.0),
            token_ms=Spread(1.0, 2.0),
            cpu_us_per_token={"gateway": 50.0},
        ),
        idle_ms={"gateway": 2.0, "nats": 1.0},
        left_out={},
    )
    text = shown(*outcome.parts())
    assert "in the same run: 0.50" in text
    assert "p99 60.0 ms, faults none: does not apply: the closed loop reaches 1,500" in text
    assert "first token 3.0 / 9.0 ms, each next token 1.0 / 2.0 ms; CPU us per token: 50" in text
    assert "Idle, CPU ms a second: 3.0 (gateway 2.0, nats 1.0)." in text


@pytest.mark.parametrize(
    ("p99", "closed", "verdict"),
    [(49, 900, "kept"), (49, 2500, "kept"), (51, 2500, "missed"), (51, 1999, "does not apply")],
)
def test_the_mark_binds_where_the_closed_loop_reaches_its_rate(p99: float, closed: float, verdict: str) -> None:
    assert verdict in mark_line(measured(1000, p99), closed, 50)


def test_a_fault_misses_the_mark() -> None:
    line = mark_line(measured(1000, 10, {"cut off": 1}), 2500, 50)
    assert "faults 1 cut off: missed" in line


@pytest.mark.nightly
async def test_a_run_measures_the_closed_loop_and_an_idle_stack(tmp_path: Path) -> None:
    plan = Plan(work=tmp_path, connections=8, seconds=0.5, rounds=2, limit_ms=0, step_ms=0, idle_seconds=0.5)
    found = await run(plan, tmp_path, lambda text: None)
    assert found.clean
    assert [one.system for one in found.closed["ryzanstein"]] == ["ryzanstein"] * 2
    assert sum(found.idle_ms.values()) > 0


@pytest.mark.slow
async def test_our_stack_answers_the_client_rightly(program: Path, tmp_path: Path) -> None:
    stack = Ours(tmp_path)
    await stack.start()
    try:
        bench = Bench(tmp_path, 16, 8, 0.5, lambda text: None)
        found = await bench.measure(stack)
        assert found.figures.clean, found.figures.faults
        assert {"gateway", "scheduler", "executor", "nats", "client"} <= set(found.cpu_ms)
    finally:
        await stack.stop()
