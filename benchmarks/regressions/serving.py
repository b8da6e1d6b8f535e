"""Ratios of the served system: against the engine in this process, and of its services against each other."""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.control_plane.systems import HOST, Ours
from benchmarks.errors import BenchError
from benchmarks.process_cpu import cpu_seconds
from benchmarks.regressions.measures import Rounds
from benchmarks.serve.workloads import Workload

ONE = Workload("one", clients=1, requests=2, prompt_tokens=128, output_tokens=64)
STREAMS = 160
"""Answers of each turn that CPU time is taken of."""
MANY = Workload("many", clients=32, requests=64, prompt_tokens=64, output_tokens=32)


def served(model: Path, rounds: int, effort: int) -> Rounds:
    """A server's tokens/s over those of the same engine in this process, with the same shapes."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-perf-") as scratch:
        return asyncio.run(_served(model, rounds, effort, Path(scratch)))


async def _served(model: Path, rounds: int, effort: int, scratch: Path) -> Rounds:
    threads = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from benchmarks.inprocess import InProcess
    from services.executor.supervisor.rank_process import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    ours = Ours(scratch / "stack", model=model, engine="torch")
    await ours.start()
    try:
        here = InProcess(model, scratch, threads)
        source = random.Random(2)  # prompts are new each time, there as here: the cache would keep them
        found: Rounds = {}
        for name, workload in (("1 at a time", ONE), ("32 at once", MANY)):
            sized = workload.resized(requests=workload.requests * effort)
            rates = found[f"served, tokens/s against in-process, {name}"] = []
            for at in range(rounds + 1):
                there = await _rate(ours.port, sized, source) if at % 2 else 0.0
                times = await asyncio.to_thread(here.run, sized)
                there = there or await _rate(ours.port, sized, source)
                if at:
                    rates.append(there * times.wall / times.tokens)
        return found
    finally:
        await ours.stop()


async def _rate(port: int, workload: Workload, source: random.Random) -> float:
    """Tokens/s of a closed loop that streams; prompts are token ids, so that both ways compute the same."""
    left = [
        _request(port, [source.randrange(100, 40_000) for _ in range(workload.prompt_tokens)], workload)
        for _ in range(workload.requests)
    ]

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
        while left:
            writer.write(left.pop())
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            if b'"completion_tokens":%d' % workload.output_tokens not in answer:
                raise BenchError(f"The server's answer is not the one that was measured: {answer[-600:]!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.clients)))
    return workload.requests * workload.output_tokens / (time.perf_counter() - began)


def _request(port: int, prompt: list[int], workload: Workload) -> bytes:
    fields = {
        "model": "stub",
        "prompt": prompt,
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def services(model: Path, rounds: int, effort: int) -> Rounds:
    """CPU time of services on the stub engine: the gateway's over the executor's, and gRPC's over REST's."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-perf-") as scratch:
        return asyncio.run(_services(rounds, effort, Path(scratch)))


async def _services(rounds: int, effort: int, scratch: Path) -> Rounds:
    from benchmarks.gateway.grpc_rest import CLIENTS

    tokens, loops, requests = 128, 16, STREAMS * effort
    ours = Ours(scratch, grpc=True)
    await ours.start()
    shares: list[float] = []
    apis: list[float] = []
    try:
        async with CLIENTS["rest raw"](ours, loops) as rest, CLIENTS["grpc raw"](ours, loops) as grpc:
            for at in range(rounds + 1):
                ways = [rest, grpc] if at % 2 else [grpc, rest]
                spent = {ask: await _cpu(ours, ask, tokens, loops, requests) for ask in ways}
                if at:
                    shares.append(spent[rest]["gateway"] / spent[rest]["executor"])
                    apis.append(spent[grpc]["gateway"] / spent[rest]["gateway"])
    finally:
        await ours.stop()
    return {
        "gateway, CPU of a token against the executor's": shares,
        "gRPC, CPU of a streamed answer against REST": apis,
    }


async def _cpu(
    ours: Ours, ask: Callable[[int, bool], Awaitable[int]], tokens: int, loops: int, requests: int
) -> dict[str, float]:
    """CPU seconds of each service for so many streamed answers."""
    processes = ours.processes()
    before = cpu_seconds(processes)

    async def loop() -> None:
        for _ in range(requests // loops):
            await ask(tokens, True)

    await asyncio.gather(*(loop() for _ in range(loops)))
    after = cpu_seconds(processes)
    return {name: after[name] - before[name] for name in processes}
