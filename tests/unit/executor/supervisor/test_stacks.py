"""Stacks and threads of real processes: busy, stuck in native code, stopped, without a handler."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.executor.ipc.rank_pipe import STACK_SIGNAL
from services.executor.supervisor.diagnostics import processes
from services.executor.supervisor.diagnostics.processes import StackRequest, parse
from services.executor.worker.diagnostics import python_stacks
from shared.messages.debugging import StackDump, ThreadDump

STUCK = """
import ctypes, pathlib, sys, threading
from services.executor.worker.diagnostics import install_stacks
file = install_stacks(pathlib.Path(sys.argv[1]))
sleep = ctypes.PyDLL(None).sleep  # which keeps the interpreter's lock
def held_up():
    print("ready", flush=True)
    sleep(600)
threading.Thread(target=held_up).start()
threading.Event().wait()
"""


@contextlib.contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_process_that_is_stuck_in_native_code_with_the_lock_shows_its_stacks(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with process(STUCK, str(path)) as child:
        for _ in range(2):  # it can be asked again
            request = StackRequest(child.pid, path)
            assert request.missing == ""
            until(lambda: path.read_text().endswith("in <module>\n"))
            found = request.read()
            assert any("<string>" in stack.frames[0] and "held_up" in stack.frames[0] for stack in found), found
            assert len(found) == 2
        assert child.poll() is None, "it goes on"


def test_a_process_tells_the_stacks_of_its_own_threads() -> None:
    end = threading.Event()

    def held_up() -> None:
        end.wait()

    threads = [threading.Thread(target=held_up, name=name) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    try:
        found: list[StackDump] = []
        asked = threading.Thread(target=lambda: found.extend(python_stacks()), name="asked")
        asked.start()
        asked.join()
    finally:
        end.set()
    names = [stack.thread for stack in found]
    assert {"one", "two"} <= set(names), names
    assert "asked" not in names, "the one that tells"
    assert names[-1] == "MainThread"
    [one] = [stack for stack in found if stack.thread == "one"]
    assert "wait" in one.frames[0], "the innermost first"
    assert any(frame.endswith(" held_up") and "test_stacks.py:" in frame for frame in one.frames)


def test_a_process_without_a_handler_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.touch()
    with process("print('ready', flush=True); import time; time.sleep(600)") as child:
        request = StackRequest(child.pid, path)
        assert "just starting" in request.missing
        assert request.read() == []
        assert child.poll() is None
    assert "has ended" in StackRequest(child.pid, path).missing


def test_files_are_named_below_the_nearest_directory() -> None:
    text = (
        "Thread 0x00007f1 (most recent call first):\n"
        '  File "/a/b/c.py", line 3 in run\n'
        '  File "/elsewhere/d.py", line ??? in <module>\n'
        "\n"
        "Current thread 0x00007f2 [main] (most recent call first):\n"
        "  <no Python frame>\n"
        "not one of its lines\n"
    )
    first, second = parse(text, ["", "/a", "/a/b"])
    assert (first.thread, first.frames) == ("0x00007f1", ["c.py:3 run", "/elsewhere/d.py:??? <module>"])
    assert (second.thread, second.frames) == ("main", [])


def test_a_process_is_seen_as_it_is() -> None:
    catching = "import signal; signal.signal(signal.SIGTERM, lambda *_: None);"
    with process(f"{catching} print('ready', flush=True); import time; time.sleep(600)") as child:
        sleeping = processes.sample(child.pid)
        assert sleeping.memory_bytes > 1 << 20
        assert [thread.tid for thread in sleeping.threads] == [child.pid]
        assert not processes.catches(child.pid, STACK_SIGNAL)
        assert processes.catches(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: processes.sample(child.pid).state == "stopped")
        child.kill()
        until(lambda: processes.sample(child.pid).state == processes.ENDED)
    assert processes.sample(child.pid).threads == []


def test_threads_that_compute_are_told_from_those_that_wait() -> None:
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    try:
        before = processes.sample(os.getpid())
        began = time.thread_time()
        until(lambda: sum(range(100_000)) > 0 and time.thread_time() - began >= 0.2)
        after = processes.sample(os.getpid())
        busy = {thread.tid: thread.busy for thread in processes.with_usage(before, after, 0.1)}
        assert busy[threading.get_native_id()] >= 1
        assert waiting.native_id is not None
        assert busy[waiting.native_id] == 0
    finally:
        end.set()
        waiting.join()


@pytest.mark.parametrize("text", ["running", "", "-1 0x7f 0x1", "99999 0x1"])
def test_calls_without_a_name_are_no_failure(text: str) -> None:
    assert processes._syscall(text) in ("", "-1", "99999")


def test_a_thread_that_has_just_come_has_used_nothing() -> None:
    one = processes.ProcessSample(1, "running", 0, [ThreadDump(7, "a", "R", 5.0)])
    none = processes.ProcessSample(1, "running", 0, [])
    assert [thread.busy for thread in processes.with_usage(none, one, 0.1)] == [0.0]


def test_what_is_gone_while_it_is_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes._listing(tmp_path / "nowhere") == []
    assert processes._status(tmp_path, "VmRSS") == "0"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (ended) Z")
    assert processes._thread(tmp_path / "7") is None
    file = tmp_path / "stacks"
    file.touch()
    monkeypatch.setattr(processes, "catches", lambda pid, number: True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    request = StackRequest(gone.pid, file)
    assert request.missing == "the process cannot be asked (No such process)"
    assert request.read() == []


def test_a_thread_that_waits_for_a_device_tells_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = ThreadDump(1, "io", "D", 0.0)
    monkeypatch.setattr(processes, "_state", lambda proc: "S")
    monkeypatch.setattr(processes, "_listing", lambda directory: ["1"])
    monkeypatch.setattr(processes, "_thread", lambda task: thread)
    assert processes.sample(os.getpid()).state == processes._STATES["D"]
