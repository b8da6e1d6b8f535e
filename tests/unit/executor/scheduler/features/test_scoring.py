"""Log probabilities of prompts: whatever the chunks, the batch around them and what was preempted, each row once."""

import random
import struct

import numpy as np
import pytest

from services.executor.core.prompt_results import LEAST, PromptScores, PromptTokenScores
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.leader.frames import FRAME_BYTES, KEPT_BYTES, Gathering, RecentFrames, in_frames
from services.executor.scheduler.features import prompt_results
from shared import limits
from shared.messages import TokenEntry
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, ask

TOP = 2


def row_of(token: int, position: int, target: int) -> tuple[float, int, list[tuple[int, float]]]:
    """What the pretended model says of a row: a function of its token, its place and what is asked for."""
    return -float(token + position), target + 1, [(target + at, -float(at)) for at in range(TOP)]


def scores_of(plan: StepPlan) -> PromptTokenScores:
    tokens, positions = as_int32(plan.token_ids).tolist(), as_int32(plan.positions).tolist()
    rows, targets = as_int32(plan.score_rows).tolist(), as_int32(plan.score_targets).tolist()
    found = [row_of(tokens[row], positions[row], target) for row, target in zip(rows, targets, strict=True)]
    top = [one[2][: plan.score_top] for one in found]
    shape = (len(rows), plan.score_top)
    return PromptTokenScores(
        np.array([one[0] for one in found], np.float32),
        np.array([one[1] for one in found], np.int32),
        np.array([[token for token, _ in one] for one in top], np.int32).reshape(shape),
        np.array([[logprob for _, logprob in one] for one in top], np.float32).reshape(shape),
    )


def run(ring: Ring, steps: int = 10_000) -> None:
    while ring.batcher.has_work and steps:
        steps -= 1
        if (step := ring.next_step()) is None:
            ring.take(ring.batcher.take_entries())
            continue
        sampled = ring.execute(step)
        scores = scores_of(step[0]) if step[0].score_rows else None
        ring.take(ring.batcher.update(sampled, scores=scores))
        ring.batcher.check()


def told(data: bytes, top: int) -> list[tuple[float, int, list[tuple[int, float]]]]:
    rows = struct.iter_unpack("<fi" + top * "if", data)
    return [(row[0], row[1], list(zip(row[2::2], row[3::2], strict=True))) for row in rows]


def expected(prompt: list[int], top: int) -> list[tuple[float, int, list[tuple[int, float]]]]:
    rows = [row_of(prompt[at], at, prompt[at + 1]) for at in range(len(prompt) - 1)]
    return [(logprob, rank, pairs[:top]) for logprob, rank, pairs in rows]


def entries_of(ring: Ring, name: str) -> list[TokenEntry]:
    return [entry for entry in ring.log if entry.generation_id == name]


@pytest.mark.parametrize("blocks", [64, 11])
@pytest.mark.parametrize("drafts", [0, 3])
def test_each_row_is_scored_once(blocks: int, drafts: int) -> None:
    """Chunks of a few tokens, beside other requests; with few blocks these take others' places."""
    dice = random.Random(blocks)
    ring = Ring(blocks=blocks, tokens=7, sequences=5, drafts=drafts)
    beginning = [3, 1, 4, 1, 5, 9, 2, 6]
    wanted = {
        f"s{at}": ask(
            f"s{at}",
            beginning + [dice.randrange(40) for _ in range(3 * at)],
            max_tokens=at % 3 * 4,
            prompt_logprobs=at % 3,
            lane="batch",
        )
        for at in range(8)
    }
    texts = {f"t{at}": ask(f"t{at}", [*beginning, at], max_tokens=9) for at in range(4)}
    ring.add(*wanted.values())
    for request in texts.values():
        run(ring, 3)
        ring.add(request)
    run(ring)
    for name, request in wanted.items():
        first = next(entry for entry in entries_of(ring, name) if entry.tokens or entry.finish)
        assert told(first.prompt_scores, request.prompt_logprobs) == expected(request.prompt, request.prompt_logprobs)
        assert [bool(entry.prompt_scores) for entry in entries_of(ring, name)].count(True) == 1
        assert ring.tokens(name) == undisturbed(request, request.max_tokens)
        assert ring.last(name).finish == "length"
    for name, request in texts.items():
        assert ring.tokens(name) == undisturbed(request, 9)
    assert ring.batcher.preemptions > (blocks == 11)


def test_a_known_prompt_is_computed_again() -> None:
    """Rows that are not computed could not be scored; and what was computed so is found by nobody else."""
    ring = Ring()
    prompt = list(range(9))
    for name in ("a", "b"):
        ring.add(ask(name, prompt, prompt_logprobs=0))
        run(ring)
        assert told(entries_of(ring, name)[0].prompt_scores, 0) == expected(prompt, 0)
    assert ring.batcher.cached_tokens == 0


def test_a_later_attempt_does_not_score_again() -> None:
    ring = Ring()
    request = ask("a", 9, prompt_logprobs=1, generated=[4, 2], attempt=1)
    ring.add(request)
    run(ring)
    assert all(not entry.prompt_scores for entry in entries_of(ring, "a"))
    assert not any(plan.score_rows for plan, _ in ring.plans)


