"""Answers through the death of a real vLLM's processes: `make test-engines`, which makes its environment.

In fp32, greedy, sampled and under a schema: the tokens are the undisturbed ones, whatever is killed or stopped
meanwhile. In bf16, where sums depend on the batch, none is lost, doubled or out of place.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from benchmarks.random_model import LlamaShape, write_servable
from services.executor.engines.vllm.arguments import PROCESSOR
from services.executor.engines.vllm.engine import PLUGIN, VARIABLES
from tests.e2e.stack import Stack

NAME = "a-model"
PYTHON, MODEL = os.environ.get("VLLM_PYTHON", ""), os.environ.get("VLLM_MODEL", "")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (PYTHON and MODEL), reason="there is no vLLM: make test-engines makes its environment"),
]

STREAMS = 16
BEGUN = 16  # tokens of half of the answers, before their engine is disturbed
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "text": {"type": "string", "maxLength": 200}},
    "required": ["name", "text"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3},
    {"temperature": 0.8, "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}}},
)
# What is killed or stopped where vLLM runs so.
PARTS = {
    "one worker": ("VLLM::EngineCore", "ryzanstein_vllm.worker", "services.executor.rank"),
    "two workers": ("VLLM::Worker_TP1", "VLLM::EngineCore"),
    "a server": (),
}
TOKENS = 96  # of an answer, at most
ENGINE_ARGS = "--enforce-eager --gpu-memory-utilization 0.4"


def cores(parts: int) -> str:
    """As vLLM binds its workers: each to its part of all cores."""
    count = (os.cpu_count() or 1) // parts
    return "|".join(f"{part * count}-{(part + 1) * count - 1}" for part in range(parts))


def variables(workers: int) -> dict[str, str]:
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores(workers)}


class Answer(NamedTuple):
    text: str
    finish: str
    tokens: tuple[int, ...]


class Server:
    """vLLM's own, which our processor is named to. A context manager."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        options = f"--model {MODEL} --host 127.0.0.1 --port {self.port} --dtype float32 {ENGINE_ARGS}"
        options += f" --logits-processors {PROCESSOR} --generation-config vllm"
        environment = {**os.environ, **VARIABLES, **variables(1), "PYTHONPATH": str(PLUGIN)}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
                stdout=output,
                stderr=output,
                env={**environment, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_ready(self) -> None:
        by = time.monotonic() + 300
        while self._process.poll() is None and time.monotonic() < by:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.5)
        raise AssertionError(self._log.read_text()[-4000:])


def stack_of(directory: Path, *options: str, **environment: str) -> Stack:
    return Stack(directory, *options, "--served-model-name", NAME, "--no-smoke-test", **environment)


class Running(NamedTuple):
    stack: Stack
    server: Server | None
    undisturbed: list[Answer]


class Ways:
    """A stack around vLLM in one of the ways of `PARTS`, until another is wanted: each takes a minute to begin."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._way = ""
        self._running: Running
        self._open = contextlib.ExitStack()

    def run(self, way: str) -> Running:
        if way != self._way:
            self.close()
            self._running = self._begin(way, self._directory / f"{time.time_ns()}")
            self._way = way
        return self._running

    def close(self) -> None:
        self._way = ""
        self._open.close()

    def _begin(self, way: str, directory: Path) -> Running:
        directory.mkdir()
        options = ["--engine", "vllm", "--engine-python", PYTHON, "--dtype", "bf16" if way == "bf16" else "fp32"]
        arguments, model, server = ENGINE_ARGS, Path(MODEL), None
        if way == "a server":
            server = self._open.enter_context(Server(directory))
            server.wait_ready()
            options = ["--engine-url", server.url, "--engine-kind", "vllm"]
        else:
            if way == "two workers":
                model = directory / "two"  # with heads for two
                write_servable(model, LlamaShape(512, 8, 4, 1536, 8, 49152), Path(MODEL))
                arguments += " --tensor-parallel-size 2"
            options += ["--engine-args", arguments]
        environment = variables(2 if way == "two workers" else 1)
        stack = self._open.enter_context(stack_of(directory / "stack", *options, "--model", str(model), **environment))
        return Running(stack, server, asyncio.run(answers(stack)))


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with contextlib.closing(Ways(tmp_path_factory.mktemp("vllm"))) as ways:
        yield ways


@pytest.fixture
def running(ways: Ways, way: str) -> Running:
    return ways.run(way)


async def answers(stack: Stack, disturb: str | Server = "", number: int = 0) -> list[Answer]:
    """Of `STREAMS` requests at once. `disturb`: a process that gets the signal `number` once half have begun, or a
    server that is killed then, and started again."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(answer(client, at, begun)) for at in range(STREAMS)]
        if disturb:
            for _ in range(STREAMS // 2):
                await begun.acquire()
            assert not all(stream.done() for stream in streams), "nothing would be disturbed"
        if isinstance(disturb, Server):
            await asyncio.to_thread(disturb.kill)
            await asyncio.to_thread(disturb.__enter__)
        elif disturb:
            for pid in processes(stack, disturb):
                os.kill(pid, number)
        return await asyncio.gather(*streams)


async def answer(client: AsyncOpenAI, number: int, begun: asyncio.Semaphore) -> Answer:
    text = finish = ""
    tokens: list[int] = []
    counted = False
    try:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"Write about the number {number} and its friends."}],
            max_tokens=TOKENS,
            seed=number,
            stream=True,
            extra_body={"return_token_ids": True},
            **KINDS[number % len(KINDS)],
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                tokens += (choice.model_extra or {}).get("token_ids") or []
            if len(tokens) >= BEGUN and not counted:
                counted = True
                begun.release()
    finally:
        if not counted:
            begun.release()
    return Answer(text, finish, tuple(tokens))


def processes(stack: Stack, name: str) -> list[int]:
    found = []
    for process in stack.descendants():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if name in " ".join(process.cmdline()):
                found.append(process.pid)
    assert found, f"there is no {name}"
    return found


@pytest.mark.parametrize("way", PARTS)
def test_the_same_seed_has_the_same_text_twice(running: Running) -> None:
    assert len({one.text for one in running.undisturbed}) == STREAMS
    assert asyncio.run(answers(running.stack)) == running.undisturbed


@pytest.mark.parametrize("way", ["a server"])
def test_a_server_is_killed_and_comes_back(running: Running) -> None:
    stack, server, undisturbed = running
    assert server is not None
    assert asyncio.run(answers(stack, server)) == undisturbed, stack.logs("executor-*.log")[-4000:]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize(("way", "name"), [(way, name) for way, names in PARTS.items() for name in names])
def test_texts_are_the_undisturbed_ones(running: Running, name: str, number: signal.Signals) -> None:
    found = asyncio.run(answers(running.stack, name, number))
    assert found == running.undisturbed, running.stack.logs("executor-*.log")[-4000:]


@pytest.mark.parametrize("way", ["bf16"])
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "services.executor.rank"])
def test_nothing_is_lost_or_doubled_where_texts_may_change(running: Running, name: str) -> None:
    tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    for one in asyncio.run(answers(running.stack, name, signal.SIGKILL)):
        assert tokenizer.decode(one.tokens) == one.text
        assert one.finish == "stop" or (one.finish, len(one.tokens)) == ("length", TOKENS)
