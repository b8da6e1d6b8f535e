"""Runs in processes of their own, all alike: one process imports the services, and is forked for each run.

    search ──a line of JSON: what to run──▶ worker ──fork──▶ a run ──a line of JSON: its outcome──▶ search

So nothing of a run is left for the next one, a run that never ends can be ended, and each begins with the same memory.
"""

import contextlib
import gc
import os
import selectors
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Self

import msgspec

from tests.simulation.core import machine, reproducible
from tests.simulation.faults.schedule import Schedule, Unusable
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.systems.outcome import Broken, Outcome

ROOT = Path(__file__).parents[3]
READY = b"ready\n"
START_TIMEOUT = 120.0  # real seconds in which a worker must have imported the services


class Order(msgspec.Struct, frozen=True):
    scenario: Scenario
    schedule: Schedule
    story: str = ""  # the file that the run is told in; empty: none


class RunFailed(Exception):
    """The run, or its worker, ended without an outcome."""


class Worker:
    """For one thread. Use it as a context."""

    def __init__(self, timeout: float = 600.0) -> None:
        self._timeout = timeout  # real seconds that a run may take
        self._process: subprocess.Popen[bytes] | None = None
        self._system = ""  # what it has imported

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def run(self, order: Order) -> Outcome:
        """Raises `RunFailed` where the worker broke, `Unusable` where the order is. A run that takes too long is an
        outcome too: it breaks the promise `liveness`."""
        process = self._started(order.scenario.system)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        try:
            line = self._line(process.stdout, self._timeout)
        except TimeoutError:
            self._end()
            told = f"The run had not ended after {self._timeout:.0f} s of the machine."
            return Outcome(order.schedule, "", 0.0, self._timeout, [Broken("liveness", told)])
        return _outcome(line)

    def _started(self, system: str) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None or self._system != system:
            self._end()
            self._system = system
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.simulation", "worker", system],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, **reproducible.ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
            assert self._process.stdout is not None  # a pipe
            if self._line(self._process.stdout, START_TIMEOUT) != READY:
                raise RunFailed("The simulation's worker did not start; its reason is above.")
        return self._process

    def _line(self, stream: IO[bytes], timeout: float) -> bytes:
        """Raises TimeoutError."""
        until, line = time.monotonic() + timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                part = os.read(stream.fileno(), 1 << 20)
                if not part:
                    break
                line += part
        return line

    def kill(self) -> None:
        """From another thread: the run that is under way fails."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _outcome(line: bytes) -> Outcome:
    if not line:
        raise RunFailed("The simulation's worker has died; its last words are above.")
    answer = msgspec.json.decode(line, type=_Answer)
    if answer.unusable:
        raise Unusable(answer.unusable)
    if answer.outcome is None:
        raise RunFailed(answer.failed)
    return answer.outcome


class _Answer(msgspec.Struct, omit_defaults=True):
    outcome: Outcome | None = None
    unusable: str = ""
    failed: str = ""


# --- the worker ----------------------------------------------------------------------------------------


def work(system: str) -> None:
    """Until standard input ends, with what runs of `system` need."""
    reproducible.ensure()
    machine.install()
    from tests.simulation.search import simulation

    simulation.build_of(system)
    gc.collect()
    gc.freeze()
    os.write(1, READY)
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _run_one(line)
        _, status = os.waitpid(child, 0)
        if status:
            failed = f"The run ended with status {os.waitstatus_to_exitcode(status)}; its last words are above."
            _say(_Answer(failed=failed))


def _run_one(line: bytes) -> None:
    """In a process of its own. Does not return."""
    from tests.simulation.search import simulation, story

    status = 0
    try:
        order = msgspec.json.decode(line, type=Order)
        run = simulation.Run(order.scenario, order.schedule, story=bool(order.story))
        outcome = run.run()
        if order.story:
            Path(order.story).write_text(story.tell(run.world, outcome))
        _say(_Answer(outcome))
    except Unusable as error:
        _say(_Answer(unusable=str(error)))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _say(answer: _Answer) -> None:
    data = msgspec.json.encode(answer) + b"\n"
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        while data:
            data = data[os.write(1, data) :]
