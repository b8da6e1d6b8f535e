"""A batch on the stub: lines per second, the gateway's memory, and what it costs interactive requests beside it.

    python -m benchmarks.gateway.batch [--lines 100000] [--url http://127.0.0.1:8000] [--pid GATEWAY]

Without --url a local stack of its own is started on the stub engine, with a step of --step-ms.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from services.cli.target import read_run_file
from shared.process import die_with_parent

READY = 120.0
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


async def latencies(http: httpx.AsyncClient, model: str, end: asyncio.Event) -> list[float]:
    """Milliseconds of short interactive requests, one after the other, until `end`."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    found = []
    while not end.is_set():
        began = time.perf_counter()
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        found.append((time.perf_counter() - began) * 1000)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), PAUSE)
    return found


def shown(found: list[float]) -> str:
    ranked = sorted(found)
    return (
        f"p50 {statistics.median(ranked):.1f} ms, p95 {ranked[int(len(ranked) * 0.95)]:.1f} ms "
        f"({len(ranked)} requests)"
    )


async def quiet(http: httpx.AsyncClient, model: str) -> list[float]:
    end = asyncio.Event()
    asyncio.get_running_loop().call_later(QUIET, end.set)
    return await latencies(http, model, end)


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
    """Each custom_id is in the output once. Raises `SystemExit`."""
    seen = bytearray(lines)
    rest = b""
    async with http.stream("GET", f"/v1/files/{batch['output_file_id']}/content") as response:
        async for part in response.aiter_bytes():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                seen[int(msgspec.json.decode(line)["custom_id"][1:])] += 1
    if set(seen) != {1}:
        raise SystemExit("error: a line is missing in the output, or there twice.")


async def measure(url: str, pid: int, lines: int, tokens: int, *, beside: bool) -> None:
    timeout = httpx.Timeout(120.0, read=600.0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        idle = await quiet(http, model) if beside else []
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "input.jsonl")
            size = write_input(path, lines, model, tokens)
            memory = Memory(pid)
            watching = asyncio.create_task(memory.watch())
            end = asyncio.Event()
            loaded = asyncio.create_task(latencies(http, model, end)) if beside else None
            batch = await run_batch(http, path)
            end.set()
            during = await loaded if loaded else []
            watching.cancel()
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != lines:
            raise SystemExit(f"error: the batch is {batch['status']}: {batch['request_counts']}")
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


@contextlib.asynccontextmanager
async def own_stack(step_ms: float) -> AsyncIterator[tuple[str, int]]:
    """A stub stack's gateway: address and process id."""
    with tempfile.TemporaryDirectory() as directory:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "services.cli",
                "up",
                "--engine",
                "stub",
                "--port",
                "0",
                "--no-smoke-test",
            ),
            *("--data-dir", directory),
            env=os.environ | {"RYZANSTEIN_STUB_STEP_MS": str(step_ms)},
            stdout=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        try:
            url = await ready(Path(directory))
            yield url, gateway_pid(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def ready(directory: Path) -> str:
    """The gateway's address, once it has a model."""
    give_up = time.monotonic() + READY
    async with httpx.AsyncClient(trust_env=False) as http:
        while time.monotonic() < give_up:
            await asyncio.sleep(0.2)
            if (note := read_run_file(directory)) is None:
                continue
            with contextlib.suppress(httpx.HTTPError, ValueError):
                if (await http.get(f"{note.gateway_url}/v1/models")).json().get("data"):
                    return note.gateway_url
    raise SystemExit(f"error: the stack was not ready within {READY:g} s.")


def gateway_pid(stack: int) -> int:
    """The gateway among the children of a stack."""
    for child in psutil.Process(stack).children(recursive=True):
        if "services.gateway" in child.cmdline():
            return child.pid
    raise SystemExit("error: the stack has no gateway process; name it with --pid.")


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.batch")
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the stub, in a stack of its own")
    parser.add_argument("--url", default="")
    parser.add_argument("--pid", type=int, default=0, help="of the gateway at --url")
    parser.add_argument("--alone", action="store_true", help="no interactive requests beside it")
    options = parser.parse_args()
    beside = not options.alone
    if options.url:
        await measure(options.url, options.pid, options.lines, options.tokens, beside=beside)
        return
    async with own_stack(options.step_ms) as (url, pid):
        await measure(url, pid, options.lines, options.tokens, beside=beside)


if __name__ == "__main__":
    asyncio.run(main())
