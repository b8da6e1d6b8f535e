"""`ryzanstein doctor`: each check by what a machine may have, and the command as a process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from services.cli import machine
from services.cli.commands.doctor import hardware, software
from services.cli.commands.doctor.check import Check, DoctorReport, report_of, show


def doctor(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_all_of_it_as_one_json_object(tmp_path: Path) -> None:
    done = doctor("--json", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = [check["name"] for check in report["checks"]]
    assert names[:4] == ["processor", "kernels", "memory", "memory bandwidth"]
    assert {"NATS", "GPU", "clock", "proxy", "disk for models", "port 8000"} <= set(names)
    assert report["python"] in sys.version
    assert all(check["state"] in ("ok", "note", "warning") for check in report["checks"])


def test_what_would_fail_is_said_and_exits_with_1(tmp_path: Path) -> None:
    done = doctor("--data-dir", str(tmp_path), RYZANSTEIN_CPU_LEVEL="mmx")
    assert done.returncode == 1
    assert "error: kernels: RYZANSTEIN_CPU_LEVEL is 'mmx', which is not a level that this CPU has" in done.stdout


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({}, "ok", "none"),
        ({"HTTPS_PROXY": "http://p:1"}, "warning", "https_proxy"),
        ({"https_proxy": "http://p:1", "NO_PROXY": "127.0.0.1"}, "warning", "https_proxy"),
        ({"https_proxy": "http://p:1", "no_proxy": "localhost, 127.0.0.1"}, "ok", "https_proxy, not for this machine"),
        ({"all_proxy": "socks5://p:1", "no_proxy": "*"}, "ok", "all_proxy, not for this machine"),
        ({"http_proxy": ""}, "ok", "none"),
    ],
)
def test_proxies(environment: dict[str, str], state: str, found: str) -> None:
    check = software.proxies(environment)
    assert (check.state, check.found) == (state, found)
    assert bool(check.advice) == (state == "warning")


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert software.port(number, "API").state == "warning"
    assert software.port(number, "API").found == "free, for the API"


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.disk("disk", tmp_path / "to" / "come").state == "ok"
    monkeypatch.setattr(software, "_DISK_BYTES", 1 << 60)
    assert "models clean" in software.disk("disk", tmp_path).advice
    monkeypatch.setattr(software.os, "access", lambda place, mode: False)
    assert software.disk("disk", tmp_path).state == "error"


def test_programs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert (software.nats().state, software.compiler().state) == ("error", "note")
    assert hardware.gpus().found == "none: the processor computes"
    assert hardware.kernels().state == "warning"
    for name, script in (("nats-server", "exit 1"), ("nvidia-smi", "exit 9")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert "does not start" in software.nats().found
    assert hardware.gpus().state == "warning"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.1'\n")
    assert hardware.gpus().found == "NVIDIA H100, 81559 MiB, 580.1"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.packages().state == "ok"
    monkeypatch.setattr(software, "find_spec", lambda name: None if name == "torch" else object())
    check = software.packages()
    assert (check.found, check.state) == ("not installed: torch", "warning")


def test_little_memory_and_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_left", lambda: 1_000_000_000)
    assert "1,000 MB free" in hardware.memory().found
    assert hardware.memory().state == "warning"
    assert hardware.shared_memory(str(tmp_path / "none")).state == "warning"
    monkeypatch.setattr(hardware, "_SHARED_BYTES", 1 << 60)
    assert "--shm-size" in hardware.shared_memory(str(tmp_path)).advice


def test_memory_is_read_for_as_long_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BUFFER", 1 << 20)
    ticks = iter(range(1000))
    # One thread asks the time at the begin, before each of two rounds, when it is over, and at the end.
    assert machine.read_rate(1, 3.0, lambda: float(next(ticks))) == 2 * (1 << 20) / 4


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.resource, "getrlimit", lambda kind: (1024, 1024))
    assert software.open_files().state == "warning"
    monkeypatch.setattr(software.resource, "getrlimit", lambda kind: (1024, 1 << 20))
    assert software.open_files().state == "ok"


def test_what_is_most_urgent_stands_first(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("a", "note", "x", "Do A."), Check("b", "ok", "y"), Check("c", "error", "z", "Do C.")]
    report = report_of(checks)
    assert report.failed
    assert not DoctorReport("1", "3", "linux", checks[:2]).failed
    show(report, Console(width=200))
    shown = capsys.readouterr().out
    assert shown.index("error: c: Do C.") < shown.index("note: a: Do A.")
    show(report_of(checks[1:2]), Console(width=200))
    assert "Nothing is to be done." in capsys.readouterr().out
