"""Samples of stacks made into shares of a process's CPU time, and the way there with a program in py-spy's place."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.control_plane import cpu_profile
from benchmarks.control_plane.bench import Bench
from benchmarks.control_plane.cpu_profile import (
    COLLECTOR,
    KERNEL,
    UNKNOWN,
    Profile,
    Profiler,
    function_of,
    group_of,
    part_of,
    plausible,
    profile,
    py_spy,
    sample,
    stacks,
)
from benchmarks.control_plane.systems import System
from benchmarks.errors import BenchError
from tests.unit.benchmarks.terminal import shown

LOOP = "run_forever (loop.c:33397);task_step (_asynciomodule.c:2990)"
RUN = f"{LOOP};Run.chunks (services/gateway/streams/run.py:202)"


@pytest.mark.parametrize(
    ("stack", "group"),
    [
        (RUN, "services/gateway/streams"),
        (f"{RUN};unicode_length (libpython3.11.so.1.0)", "services/gateway/streams"),
        (f"{RUN};namedtuple.<locals>._replace (collections/__init__.py:453)", "services/gateway/streams"),
        (
            f"{RUN};json_skip (msgspec/_core.cpython-311-x86_64-linux-gnu.so);malloc (libc.so.6)",
            "MessagePack, JSON",
        ),
        (
            f"{RUN};ModelTokenizer._encode (services/gateway/tokenizer/tokenizer.py:224)",
            "services/gateway/tokenizer",
        ),
        (f"{RUN};match_at (tokenizers/tokenizers.abi3.so);0x7f55 (libc.so.6)", "tokenizer"),
        (f"{RUN};root (<template>:20)", "chat template"),
        (f"{LOOP};HttpToolsProtocol.data_received (uvicorn/protocols/http/httptools_impl.py:9)", "HTTP"),
        (f"{LOOP};Parser.parse (nats/protocol/parser.py:98)", "NATS client"),
        (f"{LOOP};Bus.publish (shared/nats/bus.py:300)", "shared/nats"),
        (
            f"{LOOP};Bus.publish (shared/nats/bus.py:300);_by_level (shared/service/logs.py:9)",
            "logs, metrics, traces",
        ),
        (f"{LOOP};StreamReader.read (asyncio/streams.py:5);Py_DECREF (object.h:5)", "event loop"),
        (f"{LOOP};build_plan (services/executor/scheduler/steps.py:129);ix_ (numpy/lib/x.py:100)", "arrays"),
        (f"{LOOP};pin_key (shared/pins.py:5)", "shared/pins"),
        (f"{RUN};Struct_alloc (msgspec/_core.so);gc_collect_main (gcmodule.c:1200);visit (x.so)", COLLECTOR),
        (f"{LOOP};uv__io_poll (linux.c:1452);epoll_pwait (libc.so.6)", KERNEL),
        (
            f"{LOOP};get (_queuemodule.c:253);PyThread_acquire_lock_timed (libpython3.11.so.1.0);0x7f (libc.so.6)",
            KERNEL,
        ),
        (f"{LOOP};read (services/gateway/streams/run.py:5)", "services/gateway/streams"),
        ("main (libc.so.6)", UNKNOWN),
        ("python", UNKNOWN),
    ],
)
def test_a_sample_is_the_work_of_the_innermost_known_frame(stack: str, group: str) -> None:
    assert group_of(stack.split(";")) == group


def test_a_function_is_named_without_its_line() -> None:
    frames = f"{RUN};namedtuple.<locals>._replace (collections/__init__.py:453);x (libc.so.6)".split(";")
    assert function_of(frames) == "namedtuple.<locals>._replace (collections/__init__.py)"
    assert function_of(["main (libc.so.6)"]) == UNKNOWN


def test_lines_of_py_spy_are_read() -> None:
    assert stacks(f"{RUN} 7\nmain (libc.so.6) 2\n\nbroken\n") == [
        (RUN.split(";"), 7),
        (["main (libc.so.6)"], 2),
    ]


def test_more_samples_than_cpu_time_are_not_believed() -> None:
    waiting = [(["epoll_pwait (libc.so.6)"], 10_000)]
    assert plausible([(RUN.split(";"), 300), *waiting], 1.0)
    assert not plausible([(RUN.split(";"), 600), *waiting], 1.0)


async def test_implausible_samples_are_taken_again_and_then_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Loads:
        taken = 0

        async def measure(self, system: object, **load: float) -> SimpleNamespace:
            self.taken += 1
            return SimpleNamespace(figures=SimpleNamespace(requests=1))

    program(tmp_path, f'while [ $# -gt 1 ]; do shift; done; echo "{RUN} 99999" > "$1"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    loads = Loads()
    profiler = Profiler(cast(Bench, loads), 1.0, lambda text: None)
    with pytest.raises(BenchError, match="saw gateway run for longer"):
        await profiler._sampled("gateway", [os.getpid()], cast(System, None), tmp_path, 0.0, 4)
    assert loads.taken == cpu_profile.ATTEMPTS


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from(["a (nats/x.py:1)", "read (libc.so.6)", "b (shared/nats/bus.py:2)", "main"]).map(
            lambda f: [f]
        ),
        st.integers(1, 1000),
    )
)


@given(SAMPLES, st.floats(0, 1))
def test_shares_add_up_to_the_whole(samples: list[tuple[list[str], int]], kernel: float) -> None:
    part = part_of(samples, 100.0, kernel)
    assert sum(part.groups.values()) == pytest.approx(1)
    assert part.groups[KERNEL] == kernel
    assert part.samples == sum(count for stack, count in samples if stack != ["read (libc.so.6)"])


def test_without_py_spy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_profile.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="pip install py-spy"):
        py_spy()
    (tmp_path / "py-spy").touch()
    assert py_spy() == str(tmp_path / "py-spy")


def program(folder: Path, body: str) -> Path:
    script = folder / "py-spy"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


async def test_what_py_spy_says_is_told_where_it_fails(tmp_path: Path) -> None:
    failing = program(tmp_path, "echo Permission denied >&2; exit 1")
    with pytest.raises(BenchError, match="cannot sample process 1: Permission denied"):
        await sample(str(failing), 1, 1.0, tmp_path)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the load client needs a C compiler")
async def test_every_process_of_the_stack_is_profiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path, f'while [ $# -gt 1 ]; do shift; done; echo "{RUN} 3" > "$1"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cpu_profile, "BEGIN_SECONDS", 0.0)
    bench = Bench(tmp_path, 4, 4, 0.5, lambda text: None)
    found = await profile(bench, tmp_path, None, 20.0, 32, 0.5, lambda text: None)
    requests, tokens = found
    assert (requests.unit, tokens.unit) == ("request", "token")
    assert {"gateway", "scheduler", "executor", "nats"} <= set(requests.parts)
    gateway = requests.parts["gateway"]
    assert gateway.samples > 0
    assert gateway.cpu_us > tokens.parts["gateway"].cpu_us > 0  # a request has several tokens
    assert set(gateway.groups) == {KERNEL, "services/gateway/streams"}
    assert set(requests.parts["nats"].groups) == {KERNEL, UNKNOWN}
    text = shown(*Profile(date="", command="", machine="m", workloads=found).parts())
    assert "us per token (share)" in text
    assert "gateway: Run.chunks (services/gateway/streams/run.py)" in text
