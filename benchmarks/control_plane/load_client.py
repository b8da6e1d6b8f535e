"""The load client in C (`load_client.c`): compiled on this machine, run, and its records made into figures.

A Python client would take more CPU time than the server that it measures. Times are of one monotonic clock;
a response counts only when every token of it is right.
"""

import math
import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.errors import BenchError
from benchmarks.serve.stats import Spread
from shared.process import die_with_parent

_SOURCE = Path(__file__).with_suffix(".c")
_RECORD = struct.Struct("=ddddII")
_FAULTS = (
    "",
    "status is not 200",
    "wrong text",
    "wrong number of tokens",
    "wrong finish_reason",
    "no [DONE]",
    "error event",
    "cut off",
    "too long",
    "not answered in time",
    "not connected",
)
MARK = "############"
"""What the client replaces with the number of the request, so that no two prompts are alike."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client does to whom."""

    host: str
    port: int
    request: bytes
    """The whole HTTP request."""
    tokens: int
    text: str = ""
    """What each response must say; empty: anything."""
    connections: int = 64
    """Of a closed loop; of an open loop the most there may be."""
    rate: float = 0.0
    """Requests per second, at Poisson arrivals; 0: a closed loop."""
    seconds: float = 5.0
    quickack: bool = True
    """Whether every read is acknowledged at once."""
    seed: int = 1
    """Of the arrivals; also tells the prompts of one run from those of another."""


class Record(msgspec.Struct, frozen=True):
    """One request, in seconds since the start of the run; 0 for what did not come."""

    planned: float
    first: float
    last: float
    end: float
    events: int
    fault: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. Times are over the right responses; None where there was none."""

    requests: int
    faults: dict[str, int]
    requests_per_second: float
    events_per_second: float
    whole_ms: Spread | None
    first_ms: Spread | None
    token_ms: Spread | None
    """Per token after the first: the time from first to last event over the tokens between."""
    client_cpu_seconds: float

    @property
    def clean(self) -> bool:
        return self.requests > 0 and not self.faults


def http_request(host: str, port: int, body: bytes) -> bytes:
    """A POST to chat completions."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def compiled(folder: Path) -> Path:
    """The client's program in `folder`. Raises BenchError where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise BenchError("The load client needs a C compiler; install gcc, or name one with CC.")
    program = folder / "load_client"
    command = [compiler, "-O2", "-std=gnu11", str(_SOURCE), "-o", str(program), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchError(f"The load client cannot be compiled: {result.stderr.strip()[:300]}")
    return program


def drive(program: Path, load: Load) -> Figures:
    """One run; returns when its last response has come. Raises BenchError when the client fails."""
    with tempfile.TemporaryDirectory() as folder:
        request, records = Path(folder, "request"), Path(folder, "records")
        request.write_bytes(load.request)
        words = (load.host, load.port, load.connections, load.seconds, load.rate, load.tokens, load.text)
        command = [str(program), *map(str, words), str(int(load.quickack)), str(load.seed)]
        with subprocess.Popen(
            [*command, str(request), str(records)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent(),
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise BenchError(f"The load client ended with code {process.returncode}: {said.strip()[:300]}")
        found = [Record(*fields) for fields in _RECORD.iter_unpack(records.read_bytes())]
    return figures(found, load, usage.ru_utime + usage.ru_stime)


def figures(records: Sequence[Record], load: Load, cpu_seconds: float) -> Figures:
    """Rates count what ended within the time of the run, latencies every right response."""
    right = [record for record in records if not record.fault]
    in_time = [record for record in right if record.end <= load.seconds]
    gaps = [(r.last - r.first) * 1e3 / (load.tokens - 1) for r in right if load.tokens > 1]
    return Figures(
        requests=len(records),
        faults=dict(Counter(_FAULTS[record.fault] for record in records if record.fault)),
        requests_per_second=len(in_time) / load.seconds,
        events_per_second=sum(record.events for record in in_time) / load.seconds,
        whole_ms=_spread([(record.end - record.planned) * 1e3 for record in right]),
        first_ms=_spread([(record.first - record.planned) * 1e3 for record in right]),
        token_ms=_spread(gaps),
        client_cpu_seconds=cpu_seconds,
    )


def _spread(values: list[float]) -> Spread | None:
    """Nearest rank, as in `stats`."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.99)))
