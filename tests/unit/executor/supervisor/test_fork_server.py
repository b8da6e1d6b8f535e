"""Ranks that are forked: they are the executor's children, and a fork server that is of no use is done without."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.ranks import early_fork_server, fork_server, rank_process
from services.executor.supervisor.ranks.fork_server import ForkRefused, ForkServer
from services.executor.supervisor.ranks.rank_process import ForkClient, LocalRank
from shared.config import load_settings

DOUBLE = "tests.unit.executor.supervisor.echo_forks"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forked ranks are for Linux")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], ForkClient]]:
    """A client whose servers have a fault."""
    monkeypatch.setattr(early_fork_server, "MODULE", DOUBLE)
    made: list[ForkClient] = []

    def make(fault: str = "") -> ForkClient:
        monkeypatch.setenv("ECHO_FORKS", fault)
        made.append(ForkClient({"OMP_NUM_THREADS": "3", "PATH": "not ours to set"}))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
async def ranks() -> AsyncIterator[list[LocalRank]]:
    """To be ended."""
    started: list[LocalRank] = []
    yield started
    for rank in started:
        rank.kill()
        await rank.wait()
        rank.close()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that are started as a new Python, of which there is none: their events' descriptors."""
    found: list[int] = []

    async def execute(commands: int, events: int, environment: dict[str, str]) -> asyncio.subprocess.Process:
        found.append(events)
        return await asyncio.create_subprocess_exec("cat", stdin=commands)

    monkeypatch.setattr(rank_process, "_executed", execute)
    return found


async def start(forks: ForkClient, ranks: list[LocalRank]) -> LocalRank:
    ranks.append(await LocalRank.start(1, load_settings(ExecutorSettings, model="m"), forks))
    return ranks[-1]


async def ask(rank: LocalRank, line: bytes) -> list[int]:
    rank.tell(line)
    async with asyncio.timeout(20):
        return [*map(int, (await rank.events.readline()).split())]


async def test_a_forked_rank_is_our_child(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int]
) -> None:
    forks = make()
    one, two = await start(forks, ranks), await start(forks, ranks)
    assert not executed
    assert await ask(one, b"who\n") == [os.getpid(), one.pid, one.pid]
    assert await ask(two, b"who\n") == [os.getpid(), two.pid, two.pid]
    one.tell(b"end 7\n")
    assert await one.wait() == 7
    two.kill()
    assert await two.wait() == -signal.SIGKILL
    assert (one.returncode, two.returncode) == (7, -9)
    two.kill()  # of one that has ended: nothing
    assert not psutil.pid_exists(one.pid)


@pytest.mark.slow
async def test_ranks_outlive_the_fork_server_and_the_next_ones_do_without_it(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int]
) -> None:
    forks = make()
    first = await start(forks, ranks)
    server = forks.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, server, os.WEXITED | os.WNOWAIT)
    assert await ask(first, b"who\n") == [os.getpid(), first.pid, first.pid]
    await start(forks, ranks)
    assert len(executed) == 1
    forks.start()
    assert forks.pid not in (None, server)
    third = await start(forks, ranks)
    assert len(executed) == 1
    assert await ask(third, b"who\n") == [os.getpid(), third.pid, third.pid]


@pytest.mark.parametrize(
    ("fault", "event", "reason"),
    [
        ("threads", "fork_server_not_used", "2 threads"),
        ("version", "fork_server_not_used", "0.0.0-another"),
        ("mute", "fork_server_lost", "it has ended"),
    ],
)
async def test_a_server_of_no_use_is_told_of_and_done_without(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int], fault: str, event: str, reason: str
) -> None:
    with capture_logs() as log:
        forks = make(fault)
        await start(forks, ranks)
        await start(forks, ranks)
    assert len(executed) == 2
    [line] = [line for line in log if line["event"] in ("fork_server_not_used", "fork_server_lost")] or [{}]
    if line:  # one that ended before it was asked is not there to be told of
        assert (line["event"], reason in line["reason"]) == (event, True)
    assert line or fault == "mute"
    assert forks.pid is None or fault == "mute"
    forks.start()
    assert (forks.pid is None) == (fault != "mute"), "another of the kind would be of no use either"


