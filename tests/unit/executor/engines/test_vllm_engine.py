"""vLLM's process and what is told over its socket, with a package of vLLM's name that follows a script."""

import asyncio
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.engines.base import EngineDelta, EngineRequest, EngineStep
from services.executor.engines.vllm.engine import VllmEngine, open_line
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import LENGTH, receive
from services.executor.supervisor.diagnostics.processes import with_descendants
from shared.errors import ConfigurationError, InternalError, ModelLoadError, RingLost
from shared.messages import SamplingParams, TokenLogprobs
from tests.unit.executor.engines.scripted_vllm.vllm import SCRIPT

SCRIPTED = Path(__file__).parent / "scripted_vllm"

pytestmark = pytest.mark.timeout(120)


def engine_of(directory: Path, engine_args: str = "", **settings: Any) -> VllmEngine:
    settings = {"engine_python": sys.executable, "dtype": "fp32", **settings}
    return VllmEngine(ExecutorSettings(model="m", engine="vllm", engine_args=engine_args, **settings), directory)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTED))


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[VllmEngine]:
    engine = engine_of(directory)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()
        await engine.stop()


def asked(name: str, *tokens: int, **fields: Any) -> EngineRequest:
    return EngineRequest(name, list(tokens), len(tokens), fields.pop("max_tokens", 3), **fields)


async def answers(engine: VllmEngine, *names: str) -> tuple[dict[str, list[EngineDelta]], EngineStep]:
    """All deltas of the requests until their ends, and the last step."""
    deltas: dict[str, list[EngineDelta]] = {name: [] for name in names}
    while True:
        step = await engine.next()
        for delta in step.deltas:
            deltas[delta.id].append(delta)
        if all(found and found[-1].finish for found in deltas.values()):
            return deltas, step


