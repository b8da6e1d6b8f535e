"""Real processes: servers leave nothing behind, and a comparison goes on without those that fail."""

import io
import os
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.errors import BenchError
from benchmarks.peers import catalog
from benchmarks.peers.catalog import Environment, InstallError, Launch, Peer, Place
from benchmarks.peers.rounds import Contest, Run
from benchmarks.peers.servers import Server, free_port, wait_ready
from benchmarks.serve.sse import Client
from benchmarks.serve.workloads import Vocabulary, Workload

ROOT = str(Path(__file__).parents[4])
FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
FAKE = """
import asyncio, sys
from tests.unit.benchmarks.fake_server import serving
async def main():
    async with serving(port=int(sys.argv[1])):
        await asyncio.Event().wait()
asyncio.run(main())
"""


def python(script: str, *arguments: str) -> Launch:
    return Launch((sys.executable, "-c", script, *arguments), {"PYTHONPATH": ROOT})


def family(server: Server, log: Path) -> psutil.Process:
    """The child of a running FAMILY."""
    while not log.read_text().endswith("\n"):
        assert server.ended() is None
        os.sched_yield()
    return psutil.Process(int(log.read_text()))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["obedient", "deaf"])
def test_nothing_is_left_of_a_server(tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.servers._GRACE_SECONDS", 0.2)
    log = tmp_path / "log"
    with Server(python(FAMILY, manner), log, tmp_path) as server:
        child = family(server, log)
        everyone = server.processes()
        memory = server.memory()
    assert child in everyone
    assert len(everyone) == 2
    assert memory.peak_rss > memory.pss > 0
    assert all(gone(each) for each in everyone)


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_either(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children: list[psutil.Process] = []

    def interrupted() -> None:
        with Server(python(FAMILY), log, tmp_path) as server:
            children.append(family(server, log))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(children) == 1
    assert all(gone(each) for each in children)


async def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    script = "print('Starting'); print('ValueError: no such model'); print('Bye'); raise SystemExit(3)"
    client = Client(f"http://127.0.0.1:{free_port()}")
    with (
        Server(python(script), tmp_path / "log", tmp_path) as server,
        pytest.raises(BenchError, match=r"ended with code 3 and said 'ValueError: no such model'"),
    ):
        await wait_ready(server, client, model=None, extra={}, timeout=60)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    server = Server(Launch(("/nowhere/server",), {}), tmp_path / "log", tmp_path)
    with pytest.raises(BenchError, match="/nowhere/server cannot be started"), server:
        pass


def peer(name: str, script: str) -> Peer:
    def launch(place: Place) -> Launch:
        return python(script, str(place.port))

    return Peer(name=name, title=name, dtype="none", environment=None, packages=("psutil",), launch=launch)


def test_a_comparison_goes_on_without_a_peer_that_fails(tmp_path: Path) -> None:
    said: list[str] = []
    words = tuple("abcdefghijklmnopqrstuvwxyz")
    workload = Workload("W1", clients=2, requests=3, prompt_tokens=20, output_tokens=5)
    contest = Contest(
        model=tmp_path,
        peers=[peer("broken", "raise SystemExit('error: out of order')"), peer("good", FAKE)],
        workloads=[workload],
        rounds=2,
        threads=1,
        seed=5,
        work=tmp_path,
        vocabulary=Vocabulary(words, words, 10, 7),
        ready_timeout=60.0,
        request_timeout=60.0,
    )
    progress = Progress(console=Console(file=io.StringIO()), disable=True)
    run = Run(contest, progress, said.append)
    run.prepare()
    run.run()
    broken, good = run.results["broken"], run.results["good"]
    assert broken.rounds == {}
    assert broken.left_out is not None
    assert "'error: out of order'" in broken.left_out
    assert good.left_out is None
    assert [len(good.rounds["W1"]), len(good.ready_seconds), len(good.memory)] == [2, 2, 2]
    assert all(each.output_tokens == 15 and each.errors == 0 for each in good.rounds["W1"])
    assert good.summaries()["W1"].rounds == 2
    assert list(good.versions) == ["python", "psutil"]
    assert sum("broken: W1" in line for line in said) == 1


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.catalog.venv.create", _only_python)
    lines: list[str] = []
    environment = Environment("one", (("-c", "print('installed')"),))
    folder = catalog.ensure(environment, tmp_path, lines.append)
    assert lines == ["making the virtual environment", "installed"]
    assert catalog.ensure(environment, tmp_path, lines.append) == folder
    assert len(lines) == 2
    assert catalog.versions(str(folder / "bin" / "python"))["python"]
    other = Environment("one", (("-c", "print('anew')"),))
    catalog.ensure(other, tmp_path, lines.append)
    assert lines[-1] == "anew"


def test_half_an_environment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.catalog.venv.create", _only_python)
    environment = Environment("half", (("-c", "raise SystemExit('no such package')"),))
    for _ in range(2):
        with pytest.raises(InstallError, match="ended with code 1: no such package"):
            catalog.ensure(environment, tmp_path, lambda line: None)


def _only_python(folder: Path, *, with_pip: bool, symlinks: bool) -> None:
    """A virtual environment without pip, which takes seconds."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
