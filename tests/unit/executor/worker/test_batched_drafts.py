"""Real ranks, a batcher, and a draft model that is the model itself: it is always right. So whatever it has
not computed, or computed in a wrong place, is seen as a proposal that is not taken."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import as_int32
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.worker.engine import RingEngine
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in
from tests.unit.executor.scheduler.drafts.fake_drafter import DevotedPolicy, engine_of
from tests.unit.executor.worker.drafting_ring import ring_of
from tests.unit.executor.worker.test_draft_model import model_in

# What the draft model draws as the model does.
PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_p=0.9, seed=9),
]
EDITED = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.8, seed=9, frequency_penalty=0.4),
]
LENGTH = 50


def requests(turn: int) -> list[GenerationRequest]:
    """Prompts that begin alike, so that later ones find blocks of earlier ones."""
    prompt = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 21, 40, 3, 7, 7, 60, 61, 62, 63]
    return [
        GenerationRequest(
            name, "r", "m", "c", [*prompt[: 9 + 3 * at], 70 + turn], LENGTH - 7 * at, sampling, session=name
        )
        for at, sampling in enumerate(EDITED if turn == 2 else PLAIN)
        for name in [f"{turn}-{at}"]
    ]


Texts = dict[str, list[int]]
BEFORE = 30  # tokens of a text that another ring has said


def heirs(said: Texts) -> list[GenerationRequest]:
    """Of the first turn's, in the middle of their answers."""
    return [structs.replace(one, generated=said[one.generation_id][:BEFORE], attempt=1) for one in requests(0)]


class Said(NamedTuple):
    turns: list[Texts]
    devoted: DevotedPolicy
    preempted: int  # sequences
    restored: int  # blocks


def generate(
    engine: RingEngine,
    spec: EngineSpec,
    drafts: int,
    adapter: str = "",
    preempts: random.Random | None = None,
    *,
    knows: bool = True,
) -> Said:
    """What each turn gives; with the adapter in that directory all but the first text. `preempts`: by chance; and the
    first turn's come back at the end. `knows`: the draft model says what the model does."""
    settings = BatchSettings(64, 4, max_drafts=drafts, session_ttl=1000.0)
    drafter, policy = Drafter(spec, settings, PROPOSERS), DevotedPolicy(drafts)
    if drafter.engine is not None:
        engine_of(drafter).policy = policy
    batcher = Scheduler(spec, settings, "m", drafter)
    batcher.adapter_ready("a" * 64, adapter)
    turns: list[Texts] = []
    restored = 0
    for turn in range(4 if preempts else 3):
        asked = requests(turn) if turn < 3 else heirs(turns[0])
        turns.append({})
        right, wrong = policy.right, policy.wrong
        for at, request in enumerate(asked):
            adapted = "a" * 64 if at and adapter else ""
            assert batcher.add(structs.replace(request, adapter=adapted)) is None
        while batcher.has_work:
            running = batcher._planner.running
            if preempts and running and preempts.random() < 0.2:
                batcher._planner.preempt(preempts.choice(running))
            if (drafting := batcher.plan_drafts()) is not None:
                batcher.take_drafts(engine.draft(drafting[0], [row.sampling for row in drafting[1]]), 0.001)
            step = batcher.schedule()
            restored += len(as_int32(step[0].restores)) // 2
            sampled = engine.execute(step[0], [row.sampling for row in step[1]])
            for entry in batcher.update(sampled, 0.001)["c"]:
                turns[-1].setdefault(entry.generation_id, []).extend(entry.tokens)
            batcher.check()
        if turn != 2 and not adapter and knows:
            # Proposals beyond a block that is not full yet read that as it is written, and not as it will be kept. The
            # first proposal never does.
            some = (policy.right - right) // 8 if spec.num_quantized and drafts > 1 else 0
            assert policy.wrong - wrong <= some
    return Said(turns, policy, batcher._planner.preemptions, restored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "drafts", "tp"),
    in_lanes(
        [(kv_dtype, drafts, tp) for kv_dtype, drafts in (("bf16", 4), ("int8", 1), ("int8", 4)) for tp in (1, 2)],
        [],
        [("bf16", 4, 1), ("int8", 4, 1), ("int8", 1, 1)],
    ),
)
@natively
def test_every_proposal_is_right_and_every_text_the_same(tmp_path: Path, kv_dtype: str, drafts: int, tp: int) -> None:
    model = model_in(tmp_path / "model")
    twin = model_in(tmp_path / "twin")
    shape = {"dtype": "bf16", "kv_dtype": kv_dtype, "tp": tp}
    with ring_of(tmp_path / "plain", model, **shape) as ring:
        plain = generate(ring.engine, ring.spec, 0).turns
    with ring_of(tmp_path / "drafting", model, twin, **shape) as ring:
        drafted, devoted, *_ = generate(ring.engine, ring.spec, drafts)
    assert drafted == plain
    assert devoted.right > 100


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tp"), [("fp32", 1), pytest.param("bf16", 2, marks=[natively, pytest.mark.nightly])])
def test_texts_with_an_adapter_are_the_same_with_a_draft_model_that_has_none(
    tmp_path: Path, dtype: str, tp: int
) -> None:
    """The draft model is what the adapter is added to: where that changes the text it is wrong, and no more."""
    model = model_in(tmp_path / "model")
    twin = model_in(tmp_path / "twin")
    adapter = tmp_path / "adapter"
    save_adapter(base_of(model), adapter, targets_in(model), 8)
    with ring_of(tmp_path / "plain", model, dtype=dtype, tp=tp) as ring:
        without = generate(ring.engine, ring.spec, 0).turns
        plain = generate(ring.engine, ring.spec, 0, str(adapter)).turns
    with ring_of(tmp_path / "drafting", model, twin, dtype=dtype, tp=tp) as ring:
        drafted, devoted, *_ = generate(ring.engine, ring.spec, 4, str(adapter))
    for turn, texts in enumerate(plain):
        assert texts[f"{turn}-0"] == without[turn][f"{turn}-0"]
        assert texts[f"{turn}-1"] != without[turn][f"{turn}-1"], "an adapter that changes nothing proves nothing"
    assert drafted == plain
    assert devoted.right > 20
    assert devoted.wrong > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "kv_memory"), in_lanes([("bf16", 3 << 16), ("int8", 1_080_000)], [], [("int8", 1_080_000)])
)
@natively
def test_a_draft_models_blocks_are_spilled_and_restored_with_the_models(
    tmp_path: Path, kv_dtype: str, kv_memory: int
) -> None:
    """Two ranks with room for little more than one of three sequences, which lose their places by chance too."""
    model = model_in(tmp_path / "model")
    twin = model_in(tmp_path / "twin")
    shape = {"dtype": "bf16", "kv_dtype": kv_dtype, "tp": 2}
    with ring_of(tmp_path / "plain", model, **shape) as ring:
        plain = generate(ring.engine, ring.spec, 0).turns
    shape |= {"kv_memory": kv_memory, "kv_host_memory": 100_000, "kv_disk_memory": 1 << 20}
    with ring_of(tmp_path / "drafting", model, twin, **shape) as ring:
        drafted, devoted, preempted, restored = generate(ring.engine, ring.spec, 4, preempts=random.Random(3))
    assert drafted == [*plain, {name: text[BEFORE:] for name, text in plain[0].items()}]
    assert devoted.right > 100
    assert min(preempted, restored) > 5
