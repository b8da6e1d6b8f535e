"""Answers through the death of a real vLLM's processes: `make test-engines`, which makes its environment.

In fp32, greedy, sampled and under a schema: the text is the undisturbed one, whatever is killed or stopped meanwhile.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.stack import Stack

NAME = "a-model"
PYTHON, MODEL = os.environ.get("VLLM_PYTHON", ""), os.environ.get("VLLM_MODEL", "")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (PYTHON and MODEL), reason="there is no vLLM: make test-engines makes its environment"),
]

STREAMS = 8
LONG_ENOUGH = 40  # characters of each answer, before its engine is disturbed
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


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--engine", "vllm", "--engine-python", PYTHON, "--model", MODEL, "--served-model-name", NAME)
    options += ("--dtype", "fp32", "--no-smoke-test")
    arguments = ("--engine-args", "--enforce-eager --gpu-memory-utilization 0.4")
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with Stack(tmp_path_factory.mktemp("vllm"), *options, *arguments, **variables) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[tuple[str, str]]:
    return asyncio.run(answers(stack))


async def answers(stack: Stack, disturb: tuple[str, signal.Signals] | None = None) -> list[tuple[str, str]]:
    """(text, finish reason) of `STREAMS` answers at once. `disturb`: a process, and its signal once all have begun."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(answer(client, number, begun[number])) for number in range(STREAMS)]
        if disturb is not None:
            await asyncio.gather(*(event.wait() for event in begun))
            for pid in processes(stack, disturb[0]):
                os.kill(pid, disturb[1])
        return await asyncio.gather(*streams)


async def answer(client: AsyncOpenAI, number: int, begun: asyncio.Event) -> tuple[str, str]:
    text = finish = ""
    try:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"Write about the number {number} and its friends."}],
            max_tokens=96,
            seed=number,
            stream=True,
            **KINDS[number % len(KINDS)],
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            if len(text) >= LONG_ENOUGH:
                begun.set()
    finally:
        begun.set()
    return text, finish


def processes(stack: Stack, name: str) -> list[int]:
    found = []
    for process in stack.descendants():
        with contextlib.suppress(Exception):  # it has ended meanwhile
            if name in " ".join(process.cmdline()):
                found.append(process.pid)
    assert found, f"there is no {name}"
    return found


def test_the_same_seed_has_the_same_text_twice(stack: Stack, undisturbed: list[tuple[str, str]]) -> None:
    assert len({text for text, _ in undisturbed}) == STREAMS
    assert asyncio.run(answers(stack)) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "ryzanstein_vllm.worker", "services.executor.rank"])
def test_texts_are_the_undisturbed_ones(
    stack: Stack, undisturbed: list[tuple[str, str]], name: str, number: signal.Signals
) -> None:
    assert asyncio.run(answers(stack, (name, number))) == undisturbed, stack.logs("executor-*.log")[-4000:]
