"""Runs sections, each in a process of its own, one after the other but for those that measure no time, in a budget.

    run ──▶ allot ──▶ process: section ──appends──▶ rows.jsonl ──▶ report ──▶ JSON, after every section
                         └─ standard error ──▶ errors.txt, its last lines where it fails; all of it in the log

A section that fails, hangs or takes the whole process with it costs its own time and nothing else; what it had
measured by then is kept. A GPU's memory is free again once the process (`main`) is gone.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.on_gpu.bench import Bench, Report, SectionResult, read_rows, write_report
from benchmarks.on_gpu.sections import Section, allot, section_of, soft_limit, together

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the page cache itself, on purpose
ERROR_LINES = 25
LAST_WAIT = 5.0  # seconds for a killed process to be gone; one that hangs in the driver is left behind

LOGGED = 400_000  # bytes of a section's standard error that the log keeps, the last ones

# What to run for a section that appends its rows to a file, and is ended after so many seconds.
Command = Callable[[Section, Path, float], list[str]]


@dataclass
class Runner:
    """Runs sections into a report."""

    report: Report
    path: Path  # of the JSON
    command: Command
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _running: "set[subprocess.Popen[bytes]]" = field(default_factory=set)

    @property
    def log(self) -> Path:
        """What sections have written to standard error, beside the JSON."""
        return self.path.with_suffix(".errors.log")

    def run(self, sections: Sequence[Section]) -> None:
        """All of them, as far as the report's budget goes; the report is complete after each."""
        began = self.clock()
        self.report.sections = [SectionResult(section.name) for section in sections]
        results = iter(self.report.sections)
        write_report(self.report, self.path)
        self.log.write_bytes(b"")
        groups = together(sections)
        for at, group in enumerate(groups):
            left = self.report.budget_s - (self.clock() - began)
            later = [section for other in groups[at + 1 :] for section in other]
            self._beside([(section, next(results), allot(section, later, left), left) for section in group])

    def _beside(self, jobs: Sequence[tuple[Section, SectionResult, float | None, float]]) -> None:
        """At the same time; an interrupt ends all of them."""
        with ThreadPoolExecutor(len(jobs)) as threads:
            try:
                for job in [threads.submit(self._written, *job) for job in jobs]:
                    job.result()
            finally:
                for process in list(self._running):
                    _end(process)

    def _written(self, section: Section, result: SectionResult, limit: float | None, left: float) -> None:
        try:
            self._one(section, result, limit, left)
        finally:
            with self._writing:
                write_report(self.report, self.path)

    def _one(self, section: Section, result: SectionResult, limit: float | None, left: float) -> None:
        if limit is None:
            result.status = "skipped"
            result.error = [f"{max(left, 0):.0f} s were left, and it needs {section.least:.0f}"]
            self.say(f"{section.name}: skipped, {result.error[0]}")
            return
        self.say(f"{section.name}: {section.title} (at most {limit:.0f} s)")
        result.limit_s = round(limit, 1)
        began = self.clock()
        with _scratch() as scratch:
            rows, errors = Path(scratch, "rows.jsonl"), Path(scratch, "errors.txt")
            try:
                code = self._process(self.command(section, rows, limit), errors, limit)
            finally:  # of an interrupt too: what was measured by then counts
                result.rows = read_rows(rows)
                result.seconds = round(self.clock() - began, 1)
                self._keep(section, errors)
            result.status = {0: "done", None: "timed out"}.get(code, "failed")  # type: ignore[assignment]
            if code != 0:
                result.error = last_lines(errors, ERROR_LINES) or [_no_words(code)]
        self.say(f"{section.name}: {result.status}, {len(result.rows)} rows, {result.seconds:.0f} s")
        for line in result.error:
            self.say(f"    {line}")

    def _process(self, command: list[str], errors: Path, limit: float) -> int | None:
        """Its exit code; None where it had to be ended. Its process group goes with it."""
        with errors.open("wb") as file:
            process = subprocess.Popen(
                command,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(errors.parent)},
            )
            self._running.add(process)
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)
                self._running.discard(process)

    def _keep(self, section: Section, errors: Path) -> None:
        """Puts what the section has written to standard error into the log."""
        with contextlib.suppress(OSError):
            text = errors.read_bytes()[-LOGGED:]
            with self._writing, self.log.open("ab") as log:
                log.write(f"== {section.name}\n".encode() + text)


def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """For all files of a section, so that nothing stays of one that was killed: a checkpoint of 13B is 26 GB. In memory
    where that is a file system of its own."""
    shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
    return tempfile.TemporaryDirectory(prefix="ryzanstein-gpu-", dir=shared, ignore_cleanup_errors=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WAIT)


def last_lines(path: Path, count: int) -> list[str]:
    """Of a text file, without empty ones; each cut to what a terminal shows."""
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.rstrip()[:300] for line in lines if line.strip()][-count:]
    return []


def _no_words(code: int | None) -> str:
    if code is None:
        return "ended at its limit, without a word"
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name}), without a word"
    return f"ended with {code}, without a word"


BEFORE_END = 2.0  # seconds before its limit at which a section that still runs says where it stands


def command_of(section: Section, rows: Path, limit: float, report: Report) -> list[str]:
    """What starts it."""
    known = {
        row.key: row.figure
        for result in report.sections
        for row in result.rows
        if row.figure is not None and row.key.startswith("machine/")
    }
    command = [sys.executable, "-m", "benchmarks.on_gpu.running", section.name, "--rows", str(rows)]
    command += ["--limit", f"{limit:.1f}", "--known", json.dumps(known)]
    return [*command, "--tiny"] if report.dry_run else command


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("section", type=section_of)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--known", type=json.loads, default={})
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    # Where it hangs is what has to be known of a section that is ended at its limit.
    faulthandler.dump_traceback_later(max(options.limit - BEFORE_END, 0.5 * options.limit), exit=False)
    _prepare(options.tiny)
    import torch

    torch.set_grad_enabled(False)
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    if options.tiny:
        torch.set_num_threads(1)
    deadline = began + soft_limit(options.limit)
    bench = Bench(device, options.tiny, options.rows, deadline, options.known)
    module, _, function = options.section.code.partition(":")
    rows = getattr(importlib.import_module(module), function)(bench)
    bench.tell(rows or (), options.section.name)
    # What threads or libraries still hold must not keep a section that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _prepare(tiny: bool) -> None:
    """What libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["TRITON_INTERPRET"] = "1" if tiny else "0"


if __name__ == "__main__":
    main()
