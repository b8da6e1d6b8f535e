"""A ring is killed in the middle of its texts, for each kind of state that a layer may keep: another ring goes on with
them, and every text is that of an undisturbed run.

Small models with random weights, in fp32 by PyTorch, on two rings of two ranks. Greedy, and of texts none of whose
tokens nearly ties with another: sums may end otherwise in their last bits where a prompt is computed at once that was
decoded before (docs/models.md has what is the same bit for bit).
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.exercise import Row, row_of
from tests.chaos.expected import Task, repeated
from tests.chaos.faults import KillRing
from tests.chaos.load import CHAT, Load, logprobs_of
from tests.chaos.streams import Answer
from tests.integration.executor.rings import VOCABULARY
from tests.unit.executor.model.architectures import KINDS, settings_of
from tests.unit.executor.model.tiny import build
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(200), pytest.mark.chaos]

CONTEXT = 1024
TOKENS = 500
PROMPTS = 12
CLIENTS = 6
TIE = 1e-4  # log probabilities that differ by less may change places
# Tokens that a text has at least: one that only repeats itself would be the same whatever is lost.
DISTINCT = 6


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Without rings; one of every other service."""
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=0)
    async with House(tmp_path_factory.mktemp("kinds"), plan) as house:
        yield house


def served_model(directory: Path, name: str) -> Path:
    """With a head of its own, and weights large enough that texts do not repeat themselves soon."""
    settings = {**settings_of(name), "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    settings |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    model = build(name, settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key and "scale" not in key:
                parameter.mul_(2)
    model.save_pretrained(str(directory))
    for file, content in tiny_files().items():
        (directory / file).write_bytes(content)
    return directory


async def undisturbed(house: House, model: str, number: int) -> Task | None:
    """None where the text would prove little."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number * 7919:x} " * (3 + number % 5)}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    asked = {**body, "logprobs": True, "top_logprobs": 2}
    async with Answer(house.addresses()[0][1], "POST", CHAT, body=asked) as answer:
        choice = (await answer.whole())["choices"][0]
    tokens = logprobs_of(choice)
    leads = [token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"] for token in tokens]
    if min(leads) < TIE or len({token["token"] for token in tokens}) < DISTINCT:
        return None
    return Task(body, choice["message"]["content"], TOKENS, choice["finish_reason"])


@pytest.mark.parametrize("kind", KINDS)
async def test_texts_go_on_when_their_ring_is_killed(
    kind: str, house: House, note: Callable[[Row], None], tmp_path: Path
) -> None:
    model, first = served_model(tmp_path / "model", KINDS[kind]), 2 * list(KINDS).index(kind)
    arguments = ["--model", str(model), "--served-model-name", kind, "--device", "cpu", "--dtype", "fp32"]
    arguments += ["--threads", "1", "--replicas-on-host", "2", "--kv-memory", str(16 << 20)]
    async with house.executors([first, first + 1], arguments) as (killed, _):
        found = await asyncio.gather(*(undisturbed(house, kind, number) for number in range(PROMPTS)))
        tasks = [task for task in found if task is not None]
        assert len(tasks) > 1
        fault = KillRing(killed)
        async with Load(house.addresses, repeated(tasks), clients=CLIENTS, patience=60) as load:
            await load.flowing()
            await house.watch.until(house.all_work, 60, "every ring has work")
            at, moved = time.monotonic(), len(house.watch.moved)
            await fault.inject(house)
            detected = await fault.detected(house, at)
            await load.finish()
        load.check()
    row = row_of(fault.name, load.records, house.watch.moved, at, detected, time.monotonic())
    assert len(house.watch.moved) > moved
    note(dataclasses.replace(row, fault=f"{row.fault}, {kind} state"))