async def test_what_a_rank_has_started_ends_with_it(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int]
) -> None:
    rank = await start(make(), ranks)
    [child] = await ask(rank, b"child\n")
    process = psutil.Process(child)
    rank.kill()
    await rank.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [process], timeout=20)
    assert gone


EXECUTOR = """
import asyncio, os, signal, sys
from services.executor.supervisor.ranks import early_fork_server
from services.executor.supervisor.ranks.rank_process import ForkClient
from services.executor.supervisor.ranks.rank_process import LocalRank
from services.executor.core.settings import ExecutorSettings
from shared.config import load_settings

async def main():
    early_fork_server.MODULE = "tests.unit.executor.supervisor.echo_forks"
    forks = ForkClient({})
    forks.start()
    rank = await LocalRank.start(1, load_settings(ExecutorSettings, model="m"), forks)
    rank.tell(b"who\\n")
    await rank.events.readline()
    print(forks.pid, rank.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
def test_all_end_with_the_executor(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", EXECUTOR], capture_output=True, text=True, check=False)
    assert said.returncode == -signal.SIGKILL, said.stderr
    pids = map(int, said.stdout.splitlines()[-1].split())
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def test_a_rank_has_the_variables_that_its_executor_lacks(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rank = await start(make(), ranks)
    rank.tell(b"variables\n")
    async with asyncio.timeout(20):
        told = (await rank.events.readline()).decode().split()
    assert told == ["3", os.environ["PATH"], "10000"]


@pytest.mark.parametrize(
    ("arguments", "variable", "starts"),
    [
        (["--tp", "2"], "", True),
        (["--engine", "stub"], "", False),
        (["--engine", "vllm"], "", False),
        (["--fork-server", "off"], "", False),
        ([], "off", False),
        (["--help"], "", False),
    ],
)
def test_one_is_started_early_where_one_is_wanted(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, starts: bool
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(early_fork_server, "start", lambda: made.append(object()) or made[-1])
    monkeypatch.setenv("RYZANSTEIN_FORK_SERVER", variable)
    early_fork_server.start_early(arguments)
    assert early_fork_server.taken() == (made[0] if starts else None)
    assert early_fork_server.taken() is None


@pytest.mark.slow
async def test_imports_are_asked_for_once_and_again_of_a_new_server(
    make: Callable[..., ForkClient], ranks: list[LocalRank], executed: list[int]
) -> None:
    forks = make()
    forks.need(["services.executor.gone", "services.executor.leader.step_loop"])
    forks.need(["services.executor.leader.step_loop"])
    await start(forks, ranks)  # one that is not there is no fault
    forks.close()
    forks.start()
    await start(forks, ranks)
    assert not executed


@pytest.mark.slow
def test_the_real_imports_leave_one_thread_and_little_memory() -> None:
    """What is forked must be, and what it costs to keep it."""
    code = (
        "import importlib, psutil; from services.executor.supervisor.ranks import fork_server; "
        "[importlib.import_module(name) for name in fork_server.MODULES]; "
        "print(fork_server.why_not_to_fork() or 'none'); print(psutil.Process().memory_full_info().uss >> 20)"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    reason, megabytes = said.stdout.splitlines()
    assert reason == "none"
    assert int(megabytes) < 350


def test_a_system_without_room_is_told_and_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len([*Path("/proc/self/fd").iterdir()])
        monkeypatch.setattr(fork_server, "why_not_to_fork", str)
        monkeypatch.setattr(os, "fork", fork)
        refused = ForkServer(theirs)._fork({}, 0, 1)
        assert isinstance(refused, ForkRefused)
        assert "no room for another process (Resource temporarily unavailable)" in refused.reason
        assert len([*Path("/proc/self/fd").iterdir()]) == before
