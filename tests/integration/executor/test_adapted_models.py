"""Real rings of a tiny model with LoRA adapters as peft saves them: a text depends on its own adapter alone."""

from pathlib import Path

import pytest

from services.executor.model.adapters.files import inspect_adapter
from services.executor.model.loading.loader import load_config
from shared.messages import GenerationRequest, SamplingParams
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from tests.integration.executor.rings import Rings, make_served_model, request_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in

RANKS = (2, 5, 8)


async def stored(bus: Bus, model: Path, directory: Path) -> list[str]:
    """Adapters of the model in the object store; their digests."""
    base, files, digests = base_of(model), AdapterFiles(bus), []
    await files.open()
    for rank in RANKS:
        adapter = directory / str(rank)
        save_adapter(base, adapter, targets_in(model), rank)
        digests.append(inspect_adapter(adapter, load_config(model)).digest)
        await files.put(digests[-1], adapter, "test")
    return digests


def asked(turn: str, digests: list[str]) -> list[GenerationRequest]:
    """The same prompt with each adapter and with none, twice."""
    greedy = SamplingParams(temperature=0.0)
    return [
        request_of(f"{turn}-{copy}{number}", 1, 20, max_tokens=24, sampling=greedy, adapter=digest)
        for copy in range(2)
        for number, digest in enumerate([*digests, ""])
    ]


@pytest.mark.parametrize("kernels", in_lanes(["fp32", "bf16"], (), ["fp32"]))
async def test_texts_depend_on_their_adapter_alone(house: Rings, bus: Bus, tmp_path: Path, kernels: str) -> None:
    """All at once, with two slots for three adapters, on two ranks; and one by one on one rank."""
    model = make_served_model(tmp_path / "model")
    digests = await stored(bus, model, tmp_path / "adapters")
    cache = ("--model-cache", str(tmp_path / "cache"), "--dtype", kernels)
    await house.begin("a", model, *cache, "--max-adapters", "2", "--tp", "2")
    if kernels == "fp32":
        await house.begin("b", model, *cache)
        await house.ready("b")
    await house.ready("a")
    together = asked("a", digests)
    await house.hand_in("a", together)
    texts = await house.texts(together)
    assert {finish for _, finish in texts} <= {"length", "stop"}
    assert texts[:4] == texts[4:], "what a text is beside others, or from the cache, changes nothing"
    assert len({tuple(tokens) for tokens, _ in texts}) == 4, "each adapter, and none, has its own text"
    if kernels == "fp32":
        for one, text in zip(asked("b", digests)[:4], texts, strict=False):
            await house.hand_in("b", [one])
            assert await house.texts([one]) == [text]
