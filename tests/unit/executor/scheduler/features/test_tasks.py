"""What is asked of a prompt in place of a text: its classes, the log probabilities of given tokens behind it; and
models that read prompts whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import as_int32
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.features import prompt_results
from services.executor.worker.stub import StubEngine, StubSettings, stub_logit, stub_named_logprob
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.scheduler.stepped_ring import Ring, ask


class StubbedRing:
    """A batcher over the stub engine."""

    def __init__(self, tokens: int = 8) -> None:
        self._engine = StubEngine(StubSettings(block_size=4), lambda seconds: None)
        self.spec = self._engine.load(lambda done, total: None)
        self.batcher = Scheduler(self.spec, BatchSettings(tokens, 8))
        self.last: dict[str, TokenEntry] = {}

    def run(self, *requests: GenerationRequest) -> list[int]:
        """To the end. Returns how many rows each step has scored."""
        rows_scored = []
        for request in requests:
            assert self.batcher.add(request) is None
        while self.batcher.has_work:
            scheduled = self.batcher.schedule()
            plan, rows = scheduled
            rows_scored.append(len(plan.score_rows) // 4)
            sampled = self._engine.execute(plan, [row.sampling for row in rows])
            pooled = self._engine.pooled() if plan.pools else None
            scores = self._engine.scored() if plan.score_rows else None
            for entries in self.batcher.update(sampled, pooled=pooled, scores=scores).values():
                self.last.update({entry.generation_id: entry for entry in entries})
            self.batcher.check()
        return rows_scored

    def numbers(self, name: str) -> list[float]:
        entry = self.last[name]
        assert (entry.tokens, entry.finish) == ([], "stop"), entry
        found: list[float] = np.frombuffer(entry.vector, "<f4").tolist()
        return found


def test_all_tasks_share_steps() -> None:
    """In chunks of a few tokens, and the repeats find what is cached."""
    ring = StubbedRing()
    prompts = {f"p{at}": list(range(32, 32 + 5 * at + 1)) for at in range(5)}
    for again in range(2):
        asked = [ask(f"text{again}", 9)]
        for name, prompt in prompts.items():
            asked.append(ask(f"{name}-c{again}", prompt, 1, classify=True))
            asked.append(ask(f"{name}-n{again}", prompt, 1, logprob_token_ids=[121, 110, 121]))
            asked.append(ask(f"{name}-s{again}", prompt, 0, prompt_logprobs=1))
        ring.run(*asked)
        for name, prompt in prompts.items():
            assert ring.numbers(f"{name}-c{again}") == [pytest.approx(stub_logit(prompt), abs=1e-6)]
            named = [stub_named_logprob(len(prompt) - 1, token) for token in (121, 110, 121)]
            assert ring.numbers(f"{name}-n{again}") == pytest.approx(named, abs=1e-6)
        scored = np.frombuffer(ring.last[f"p4-s{again}"].prompt_scores, "<f4").reshape(20, 4)
        assert scored[:, 0].tolist() == [0.0] * 20
        assert ring.last[f"text{again}"].finish == "length"
    assert ring.last["p4-n1"].cached_tokens == 20
    assert ring.last["p4-c1"].cached_tokens == 0  # its rows would be missing


def test_the_logits_of_named_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has room for those of seven tokens, and a prompt that names more has a step of its own for them."""
    monkeypatch.setattr(prompt_results, "SCORED_LOGITS_BYTES", 4 * 256 * 7)
    ring = StubbedRing(tokens=64)
    names = {f"n{at}": [97 + at] * (1 + 4 * (at % 3)) for at in range(8)}
    wanted = {name: [110, 121, 122][: 1 + at % 3] for at, name in enumerate(names)} | {"n7": [97] * 9}
    requests = [ask(name, prompt, 1, logprob_token_ids=wanted[name]) for name, prompt in names.items()]
    rows = ring.run(*requests)
    assert max(rows) == 9
    assert sum(rows) == sum(map(len, wanted.values()))
    assert all(count <= 7 or count == 9 for count in rows)
    for name, prompt in names.items():
        named = [stub_named_logprob(len(prompt) - 1, token) for token in wanted[name]]
        assert ring.numbers(name) == pytest.approx(named, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classify": True}, "no classification head"),
        ({"embed": True, "logprob_token_ids": [1]}, "embed, classify and logprob_token_ids exclude each other"),
        ({"logprob_token_ids": [99]}, "logprob_token_ids has a token outside"),
        ({"logprob_token_ids": [1] * 65}, "logprob_token_ids has 65 entries"),
        ({"embed": True, "prompt_logprobs": 0}, "prompt_logprobs cannot be combined with"),
        ({"second_segment": 6}, "second_segment is 6"),
        ({"second_segment": -1}, "second_segment is -1"),
    ],
)
def test_what_a_language_model_refuses(fields: dict[str, object], message: str) -> None:
    ring = Ring(pooling="last", embedding_size=4)  # type: ignore[arg-type]
    refusal = ring.batcher.add(ask("a", 5, 1, **fields))
    assert (refusal.code, refusal.retryable) == ("invalid_request", False)
    assert message in refusal.message


def test_an_encoder_generates_nothing() -> None:
    spec = EngineSpec(4, 64, 200, 50, labels=["a", "b"], generates=False, whole_prompts=True)
    batcher = Scheduler(spec, BatchSettings())
    for request in (ask("t", 5), ask("n", 5, 1, logprob_token_ids=[1]), ask("e", 5, 1, embed=True)):
        refusal = batcher.add(request)
        assert ("makes no vectors" if request.embed else "it does classify") in refusal.message


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    blocks=st.integers(18, 60),
    batch=st.sets(st.integers(0, 11)),
)
def test_prompts_are_never_cut(lengths: list[int], blocks: int, batch: set[int]) -> None:
    """Each is computed whole in one step, and beside others only within the token budget."""
    spec = EngineSpec(4, blocks, 200, 50, pooling="mean", embedding_size=1, generates=False, whole_prompts=True)
    batcher = Scheduler(spec, BatchSettings(16, 4))
    segments = {}
    for at, length in enumerate(lengths):
        segments[f"{at}"] = at % (length + 1)
        lane = "batch" if at in batch else "interactive"
        request = ask(f"{at}", [at] * length, 1, embed=True, lane=lane, second_segment=at % (length + 1))
        assert batcher.add(request) is None
    told: dict[str, float] = {}
    while batcher.has_work:
        scheduled = batcher.schedule()
        plan = scheduled[0]
        query = as_int32(plan.query_lens)
        assert query.tolist() == as_int32(plan.context_lens).tolist()
        assert query.sum() <= 16 or len(query) == 1
        names = [s.request.generation_id for s in batcher.sequences_under_way()]
        begins = as_int32(plan.second_segments).tolist() or [0] * len(query)
        assert begins == [segments[name] for name in names]
        pools = as_int32(plan.pools).reshape(-1, 2)
        assert (pools[:, 1] - pools[:, 0]).tolist() == query.tolist()
        tokens = as_int32(plan.token_ids)[pools[:, 0]]
        entries = batcher.update([], pooled=tokens.astype(np.float32)[:, None] + 1)
        batcher.check()
        for entry in (entry for told_now in entries.values() for entry in told_now):
            assert entry.generation_id not in told
            told[entry.generation_id] = float(np.frombuffer(entry.vector, "<f4")[0])
    assert told == {f"{at}": 1.0 for at in range(len(lengths))}
