"""Vectors of prompts: whatever the chunks, the batch around them and what was preempted, the same sums."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from services.executor.core.prompt_results import Floats, Vector
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.model.pooling import read_vectors
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, ask

SIZE = 4


def state(token: int, position: int) -> Floats:
    """Small whole numbers: their sums are exact in any order."""
    return np.array([token + 1, position, token * position % 7, 1], np.float32)


def summed(plan: StepPlan) -> Floats:
    tokens, positions = as_int32(plan.token_ids).tolist(), as_int32(plan.positions).tolist()
    pools = as_int32(plan.pools).reshape(-1, 2).tolist()
    sums = [sum((state(*at) for at in zip(tokens[a:b], positions[a:b], strict=True)), np.zeros(SIZE)) for a, b in pools]
    return np.array(sums, np.float32).reshape(-1, SIZE)


def expected(pooling: str, prompt: list[int]) -> list[float]:
    states = np.array([state(token, at) for at, token in enumerate(prompt)], np.float64)
    vector = {"mean": states.mean(axis=0), "last": states[-1], "cls": states[0]}[pooling]
    found: list[float] = (vector / np.linalg.norm(vector)).astype("<f4").tolist()
    return found


def shown(entry: TokenEntry) -> list[float]:
    assert (entry.tokens, entry.finish) == ([], "stop"), entry
    found: list[float] = np.frombuffer(entry.vector, "<f4").tolist()
    return found


def run(ring: Ring, steps: int = 10_000) -> None:
    while ring.batcher.has_work and steps:
        steps -= 1
        scheduled = ring.schedule()
        sampled = ring.engine.execute(scheduled[0], [row.sampling for row in scheduled[1]])
        ring.take(ring.batcher.update(sampled, pooled=summed(scheduled[0])))
        ring.batcher.check()


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("blocks", [64, 11])
def test_a_vector_is_that_of_the_whole_prompt(pooling: str, blocks: int) -> None:
    """Chunks of a few tokens, beside requests with output; with few blocks these take others' places."""
    dice = random.Random(blocks)
    ring = Ring(blocks=blocks, tokens=7, sequences=5, pooling=pooling, embedding_size=SIZE)  # type: ignore[arg-type]
    beginning = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = {f"e{at}": beginning + [dice.randrange(40) for _ in range(3 * at)] for at in range(8)}
    texts = {f"t{at}": ask(f"t{at}", [*beginning, at], max_tokens=9) for at in range(4)}
    ring.add(*(ask(name, prompt, 1, embed=True, lane="batch") for name, prompt in prompts.items()))
    for request in texts.values():
        run(ring, 3)
        ring.add(request)
    run(ring)
    for name, prompt in prompts.items():
        assert shown(ring.last(name)) == expected(pooling, prompt)
    for name, request in texts.items():
        assert ring.tokens(name) == undisturbed(request, 9)
    assert (ring.batcher.preemptions > 0) == (blocks == 11 and pooling != "cls")  # which ends at its first token


def test_only_the_last_token_needs_no_others() -> None:
    """A prompt that is known is not computed again for `last`; for `mean` it is."""
    for pooling, cached in (("last", 8), ("mean", 0)):
        ring = Ring(pooling=pooling, embedding_size=SIZE)  # type: ignore[arg-type]
        for name in ("a", "b"):
            ring.add(ask(name, list(range(9)), max_tokens=1, embed=True))
            run(ring)
            assert shown(ring.last(name)) == expected(pooling, list(range(9)))
        assert ring.last("b").cached_tokens == cached


def test_a_prompt_may_fill_the_context() -> None:
    ring = Ring(context=12, pooling="mean", embedding_size=SIZE)  # type: ignore[arg-type]
    ring.add(ask("fits", 12, max_tokens=1, embed=True))
    assert ring.batcher.add(ask("longer", 13, max_tokens=1, embed=True)) is not None
    run(ring)
    assert len(shown(ring.last("fits"))) == SIZE


def test_a_model_without_pooling_refuses() -> None:
    refusal = Ring().batcher.add(ask("a", 3, max_tokens=1, embed=True))
    assert (refusal.code, refusal.retryable) == ("invalid_request", False)


def test_states_that_are_no_numbers_are_an_error() -> None:
    ring = Ring(pooling="mean", embedding_size=SIZE)  # type: ignore[arg-type]
    ring.add(ask("a", 3, max_tokens=1, embed=True))
    scheduled = ring.schedule()
    sums = np.full((1, SIZE), np.nan, np.float32)
    (entry,) = ring.take(ring.batcher.update([], pooled=sums))
    assert (entry.finish, entry.error_code) == ("error", "internal_error")
    assert not scheduled[1]


def test_a_vector_has_the_length_1() -> None:
    vector = Vector("mean", 2)
    assert vector.rows(0, 2) == (0, 2)
    vector.add(np.array([3, 4], np.float32), 2)
    assert vector.whole
    assert np.frombuffer(vector.bytes(), "<f4").tolist() == pytest.approx([0.6, 0.8])
    nothing = Vector("mean", 1)
    nothing.add(np.zeros(2, np.float32), 1)
    assert np.frombuffer(nothing.bytes(), "<f4").tolist() == [0.0, 0.0]


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"path": path, "type": f"sentence_transformers.models.{kind}"}


POOLING = module("Pooling", "1_Pooling")


@pytest.mark.parametrize(
    ("modules", "config", "pooling"),
    [
        (None, None, "last"),
        ([module("Transformer")], None, "last"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}, "mean"),
        ([POOLING, module("Normalize")], {"pooling_mode_lasttoken": True}, "last"),
        ([POOLING], {"pooling_mode": "cls"}, "cls"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ""),
        ([POOLING], {"pooling_mode_max_tokens": True}, ""),
        ([POOLING, module("Dense", "2_Dense")], {"pooling_mode_mean_tokens": True}, ""),
        ([POOLING], None, ""),
        ({"not": "a list"}, None, ""),
    ],
)
def test_pooling_is_read_from_the_models_files(tmp_path: Path, modules: object, config: object, pooling: str) -> None:
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_vectors(tmp_path).pooling == pooling


def test_a_request_to_embed_is_one_of_all() -> None:
    request = GenerationRequest("g", "r", "m", "c", [1], 1, embed=True)
    assert ask("g", [1], 1, embed=True).embed == request.embed
