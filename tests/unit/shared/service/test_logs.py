"""Every line of a process in one form, at a level that can be changed."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.commands.log_level import meant_by
from shared.errors import ConfigurationError
from shared.messages import GroupLoad, GroupRecord, ServiceRecord
from shared.service.logs import LevelChange

number = st.sampled_from([10, 20, 30, 40])


@given(number, number, st.floats(1, 1e10), st.floats(0, 1e10))
def test_a_change_holds_until_its_time_is_over(usual: int, changed: int, until: float, now: float) -> None:
    assert LevelChange(changed, until).at(usual, lambda: now) == (usual if now >= until else changed)
    assert LevelChange(changed).at(usual, lambda: now) == changed, "for good"
    assert LevelChange().at(usual, lambda: now) == usual


def lines_of(code: str, fmt: str = "json", level: str = "info") -> tuple[list[str], int]:
    """What a process writes that logs as ours do and runs `code`."""
    begin = (
        "import asyncio, logging, sys, threading, warnings, structlog; from shared.service import logs; "
        f"logs.configure_logging('s', 'i', level='{level}', fmt='{fmt}', about=dict(group='g', rank=1)); "
        "log = structlog.get_logger(); "
    )
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.stdout == ""
    return done.stderr.splitlines(), done.returncode


def json_of(code: str, level: str = "info") -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(code, level=level)[0]]


def test_whoever_writes_a_line_it_has_the_same_form() -> None:
    lines = json_of(
        "structlog.contextvars.bind_contextvars(request_id='r'); log.info('ours', n=1); "
        "logging.getLogger('lib').warning('theirs %s', 2); warnings.warn('a warning'); "
        "t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join(); "
        "sys.unraisablehook(type('U', (), dict(exc_type=ValueError, exc_value=ValueError(), exc_traceback=None, "
        "err_msg=None, object=3))()); raise RuntimeError('the end')"
    )
    for line in lines:
        assert (line["service"], line["instance"], line["group"], line["rank"]) == ("s", "i", "g", 1)
        assert line["timestamp"].endswith("Z")
    ours, theirs, warned, thread, finalizer, end = lines
    assert (ours["event"], ours["n"], ours["request_id"], ours["level"]) == ("ours", 1, "r", "info")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("theirs 2", "lib", "warning")
    assert theirs["request_id"] == "r"
    assert "a warning" in warned["event"]
    assert (thread["event"], thread["thread"], thread["level"]) == ("uncaught_exception", "t", "critical")
    assert "ZeroDivisionError" in thread["exception"]
    assert finalizer["event"] == "unraisable_exception"
    assert "RuntimeError: the end" in end["exception"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("fmt", ["json", "console"])
def test_each_line_is_one_write(fmt: str, unbuffered: str) -> None:
    """Ranks of a group share a log: a line in two writes would have another rank's line in its middle."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each write is a packet of its own
    code = (
        "import logging, structlog; from shared.service import logs; "
        f"logs.configure_logging('s', 'i', level='info', fmt='{fmt}'); "
        "structlog.get_logger().info('short', at='begin'); structlog.get_logger().info('long', text='a' * 20_000); "
        "logging.getLogger('lib').warning('of a library'); structlog.get_logger().info('end')"
    )
    env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": unbuffered}
    with ours:
        with theirs:
            process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=env)
        packets = []
        while packet := ours.recv(65536):
            packets.append(packet.decode())
    assert process.wait(60) == 0
    assert [re.findall("short|aaa|of a library|end", packet)[0] for packet in packets] == [
        "short",
        "aaa",
        "of a library",
        "end",
    ]
    assert all(packet.endswith("\n") and packet.count("\n") == 1 for packet in packets)


def test_a_task_that_nobody_waits_for_is_in_the_log() -> None:
    code = (
        "loop = asyncio.new_event_loop(); task = loop.create_task(asyncio.sleep(0, 1 / 1)); "
        "loop.call_exception_handler({'message': 'Task exception was never retrieved', "
        "'exception': KeyError('k')}); loop.run_until_complete(task); loop.close()"
    )
    (line,) = json_of(code)
    assert (line["logger"], line["level"], line["service"]) == ("asyncio", "error", "s")
    assert "KeyError" in line["exception"]


