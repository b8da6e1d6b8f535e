"""Texts are the same whether steps are launched ahead or not: whole executors, a real model, compressed blocks."""

import asyncio
from pathlib import Path

import pytest

from shared.messages import Cancel, ControlReply, GenerationRequest, SamplingParams
from shared.nats import subjects
from tests.integration.executor.rings import MODEL, Rings, make_served_model, request_of

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=6),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2),
]


def load(group: str) -> list[GenerationRequest]:
    """Sequences that come and go: of different lengths, some ended by a stop token, one that edits its logits."""
    return [
        request_of(
            group,
            number,
            5 + 3 * number,
            max_tokens=4 if number == 4 else 20 + 5 * number,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            # Of a random model's texts about every other one has one of these.
            stop_token_ids=list(range(40, 45)) if number % 2 else [],
        )
        for number in range(10)
    ]


async def texts(house: Rings, group: str) -> list[tuple[list[int], str]]:
    requests = load(group)
    for some in (requests[:6], requests[6:]):
        await house.hand_in(group, some)
        await house.reader.finish(some[0].generation_id)
    return await house.texts(requests)


@pytest.mark.slow
async def test_texts_are_those_without_lookahead(house: Rings, tmp_path: Path) -> None:
    model = make_served_model(tmp_path / "model")
    for group, setting in (("off", "off"), ("on", "on")):
        options = ("--lookahead", setting, "--kv-dtype", "int8", "--max-sequences", "6")
        await house.begin(group, model, *options, "--speculation", "off")
    await house.ready("off", "on")
    expected, found = await asyncio.gather(texts(house, "off"), texts(house, "on"))
    assert found == expected
    assert {finish for _, finish in found} == {"length", "stop"}
    endless = GenerationRequest("on-x", "r", MODEL, "me", [5, 6, 7], 900)
    await house.hand_in("on", [endless])
    await house.reader.more()
    await house.bus.request(subjects.control("on"), Cancel(["on-x"]), ControlReply, timeout=30)
    tokens, last = await house.reader.finish("on-x")
    assert (last.finish, len(tokens) < 900) == ("cancelled", True)
    logged = await house.leave("on")
    assert '"lookahead": true' in logged
    assert '"lookahead": false' in await house.leave("off")
