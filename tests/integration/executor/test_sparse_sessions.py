"""Sparse attention beside a draft model, on rings of real processes: wherever a session's blocks go, its text stays."""

from pathlib import Path

import pytest

from services.executor.native.library import why_not
from shared.config import CommonSettings
from shared.messages import GenerationRequest, SamplingParams, SparseAttention
from shared.nats.bus import Bus
from tests.integration.executor.rings import (
    BLOCK,
    CONTEXT,
    MODEL,
    VOCABULARY,
    Rings,
    Session,
    request_of,
    rings,
)
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.tiny import make_model
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")

PAGES = SparseAttention(threshold=48, sinks=8, recent=16, budget=16, share=0.0, dense_layers=1)
OTHERS, OTHERS_PROMPT = 6, 700
GREEDY = SamplingParams(temperature=0.0)


def make_models(directory: Path) -> tuple[Path, Path]:
    """A model, and a draft model of the same vocabulary."""
    made = []
    for name, layers in (("model", 3), ("draft", 1)):
        sizes = {"head_dim": 32, "num_hidden_layers": layers, "max_position_embeddings": CONTEXT}
        made.append(make_model(directory / name, "llama", vocab_size=VOCABULARY, eos_token_id=1, **sizes))
        for file, content in tiny_files().items():
            (made[-1] / file).write_bytes(content)
    return made[0], made[1]


async def computed_alone(house: Rings, group: str, name: str, prompt: list[int], length: int) -> list[int]:
    """What `group` says where it has nothing of the prompt."""
    request = GenerationRequest(name, "r", MODEL, "me", prompt, length, GREEDY, sparse=PAGES, cache_salt=name)
    tokens, cached = await house.answer(group, request)
    assert cached == 0
    return tokens


@pytest.mark.parametrize(("tp", "kv_dtype"), in_lanes([(1, "int8"), (2, "bf16")], (), [(1, "int8")]))
async def test_a_sparse_text_is_the_same_after_a_hand_over_and_after_a_spill(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, tp: int, kv_dtype: str
) -> None:
    model, draft = make_models(tmp_path)
    options = ("--dtype", "bf16", "--kv-dtype", kv_dtype, "--tp", str(tp), "--sparse-attention")
    options += ("--draft-model", str(draft), "--kv-host-memory", str(16 << 20))
    async with rings(bus, nats_settings, tmp_path) as house:
        for group in ("a", "b"):
            await house.begin(group, model, *options)
        await house.ready("a", "b")
        talk = Session(house, "talk", sparse=PAGES)
        assert await talk.turn("a", 150, 40) == 0
        reusable = talk.reusable
        assert await talk.turn("a", 60, 40) == reusable
        await house.leave("a")

        reusable, before = talk.reusable, len(talk.tokens) + 60
        assert await talk.turn("b", 60, 40) == reusable, "all that the ring had which left"
        prompt, answer = talk.tokens[:before], talk.tokens[before:]
        assert await computed_alone(house, "b", "again", prompt, 40) == answer

        # More than there is room for: the session's blocks, used longest ago, are spilled.
        load = (await house.processes["b"].wait_ready()).group
        assert load is not None
        assert load.load.total_blocks < OTHERS * (OTHERS_PROMPT // BLOCK)
        for number in range(OTHERS):
            other = request_of("other", number, OTHERS_PROMPT, max_tokens=2, session=f"other-{number}")
            await house.answer("b", other)
        heir = GenerationRequest(
            "heir", "r", MODEL, "me", prompt, 40, GREEDY, generated=answer[:20], attempt=1, sparse=PAGES
        )
        tokens, cached = await house.answer("b", heir)
        assert tokens == answer[20:]
        assert cached >= reusable, "restored, and not computed from the beginning"