@pytest.mark.parametrize(("prompt", "wanted"), [(1, 3), (5, -1)])
def test_nothing_to_tell_ends_at_once(prompt: int, wanted: int) -> None:
    """One token follows nothing; and who asks for neither output nor log probabilities gets neither."""
    ring = Ring()
    ring.add(ask("a", prompt, max_tokens=0, prompt_logprobs=wanted))
    run(ring)
    (entry,) = entries_of(ring, "a")
    assert (entry.tokens, entry.finish, entry.prompt_scores) == ([], "length", b"")
    assert not ring.plans


def test_a_prompt_without_output_may_fill_the_context() -> None:
    ring = Ring(context=12)
    ring.add(ask("fits", 12, max_tokens=0, prompt_logprobs=0))
    assert ring.batcher.add(ask("longer", 13, max_tokens=0, prompt_logprobs=0)) is not None
    run(ring)
    assert len(told(ring.last("fits").prompt_scores, 0)) == 11


def test_a_step_scores_no_more_rows_than_their_logits_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several requests share the room; what is not scored is computed in longer chunks."""
    monkeypatch.setattr(prompt_results, "SCORED_LOGITS_BYTES", 4 * VOCAB * 6)
    ring = Ring(tokens=64)
    ring.add(ask("a", 20, prompt_logprobs=0), ask("b", 8, prompt_logprobs=0), ask("c", 30))
    run(ring)
    assert max(len(as_int32(plan.score_rows)) for plan, _ in ring.plans) == 6
    assert ring.engine.largest == 36
    assert ring.last("a").finish == ring.last("b").finish == ring.last("c").finish == "length"


def test_a_step_that_failed_is_scored_again() -> None:
    ring = Ring(tokens=8)
    prompt = list(range(12))
    ring.add(ask("bad", 3), ask("a", prompt, prompt_logprobs=2))
    step = ring.schedule()
    assert step[0].score_rows
    ring.fail(step, {0})
    run(ring)
    assert told(entries_of(ring, "a")[0].prompt_scores, 2) == expected(prompt, 2)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_logits_that_are_no_numbers_are_an_error(max_tokens: int) -> None:
    ring = Ring()
    ring.add(ask("a", 5, max_tokens=max_tokens, prompt_logprobs=0), ask("b", 6))
    step = ring.schedule()
    found = scores_of(step[0])
    found.logprobs[2] = np.nan
    ring.take(ring.batcher.update(ring.execute(step), scores=found))
    assert (ring.last("a").finish, ring.last("a").error_code) == ("error", "internal_error")
    run(ring)
    assert ring.last("b").finish == "length"


def test_a_token_that_cannot_come_has_a_number() -> None:
    """JSON has no minus infinity."""
    scores = PromptScores(1, 2)
    worst = np.array([-np.inf], np.float32)
    scores.add(PromptTokenScores(worst, np.array([9], np.int32), np.array([[4]], np.int32), worst[None]), 1)
    assert scores.whole
    assert told(scores.take(), 1) == [(LEAST, 9, [(4, LEAST)])]
    assert scores.take() == b""


@pytest.mark.parametrize("changes", [{"max_tokens": -1}, {"prompt_logprobs": -2}, {"prompt_logprobs": 51}])
def test_what_cannot_be_is_refused(changes: dict[str, int]) -> None:
    refusal = Ring().batcher.add(ask("a", 3, **{"max_tokens": 4, **changes}))
    assert (refusal.code, refusal.retryable) == ("invalid_request", False)
    assert next(iter(changes)) in refusal.message


def test_one_prompt_has_so_many_log_probabilities_and_no_more() -> None:
    most = limits.PROMPT_LOGPROBS.value // 41
    ring = Ring(blocks=1000, context=4000)
    assert ring.batcher.add(ask("fits", most, prompt_logprobs=40)) is None
    refusal = ring.batcher.add(ask("more", most + 1, prompt_logprobs=40))
    assert (refusal.code, refusal.retryable) == ("invalid_request", False)
    assert "limit prompt_logprobs: 65,536" in refusal.message


def test_entries_with_scores_are_gathered_whole() -> None:
    """What tells that a ring has the request comes before, and further tokens behind."""
    scored = TokenEntry("a", 0, 0, [7], prompt_scores=b"12345678")
    gathering = Gathering()
    gathering.add({"gateway": [TokenEntry("a", 0, 0, [])]})
    gathering.add({"gateway": [scored]})
    gathering.add({"gateway": [TokenEntry("a", 0, 1, [8], "length")]})
    first, second = gathering.take(0.0)["gateway"]
    assert (first.tokens, first.prompt_scores) == ([], b"")
    assert (second.tokens, second.finish, second.prompt_scores) == ([7, 8], "length", b"12345678")


def test_frames_hold_so_much_and_no_more() -> None:
    large = [TokenEntry(str(at), 0, 0, [1], prompt_scores=bytes(FRAME_BYTES // 2)) for at in range(5)]
    frames = list(in_frames([TokenEntry("x", 0, 3, [1]), *large]))
    assert [[entry.generation_id for entry in frame] for frame in frames] == [["x", "0", "1"], ["2", "3"], ["4"]]
    huge = TokenEntry("h", 0, 0, [1], prompt_scores=bytes(3 * FRAME_BYTES))
    assert [len(frame) for frame in in_frames([huge, large[0]])] == [1, 1]


def test_recent_frames_hold_so_much_and_no_more() -> None:
    recent = RecentFrames()
    size = KEPT_BYTES // 4
    for at in range(9):
        recent.add("gateway", bytes([at]) * size, float(at), connected=False)
    assert [frame[0] for _, frame in recent] == [5, 6, 7, 8]
