"""Drafts in the batch: what they may take, and that the text is the same with them."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import as_int32
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.scheduler.steps import prompt_tokens
from shared.errors import InternalError
from shared.messages import GenerationRequest, SamplingParams, TokenEntry
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask, lens


def right(**fields: Any) -> Ring:
    """A ring whose drafts are always right."""
    return Ring(**{"drafts": 5, "right": 1.0, "blocks": 64, "tokens": 64, **fields})


# --- the plan -------------------------------------------------------------------------------------


def plans_with_drafts(ring: Ring) -> Iterator[tuple[list[int], list[int], int]]:
    """(tokens of each sequence, sampled rows, prompt tokens) of every step."""
    while ring.batcher.has_work:
        plan, rows = ring.schedule()
        yield lens(plan), as_int32(plan.sample_rows).tolist(), prompt_tokens(plan, rows)
        ring.finish((plan, rows))


def test_sequences_with_drafts_come_after_the_single_tokens() -> None:
    ring = right()
    requests = [ask(name, 6, max_tokens=20) for name in ("a", "bb", "ccc")]
    ring.add(*requests)
    steps = list(plans_with_drafts(ring))
    assert steps[0] == ([6, 6, 6], [5, 11, 17], 18)
    mixed = [widths for widths, _, _ in steps[1:] if 1 in widths and max(widths) > 1]
    assert mixed
    for widths, rows, prompt in steps[1:]:
        assert widths == sorted(widths, key=lambda width: width > 1)
        assert rows == list(range(sum(widths)))
        assert prompt == 0
    assert len(steps) < 20
    for request in requests:
        assert ring.tokens(request.generation_id) == undisturbed(request, 20)


def test_a_prompt_beside_drafts_counts_as_prompt() -> None:
    ring = right(tokens=24)
    ring.add(ask("a", 4, max_tokens=40))
    ring.step()
    ring.add(ask("long", 60))
    counted = []
    for widths, _, prompt in plans_with_drafts(ring):
        counted.append(prompt)
        assert sum(widths) <= 24
    assert sum(counted) == 60


def test_accepted_drafts_come_in_one_entry() -> None:
    ring = right()
    ring.add(ask("a", 5, max_tokens=30))
    ring.run()
    assert max(len(entry.tokens) for entry in ring.log) > 3
    assert [entry.position for entry in ring.log] == np.cumsum(
        [0, *(len(entry.tokens) for entry in ring.log[:-1])]
    ).tolist()
    drafter = ring.batcher.drafter
    assert drafter.accepted == 30 - len(ring.plans)
    assert drafter.drafted == drafter.accepted


# --- ends -----------------------------------------------------------------------------------------


def test_a_stop_token_among_accepted_drafts_ends_the_text() -> None:
    text = undisturbed(ask("a", 5), 30)
    for stop in range(1, 12):
        first = text.index(text[stop])
        ring = right()
        ring.add(ask("a", 5, max_tokens=30, stop_token_ids=[text[stop]]))
        ring.run()
        assert ring.tokens("a") == text[: first + 1]
        assert ring.last("a").finish == "stop"


@pytest.mark.parametrize(
    ("most", "context", "length"), [(n, 200, n) for n in range(1, 12)] + [(99, n, n - 5) for n in range(8, 16)]
)
def test_the_most_tokens_and_the_context_end_the_text(most: int, context: int, length: int) -> None:
    ring = right(context=context)
    ring.add(ask("a", 5, max_tokens=most))
    ring.run()
    assert len(ring.tokens("a")) == length
    assert ring.last("a").finish == "length"


def test_a_text_larger_than_the_cache_fails_with_the_same_tokens() -> None:
    found = []
    for drafts in (0, 6):
        ring = right(blocks=4, drafts=drafts, context=100)
        ring.add(ask("a", 5, max_tokens=99))
        ring.run()
        found.append((ring.tokens("a"), ring.last("a").error_code))
    assert found[0] == found[1]
    assert found[0][1] == "context_length_exceeded"


def test_a_sequence_cancelled_with_drafts_under_way_says_no_more() -> None:
    ring = right()
    ring.add(ask("a", 5, max_tokens=50))
    ring.step()
    step = ring.schedule()
    assert lens(step[0]) != [1]
    ring.batcher.cancel(["a"])
    ring.finish(step)
    assert ring.tokens("a") == undisturbed(ask("a", 5), 1)
    assert ring.last("a").finish == "cancelled"
    assert ring.batcher.load().free_blocks == 64


# --- blocks ---------------------------------------------------------------------------------------


def test_drafts_never_preempt_and_take_only_free_blocks() -> None:
    """Three blocks for two sequences: whoever needs the third block gets it, and drafts do without."""
    for seed in range(10):
        with_drafts, without = (
            Ring(blocks=8, sequences=2, tokens=32, drafts=drafts, right=seed / 10) for drafts in (7, 0)
        )
        for ring in (with_drafts, without):
            ring.add(*(ask(name, 9, max_tokens=7) for name in "ab"))
            ring.run()
            assert ring.batcher.preemptions == 0
        assert with_drafts.tokens("a") == without.tokens("a")
        assert with_drafts.tokens("b") == without.tokens("b")


def test_blocks_of_rejected_drafts_are_free_after_the_step() -> None:
    ring = Ring(blocks=20, tokens=64, drafts=14, right=0.0)
    ring.add(ask("a", 7, max_tokens=40))
    wide = 0
    while ring.batcher.has_work:
        step = ring.schedule()
        wide = max(wide, *lens(step[0]))
        ring.finish(step)
        if ring.batcher.has_work:
            tokens = 7 + len(ring.tokens("a"))
            assert ring.batcher.load().free_blocks == 20 - -(-tokens // BLOCK)
    assert wide > 2 * BLOCK
    assert ring.tokens("a") == undisturbed(ask("a", 7), 40)


def test_what_was_accepted_is_found_by_the_next_turn() -> None:
    ring = right()
    ring.add(ask("a", 9, max_tokens=15))
    ring.run()
    said = ask("a", 9).prompt + ring.tokens("a")
    ring.add(ask("b", [*said, 1, 2]))
    ring.run()
    [cached] = [entry.cached_tokens for entry in ring.log if entry.cached_tokens]
    assert cached == (len(said) - 1) // BLOCK * BLOCK


# --- rows that are no numbers ---------------------------------------------------------------------


def test_a_bad_row_behind_a_draft_ends_drafts_and_not_the_text() -> None:
    ring = right()
    ring.add(ask("a", 5, max_tokens=20), ask("b", 5, max_tokens=20))
    ring.step()
    _, rows = ring.schedule()
    bad = [at for at, row in enumerate(rows) if row.ahead]
    assert bad
    hit = {rows[at].request.generation_id for at in bad}
    ring.take(ring.batcher.fail_step(InternalError("NaN"), bad))
    for sequence in ring.batcher._planner.running:
        assert sequence.speculates == (sequence.request.generation_id not in hit)
    ring.run()
    for name in "ab":
        assert ring.tokens(name) == undisturbed(ask(name, 5), 20)


def test_a_bad_row_without_a_draft_ends_its_sequence_once() -> None:
    ring = right()
    ring.add(ask("a", 5, max_tokens=20))
    ring.step()
    _, rows = ring.schedule()
    ring.take(ring.batcher.fail_step(InternalError("NaN"), range(len(rows))))
    assert ring.last("a").error_code == "internal_error"
    assert not ring.batcher.has_work


# --- the same text, whatever the sampling ---------------------------------------------------------


class LogitsEngine(FakeEngine):
    """Its logits depend on the last token, so that its text repeats itself; sampled for real."""

    def sample(self, content: list[int], state: SamplingState, adapter: str = "") -> SampledToken:
        digest = blake2b(repr(content[-1:]).encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "little"))
        logits = torch.from_numpy(2.5 * rng.standard_normal((1, VOCAB))).float()
        return Sampler().sample(logits, [state])[0]


def generate(requests: list[GenerationRequest], drafts: int) -> tuple[list[TokenEntry], Scheduler]:
    spec = EngineSpec(BLOCK, 200, 200, VOCAB)
    settings = BatchSettings(128, 8, max_drafts=drafts)
    batcher = Scheduler(spec, settings, "m", Drafter(spec, settings, PROPOSERS))
    engine, entries = LogitsEngine(spec), []
    for request in requests:
        assert batcher.add(request) is None
    while batcher.has_work:
        scheduled = batcher.schedule()
        plan, rows = scheduled
        # Every token costs next to nothing, so that what may be right is drafted.
        seconds = 1 + 0.001 * len(plan.token_ids)
        for batch in batcher.update(engine.execute(plan, [row.sampling for row in rows]), seconds).values():
            entries += batch
    return entries, batcher


def text_of(entries: list[TokenEntry], name: str) -> tuple[list[int], list[Any], str]:
    of_one = [entry for entry in entries if entry.generation_id == name]
    tokens = [token for entry in of_one for token in entry.tokens]
    logprobs = [score for entry in of_one for score in entry.logprobs or []]
    return tokens, logprobs, of_one[-1].finish


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 5, "logprobs": 0},
        {"temperature": 0.4, "presence_penalty": 0.5, "frequency_penalty": 0.05, "logit_bias": {3: 2.0, 9: -4.0}},
        {"temperature": 0.5, "repetition_penalty": 1.05, "logprobs": 2},
        *in_lanes(
            [
                {"temperature": 0.9, "top_p": 0.7},
                {"temperature": 0.9, "min_p": 0.2},
                {"temperature": 0.0, "frequency_penalty": 0.1},
                {"temperature": 0.0, "presence_penalty": -0.3, "frequency_penalty": -0.1, "top_k": 4},
            ],
            (),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stops", in_lanes([False, True], [True], []), ids=["no stop", "stop"])
def test_the_text_is_the_same(sampling: dict[str, Any], stops: bool) -> None:
    """Several choices of one prompt, as n > 1 gives them, one of them a continued attempt."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    names = [f"n{seed}" for seed in range(4)]
    requests = [
        ask(name, prompt, 80, sampling=SamplingParams(seed=seed, **sampling)) for seed, name in enumerate(names)
    ]
    plain, _ = generate(requests, 0)
    texts = [text_of(plain, name)[0] for name in names]
    if stops:
        # The token that comes up last in one of the texts: it cuts that text late, and others anywhere.
        stop = max(texts[0], key=texts[0].index)
        requests = [structs.replace(request, stop_token_ids=[stop]) for request in requests]
    requests[3] = structs.replace(requests[3], generated=texts[3][:5])
    plain, _ = generate(requests, 0)
    fast, batcher = generate(requests, 8)
    for name in names:
        assert text_of(fast, name) == text_of(plain, name)
    if not stops:
        assert len(fast) < len(plain)
    if sampling["temperature"]:  # else a stop ends the text before it repeats itself
        assert 0 < batcher.drafter.accepted < batcher.drafter.drafted