def test_levels_filter_ours_and_theirs() -> None:
    code = (
        "lib = logging.getLogger('lib'); lib.setLevel(logging.DEBUG); "
        "say = lambda: [f('x') for f in (log.debug, log.info, log.warning, lib.debug, lib.info, lib.warning)]; "
        "say(); logs.set_level('debug', 60); say(); assert logs.level().name == 'debug'; "
        "logs.set_level('error'); say(); log.error('end'); "
        "logs.set_level(''); assert logs.level() == logs.Level('info', 'info', 0.0); "
        "logs.follow(lambda: logs.LevelChange(40, 1.0)); assert logs.level().name == 'info', 'its time is over'; "
        "logs.follow(lambda: logs.LevelChange(40)); assert logs.level().name == 'error'"
    )
    lines = [(line["level"], line.get("logger", "ours")) for line in json_of(code)]
    usual = [("info", "ours"), ("warning", "ours"), ("warning", "lib")]
    debugging = [("debug", "ours"), ("info", "ours"), ("warning", "ours"), ("info", "lib"), ("warning", "lib")]
    assert lines == [*usual, *debugging, ("error", "ours")], "libraries' debug lines are never written"


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_stack_trace_shows_no_values_and_no_keys(fmt: str) -> None:
    key = "rz-0123456789ab-" + "x" * 43
    code = (
        "def f(prompt):\n try:\n  int(prompt[:0])\n except ValueError:\n"
        f"  log.exception('broken'); logging.getLogger('lib').error('{key}')\nf(chr(83) + 'ECRET')"
    )
    text = "\n".join(lines_of("pass\n" + code, fmt)[0])
    assert "ValueError" in text
    assert "SECRET" not in text
    assert "rz-0123456789ab-***" in text


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_no_text_of_a_client_reaches_the_terminal_as_a_command(fmt: str) -> None:
    code = f"""
import logging, structlog
from shared.service.logs import configure_logging
configure_logging("gateway", "g", level="info", fmt={fmt!r})
path = "/" + chr(27) + "[2J" + chr(10) + "2026 [info] forged" + chr(0x9b) + "31m" + chr(13) + chr(127)
structlog.get_logger().info("request", path=path)
logging.getLogger("library").warning("took %s", path)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, *theirs = ended.stderr.splitlines()
    assert ended.stdout == ""
    assert "forged" in ours
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ended.stderr), "nor colours, where there is no terminal"
    assert "[2J" in ended.stderr
    assert theirs


def test_handlers_of_libraries_are_taken_over() -> None:
    code = (
        "lib = logging.getLogger('lib'); lib.addHandler(logging.StreamHandler()); lib.propagate = False; "
        "logs.adopt_loggers(); lib.warning('once')"
    )
    assert [line["event"] for line in json_of(code)] == ["once"]


def test_nothing_is_written_below_the_level_of_the_settings() -> None:
    assert json_of("log.info('x'); logging.getLogger('l').warning('y')", level="error") == []


# --- ryzanstein log-level ------------------------------------------------------------------------

SERVICES = {
    name: ServiceRecord(kind, name, 1, state)  # type: ignore[arg-type]
    for name, kind, state in (
        ("gateway-0", "gateway", "ready"),
        ("gateway-1", "gateway", "draining"),
        ("gateway-2", "gateway", "gone"),
        ("executor-0", "executor", "ready"),
    )
}
GROUPS = {"g": GroupRecord("g", "m", "ready", 1, [], GroupLoad(), instance="executor-0")}


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("all", ["executor-0", "gateway-0", "gateway-1"]),
        ("gateway", ["gateway-0", "gateway-1"]),
        ("gateway-1", ["gateway-1"]),
        ("g", ["executor-0"]),
    ],
)
def test_a_target_is_a_service_an_instance_or_a_group(target: str, meant: list[str]) -> None:
    assert [record.instance for record in meant_by(target, SERVICES, GROUPS)] == meant


@pytest.mark.parametrize("target", ["gateway-2", "nobody", ""])
def test_an_unknown_target_is_told_what_there_is(target: str) -> None:
    with pytest.raises(ConfigurationError, match="the instances are: executor-0, gateway-0, gateway-1"):
        meant_by(target, SERVICES, GROUPS)


def test_the_numbers_are_those_of_logging() -> None:
    assert LevelChange(logging.DEBUG).at(logging.INFO, lambda: 0.0) == logging.DEBUG
