"""Which ranks of a ring are signalled for their stacks while a dump is taken: real processes, a pretended ring."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.ipc.rank_pipe import stack_file
from services.executor.supervisor.diagnostics.dump import GroupDump, take_dump
from services.executor.supervisor.diagnostics.verdict import ProgressAge
from services.executor.supervisor.ring import Ring
from shared.messages.debugging import RankDump

# Shows its stacks when it is signalled; what it is asked, nobody reads.
DEAF = """
import pathlib, sys, threading
from services.executor.worker.diagnostics import install_stacks
file = install_stacks(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def pid(tmp_path: Path) -> Iterator[int]:
    command = [sys.executable, "-c", DEAF, str(stack_file(tmp_path, 0))]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    yield child.pid
    child.kill()
    child.communicate()


class BusyBoard(RingBoard):
    """Whose rank has begun another step whenever it is looked at."""

    looks = 0

    def begun(self, rank: int) -> int:
        self.looks += 1
        return self.looks


async def dumped(directory: Path, pid: int, kind: type[RingBoard], wait: float) -> RankDump:
    """A ring of that one process, which does not answer."""
    board = kind(directory / "board", 1, create=True)
    flight = FlightRecorder.beside(directory / "board", 1, create=True)
    ring = SimpleNamespace(
        board=board, flight=flight, directory=directory, pids=[pid], epoch=1, state="ready", loaded=1.0,
        ready=asyncio.Event(), ask=lambda number, question: None,
    )  # fmt: skip
    dump = await take_dump(cast(Ring, ring), GroupDump("g", "m", "i"), ExecutorSettings(), ProgressAge(), wait)
    return dump.ranks[0]


async def test_a_rank_that_neither_answers_nor_goes_on_is_signalled(tmp_path: Path, pid: int) -> None:
    found = await dumped(tmp_path, pid, RingBoard, 5.0)
    assert found.stacks_missing == ""
    assert any("<string>" in frame for stack in found.stacks for frame in stack.frames)


async def test_a_rank_that_goes_on_is_not_signalled(tmp_path: Path, pid: int) -> None:
    """Its frames change while the signal's handler reads them, which has ended a rank that was only slow."""
    found = await dumped(tmp_path, pid, BusyBoard, 1.0)
    assert (found.stacks, found.answered) == ([], False)
    assert found.stacks_missing == "it goes on, but did not answer in time; take the dump again"
    assert stack_file(tmp_path, 0).stat().st_size == 0
