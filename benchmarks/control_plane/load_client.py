"""The load client in C (`load_client.c`): compiled on this machine, run, its records made into figures and shown.

A Python client would take more CPU time than the server that it measures. Times are of one monotonic clock;
a response counts only when every token of it is right.
"""

import os
import shutil
import statistics
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.errors import BenchError
from benchmarks.harness import Report, Sheet, nearest
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
# Requests/s: at the first, in an open loop, the 99th percentile must keep the limit wherever a closed loop reaches the
# second.
MARK_RATE, MARK_CLOSED = 1000.0, 2000.0
# What the client replaces with the number of the request, so that no two prompts are alike.
MARK = "############"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client does to whom."""

    host: str
    port: int
    request: bytes  # the whole HTTP request
    tokens: int
    text: str = ""  # what each response must say; empty: anything
    connections: int = 64  # of a closed loop; of an open loop the most there may be
    rate: float = 0.0  # requests per second, at Poisson arrivals; 0: a closed loop
    seconds: float = 5.0
    seed: int = 1  # of the arrivals; also tells the prompts of one run from those of another


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
    # Per token after the first: the time from first to last event over the tokens between.
    token_ms: Spread | None
    client_cpu_seconds: float

    @property
    def clean(self) -> bool:
        return self.requests > 0 and not self.faults


def http_request(host: str, port: int, body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """A POST, as a client sends it."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def compiled(folder: Path) -> Path:
    """The client's program in `folder`. Raises BenchError where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise BenchError("The load client needs a C compiler; install gcc, or name one with CC.")
    program = folder / _SOURCE.stem
    command = [compiler, "-O2", "-std=gnu11", str(_SOURCE), "-o", str(program), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchError(f"{_SOURCE.name} cannot be compiled: {result.stderr.strip()[:300]}")
    return program


def drive(program: Path, load: Load) -> Figures:
    """One run; returns when its last response has come. Raises BenchError when the client fails."""
    with tempfile.TemporaryDirectory() as folder:
        request, records = Path(folder, "request"), Path(folder, "records")
        request.write_bytes(load.request)
        words = (load.host, load.port, load.connections, load.seconds, load.rate, load.tokens, load.text)
        command = [str(program), *map(str, words), "1", str(load.seed)]
        with subprocess.Popen(
            [*command, str(request), str(records)], stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
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
    return Spread(nearest(values, 0.50), nearest(values, 0.99)) if values else None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one system."""

    system: str
    figures: Figures
    cpu_ms: dict[str, float]  # CPU milliseconds per right request, by process; the client's too

    @property
    def cpu_total(self) -> float:
        return sum(self.cpu_ms.values())


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """What comes on top of the engine's own time at a set speed."""

    step_ms: float
    streams: float  # open at once, in the mean
    # Time to the first token, less one step and the half step that is under way at an arrival.
    first_token_ms: Spread
    token_ms: Spread  # time per later token, less one step; a request counts once, with its mean
    cpu_us_per_token: dict[str, float]  # by process; the client's too


class Outcome(Report, frozen=True, kw_only=True):
    limit_ms: float
    tokens: int
    connections: int
    closed: dict[str, list[Measured]]  # by system, round by round
    at_mark: Measured | None = None  # the open loop at `MARK_RATE`
    added: Added | None = None
    # CPU milliseconds a second by process, of a stack that nobody asks anything.
    idle_ms: dict[str, float] = {}
    left_out: dict[str, str] = {}  # why a system was not measured

    @property
    def clean(self) -> bool:
        """Whether every response was right, and every system was measured."""
        runs = [run for runs in self.closed.values() for run in runs]
        return not self.left_out and all(run.figures.clean for run in runs)

    def parts(self) -> list[Sheet | str]:
        rows = [_row(f"{name}, {self.connections} at once", median_run(runs)) for name, runs in self.closed.items()]
        head = (
            *("load", "requests/s", "events/s", "whole p50/p99 ms", "first p50/p99 ms", "faults"),
            *("CPU ms/request", "of which"),
        )
        table = Sheet(head, rows, f"{self.tokens} tokens a request", left=("of which",))
        return [table, *_remarks(self)]


def holds(measured: Measured, limit_ms: float) -> bool:
    """Whether nothing was dropped or wrong and the 99th percentile is below the limit."""
    whole = measured.figures.whole_ms
    return measured.figures.clean and whole is not None and whole.p99 < limit_ms


def mark_line(at_mark: Measured, closed: float, limit_ms: float) -> str:
    """Whether the open loop at `MARK_RATE` keeps the limit; `closed`: requests/s that the closed loop reaches here."""
    whole = at_mark.figures.whole_ms
    found = "no response was right" if whole is None else f"p50 {whole.p50:.1f}, p99 {whole.p99:.1f} ms"
    faults = _faults(at_mark.figures)
    if holds(at_mark, limit_ms):
        verdict = "kept"
    elif closed >= MARK_CLOSED:
        verdict = "missed"
    else:
        verdict = f"does not apply: the closed loop reaches {closed:,.0f} requests/s of {MARK_CLOSED:,.0f}"
    return (
        f"Mark, open loop at {MARK_RATE:,.0f} requests/s, p99 below {limit_ms:g} ms: "
        f"{found}, faults {faults}: {verdict}."
    )


def _faults(figures: Figures) -> str:
    return ", ".join(f"{count} {fault}" for fault, count in figures.faults.items()) or "none"


def median_run(runs: Sequence[Measured]) -> Measured:
    """The run whose rate is the median."""
    middle = statistics.median_low(run.figures.requests_per_second for run in runs)
    return next(run for run in runs if run.figures.requests_per_second == middle)


def _text_of(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.1f} / {spread.p99:.1f}"


def _row(name: str, run: Measured) -> list[str]:
    figures = run.figures
    return [
        name,
        f"{figures.requests_per_second:,.0f}",
        f"{figures.events_per_second:,.0f}",
        _text_of(figures.whole_ms),
        _text_of(figures.first_ms),
        _faults(figures),
        f"{run.cpu_total:.2f}",
        ", ".join(f"{part} {cpu:.2f}" for part, cpu in run.cpu_ms.items()),
    ]


def _remarks(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.at_mark is not None:
        closed = median_run(outcome.closed[outcome.at_mark.system]).figures.requests_per_second
        lines.append(mark_line(outcome.at_mark, closed, outcome.limit_ms))
    if (ours := outcome.closed.get("ryzanstein")) and (theirs := outcome.closed.get("dynamo")):
        ratio = statistics.median(
            a.figures.requests_per_second / b.figures.requests_per_second for a, b in zip(ours, theirs, strict=True)
        )
        lines.append(f"Requests/s against Dynamo in the same run: {ratio:.2f}")
    if (added := outcome.added) is not None:
        cpu = ", ".join(f"{part} {each:.0f}" for part, each in added.cpu_us_per_token.items())
        lines.append(
            f"Added at {added.step_ms:g} ms a step with {added.streams:.0f} streams, p50/p99: first token "
            f"{_text_of(added.first_token_ms)} ms, each next token {_text_of(added.token_ms)} ms; "
            f"CPU us per token: {sum(added.cpu_us_per_token.values()):.0f} ({cpu})."
        )
    if idle := outcome.idle_ms:
        by_process = ", ".join(f"{name} {ms:.1f}" for name, ms in idle.items())
        lines.append(f"Idle, CPU ms a second: {sum(idle.values()):.1f} ({by_process}).")
    lines += [f"{name} was left out: {reason}" for name, reason in outcome.left_out.items()]
    return lines