def tokens_of(deltas: list[EngineDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def test_what_it_is_and_what_it_gives(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, max_sequences=5)
    try:
        facts = await engine.start()
        assert (facts.name, facts.vocab_size, facts.context_length, facts.places) == ("vLLM 0.32.0", 100, 64, 5)
        assert (facts.kv_tokens, facts.exact) == (128, True)
        assert (facts.adapters, facts.unsupported) == (0, ["adapter", "pooling"])
        assert facts.numerics == "vllm 0.32.0, float32, quantization None, kv auto, tp 1, pp 1, cpu"
        engine.submit(asked("a", 1, 2, 3))
        scored = SamplingParams(logprobs=1)
        engine.submit(asked("b", 7, 8, sampling=scored, prompt_logprobs=1, cache_salt="s", max_tokens=2))
        deltas, step = await answers(engine, "a", "b")
        assert tokens_of(deltas["a"]) == [4, 5, 6]
        assert (deltas["a"][0].cached_tokens, deltas["a"][-1].finish, deltas["a"][0].logprobs) == (2, "length", None)
        assert [delta.logprobs for delta in deltas["b"]] == [
            [TokenLogprobs(-1.0, [(token, -1.0)])] for token in (9, 10)
        ]
        assert deltas["b"][0].prompt_scores == struct.pack("<fiif", -1.0, 1, 8, -1.0)
        assert step.steps == 3 + 2, "of the warm-up nothing is told"
        assert step.kv_used == 0.5
    finally:
        await engine.stop()


async def test_adapters_that_vllm_computes_wrongly_are_refused(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "--enable-lora")
    with pytest.raises(ModelLoadError, match=r"on CPUs requests of the model alone .*; leave --enable-lora out; look"):
        await engine.start()
    await engine.stop()


async def test_adapters_are_told_to_vllm_by_number_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_VLLM_DEVICE", "cuda")
    engine = engine_of(tmp_path, "--enable-lora")
    try:
        facts = await engine.start()
        assert (facts.adapters, facts.unsupported) == (1, ["pooling"])
        for name, adapter in (("none", ""), ("first", "ab"), ("second", "cd"), ("again", "ab")):
            engine.submit(asked(name, 1, adapter=adapter, adapter_directory=adapter and f"/adapters/{adapter}"))
        deltas, _ = await answers(engine, "none", "first", "second", "again")
        found = {name: tokens_of(each) for name, each in deltas.items()}
        assert found == {"none": [2, 3, 4], "first": [3, 4, 5], "second": [4, 5, 6], "again": [3, 4, 5]}
    finally:
        await engine.stop()


@pytest.mark.parametrize(("task", "labels"), [("embed", []), ("classify", ["good", "bad"])])
async def test_vectors_and_classes_are_read_of_prompts(tmp_path: Path, task: Any, labels: list[str]) -> None:
    engine = engine_of(tmp_path, f"--runner pooling --convert {task}")
    try:
        facts = await engine.start()
        assert (facts.tasks, facts.labels, facts.embedding_size) == ((task,), labels, 0 if labels else 2)
        assert facts.unsupported == ["adapter"]
        engine.submit(asked("plain", 5, 6, pool=task, normalized=False))
        engine.submit(asked("normalized", 7, pool=task))
        engine.submit(asked("pair", 8, 9, pool=task, second_segment=1))
        deltas, _ = await answers(engine, "plain", "normalized", "pair")
        found = {name: [*struct.unpack("<2f", each[-1].vector)] for name, each in deltas.items()}
        assert found == {"plain": [5, 0], "normalized": [7, task == "embed"], "pair": [8, 1]}
        assert {each[-1].finish for each in deltas.values()} == {"stop"}
    finally:
        await engine.stop()


async def test_one_request_ends_and_the_others_go_on(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        keyed = SamplingParams(seed=5, temperature=1.0)
        names = SCRIPT.keys() - {"dies", "never ends"}
        for name in names:
            engine.submit(asked(name, SCRIPT[name], sampling=keyed))
        engine.submit(asked("fine", 1))
        deltas, _ = await answers(engine, *names, "fine")
        ends = {name: (found[-1].finish, found[-1].code, found[-1].error) for name, found in deltas.items()}
        assert ends == {
            "too long": ("error", "invalid_request", "vLLM refuses the request: The prompt is too long."),
            "fails": ("error", "internal_error", "vLLM refuses the request: a kernel failed"),
            "is ended by vLLM": ("error", "", "vLLM has ended the request: abort."),
            "cannot be sampled": ("error", "", "No token fits."),
            "fine": ("length", "", ""),
        }


async def test_an_abort_ends_it_there_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with started(tmp_path) as engine:
        engine.submit(asked("a", SCRIPT["never ends"]))
        while not (await engine.next()).deltas:
            pass
        engine.abort(["a", "unknown"])
        engine.submit(asked("b", 1))
        await answers(engine, "b")
    said = capfd.readouterr().err
    assert said.index("over: a") < said.index("over: b") < said.index("shut down")


async def test_its_end_is_told_with_the_reason(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        engine.submit(asked("a", SCRIPT["dies"]))
        with pytest.raises(InternalError, match="vLLM's engine process has ended"):
            await answers(engine, "a")


async def test_a_killed_process_is_not_a_crash(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        worker = worker_of(engine)
        assert not engine.is_stopped()
        worker.suspend()
        await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        assert engine.is_stopped()
        all_of_it = [psutil.Process(pid) for pid in with_descendants([worker.pid])]
        worker.kill()
        with pytest.raises(RingLost, match="vLLM has ended: signal 9"):
            await engine.next()
        await asyncio.to_thread(psutil.wait_procs, all_of_it, 10)
        assert not [each for each in all_of_it if each.is_running()]


def worker_of(engine: VllmEngine) -> psutil.Process:
    return psutil.Process(engine._process.pid)


@pytest.mark.parametrize(
    ("variables", "engine_args", "error", "reason"),
    [
        ({"SCRIPTED_VLLM_VERSION": "0.9.1"}, "", ModelLoadError, "vLLM 0.9.1 is too old; install 0.12 or newer"),
        ({"PYTHONPATH": ""}, "", ModelLoadError, "has no vLLM that can be imported .*--engine-python"),
        ({}, "--kv-cache-dtype fp4", ModelLoadError, "vLLM does not take these --engine-args: .*fp4"),
        (
            {},
            "--kv-cache-dtype int8",
            ModelLoadError,
            "failed at its first request: It has ended, after: RuntimeError: no kernel for that; look into",
        ),
        ({}, "--kv-cache-dtype fp8", ModelLoadError, "vLLM did not start: There is no memory for that; look into"),
    ],
)
async def test_why_it_does_not_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    engine_args: str,
    error: type[Exception],
    reason: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    engine = engine_of(tmp_path, engine_args)
    with pytest.raises(error, match=reason):
        await engine.start()
    await engine.stop()


async def test_what_a_worker_said_is_read_where_it_ends_with_something_unread() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await open_line(ours)
    writer.write(b"unread")
    theirs.sendall(LENGTH.pack(4) + b"said")
    theirs.close()
    await writer.wait_closed()
    assert await receive(reader) == b"said"
    with pytest.raises(EOFError):
        await receive(reader)
    writer.close()


async def test_a_python_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be started \(No such file or directory\); name the Python"):
        await engine_of(tmp_path, engine_python=tmp_path / "python").start()


async def test_what_it_says_before_it_ends_at_its_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho The disk is full.\nexit 3\n")
    python.chmod(0o755)
    engine = engine_of(tmp_path, engine_python=python)
    with pytest.raises(ModelLoadError, match=r"vLLM did not start: exit code 3, after: The disk is full\.$"):
        await engine.start()
    await engine.stop()
