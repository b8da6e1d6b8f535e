"""The same on a real model with the default settings: greedy and seeded answers are those of an undisturbed run.

With their log probabilities, in bf16 and with the packed codes of the default model's GGUF file, with int8 KV blocks
and speculation, that is, where the native kernels compute (ADR 0024); elsewhere in fp32.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.target import LocalSettings
from services.executor.native.library import why_not
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from shared.model_store.settings import Store
from shared.models import linked_gguf
from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.exercise import Row, exercise
from tests.chaos.expected import Task, repeated
from tests.chaos.faults import all_faults
from tests.chaos.load import CHAT, Load, logprobs_of
from tests.chaos.streams import Answer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400), pytest.mark.chaos]

TOPICS = ("the sea", "bread", "the moon", "bees")
TOKENS = 60
CLIENTS = 4


def _packed_model(scratch: Path) -> Path:
    """The default model as its GGUF file has it; a cache may have it unpacked, as it was until lately."""
    for cache in (LocalSettings().model_cache, scratch):
        directory = ensure_model(DEFAULT_MODEL, Store.at(cache), lambda stage, done, total: None)[1]
        if linked_gguf(directory):
            break
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["bf16", "packed"])
async def real_house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Two rings of two ranks, one thread each."""
    directory = _packed_model(tmp_path_factory.mktemp("models"))
    arguments = ["--model", str(directory), "--served-model-name", DEFAULT_MODEL]
    arguments += ["--threads", "1", "--replicas-on-host", "2"]
    if why_not():
        arguments += ["--dtype", "fp32"]
    elif request.param == "bf16":
        arguments += ["--weight-dtype", "bf16"]
    plan = Plan(executor_arguments=arguments)
    async with House(tmp_path_factory.mktemp("real"), plan) as house:
        yield house


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tasks(real_house: House) -> list[Task]:
    """Answered once, while nothing is wrong."""
    found = []
    for number, topic in enumerate(TOPICS):
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number}):
            body = {
                "model": DEFAULT_MODEL,
                "messages": [{"role": "user", "content": f"Write a long story about {topic}."}],
                "max_tokens": TOKENS,
                "logprobs": True,
                "top_logprobs": 2,
                **sampling,
            }
            found.append(await _undisturbed(real_house, body))
    return found


async def _undisturbed(house: House, body: dict) -> Task:  # type: ignore[type-arg]
    async with Answer(house.addresses()[0][1], "POST", CHAT, body={**body, "stream": False}) as answer:
        whole = await answer.whole()
    choice = whole["choices"][0]
    tokens = whole["usage"]["completion_tokens"]
    logprobs = tuple(logprobs_of(choice))
    assert len(logprobs) == tokens
    return Task(body, choice["message"]["content"], tokens, choice["finish_reason"], logprobs)


FAULTS = ("kill-rank-0", "kill-rank-1", "stop-rank-1", "kill-ring", "stop-ring")


@pytest.mark.parametrize(
    ("real_house", "name"), [*(("bf16", name) for name in FAULTS), ("packed", "kill-ring")], indirect=["real_house"]
)
async def test_a_real_models_answers_are_the_undisturbed_ones(
    name: str, real_house: House, tasks: list[Task], note: Callable[[Row], None], request: pytest.FixtureRequest
) -> None:
    weights = request.node.callspec.params["real_house"]
    fault = all_faults()[name]()
    async with Load(real_house.addresses, repeated(tasks), clients=CLIENTS, patience=180) as load:
        row = await exercise(real_house, fault, load)
        await load.finish()
    note(dataclasses.replace(row, fault=f"real model, {weights}: {row.fault}"))
    load.check()
    await real_house.all_ready()
