"""A batch on the stub: lines per second, the gateway's memory, and what it costs interactive requests beside it.

    python -m benchmarks.gateway.batch [--lines 100000] [--url http://127.0.0.1:8000] [--pid GATEWAY]

Without --url a local stack of its own is started on the stub engine, with a step of --step-ms.
"""

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import psutil
import typer

from benchmarks.control_plane.systems import HOST, Ours
from benchmarks.errors import BenchError
from benchmarks.harness import nearest, run
from benchmarks.serve.runner import choose_model
from benchmarks.serve.sse import Client

QUIET = 5.0
"""Seconds of interactive requests without a batch."""
PAUSE = 0.05
"""Seconds between two interactive requests."""


class Memory:
    """The largest resident memory of a process, looked at while something runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.peak = self._process.memory_info().rss

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._process.memory_info().rss)
            await asyncio.sleep(0.1)


def write_input(path: Path, lines: int, model: str, tokens: int) -> int:
    """Returns its bytes."""
    with path.open("wb") as out:
        for number in range(lines):
            messages = [{"role": "user", "content": f"Say the number {number}."}]
            body = {"model": model, "max_tokens": tokens, "messages": messages}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(msgspec.json.encode(line) + b"\n")
        return out.tell()


async def latencies(client: Client, model: str, end: asyncio.Event) -> list[float]:
    """Milliseconds of short interactive requests, one after the other, until `end`."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    found = []
    while not end.is_set():
        began = time.perf_counter()
        await client.ask("/v1/chat/completions", body)
        found.append((time.perf_counter() - began) * 1000)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), PAUSE)
    return found


def shown(found: list[float]) -> str:
    return f"p50 {nearest(found, 0.5):.1f} ms, p95 {nearest(found, 0.95):.1f} ms ({len(found)} requests)"


async def quiet(client: Client, model: str) -> list[float]:
    end = asyncio.Event()
    asyncio.get_running_loop().call_later(QUIET, end.set)
    return await latencies(client, model, end)


async def run_batch(http: httpx.AsyncClient, path: Path) -> dict[str, Any]:
    with path.open("rb") as data:
        answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": (path.name, data)})
    body = {
        "input_file_id": answer.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch: dict[str, Any] = (await http.post("/v1/batches", json=body)).raise_for_status().json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.5)
        batch = (await http.get(f"/v1/batches/{batch['id']}")).raise_for_status().json()
    return batch


async def check_output(http: httpx.AsyncClient, batch: dict[str, Any], lines: int) -> None:
    """Each custom_id is in the output once. Raises `BenchError`."""
    seen = bytearray(lines)
    rest = b""
    async with http.stream("GET", f"/v1/files/{batch['output_file_id']}/content") as response:
        async for part in response.aiter_bytes():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                seen[int(msgspec.json.decode(line)["custom_id"][1:])] += 1
    if set(seen) != {1}:
        raise BenchError("A line is missing in the output, or there twice.")


async def measure(url: str, pid: int, lines: int, tokens: int, *, beside: bool) -> None:
    timeout, client = httpx.Timeout(120.0, read=600.0), Client(url)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
        model = await choose_model(client, None)
        idle = await quiet(client, model) if beside else []
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "input.jsonl")
            size = write_input(path, lines, model, tokens)
            memory = Memory(pid)
            watching = asyncio.create_task(memory.watch())
            end = asyncio.Event()
            loaded = asyncio.create_task(latencies(client, model, end)) if beside else None
            batch = await run_batch(http, path)
            end.set()
            during = await loaded if loaded else []
            watching.cancel()
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != lines:
            raise BenchError(f"The batch is {batch['status']}: {batch['request_counts']}.")
        await check_output(http, batch, lines)
    checking = batch["in_progress_at"] - batch["created_at"]
    running = batch["finalizing_at"] - batch["in_progress_at"]
    writing = batch["completed_at"] - batch["finalizing_at"]
    print(f"lines        {lines:,} in {size / 1e6:.1f} MB, each in the output once")
    print(f"time         checked in {checking} s, run in {running} s, files written in {writing} s")
    print(
        f"throughput   {lines / max(1, running):.0f} lines/s, {lines * tokens / max(1, running):.0f} tokens/s"
    )
    print(
        f"memory       gateway {memory.before / 2**20:.0f} MiB before, {memory.peak / 2**20:.0f} MiB at most"
    )
    if beside:
        print(f"interactive  without the batch  {shown(idle)}")
        print(f"             beside the batch   {shown(during)}")


async def run_options(url: str, pid: int, step_ms: float, lines: int, tokens: int, beside: bool) -> None:
    if url:
        await measure(url, pid, lines, tokens, beside=beside)
        return
    with tempfile.TemporaryDirectory() as directory:
        ours = Ours(Path(directory), step_ms=step_ms)
        await ours.start()
        try:
            gateway = ours.processes()["gateway"][0]
            await measure(f"http://{HOST}:{ours.port}", gateway, lines, tokens, beside=beside)
        finally:
            await ours.stop()


def main(
    lines: int = 100_000,
    tokens: int = 16,
    step_ms: Annotated[float, typer.Option(help="Of the stub, in a stack of its own.")] = 0.0,
    url: Annotated[str, typer.Option(help="Of a gateway; empty: of a stack of its own.")] = "",
    pid: Annotated[int, typer.Option(help="Of the gateway at --url.")] = 0,
    alone: Annotated[bool, typer.Option("--alone", help="No interactive requests beside it.")] = False,
) -> None:
    """A batch on the stub: lines per second, the gateway's memory, and what it costs others."""
    asyncio.run(run_options(url, pid, step_ms, lines, tokens, not alone))


if __name__ == "__main__":
    run(main)
