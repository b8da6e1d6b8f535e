"""The stub engine: deterministic text at a set speed, behind the engine protocol."""

import multiprocessing
import signal
import struct
import time

import pytest

from services.executor.core.engine import DraftPlan, Engine, EngineSpec
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.worker.stub import FAULT_TOKEN, STUB_EOS_TOKEN, StubEngine, StubSettings, stub_token
from shared.errors import ConfigurationError, InternalError
from shared.messages import GenerationRequest, SamplingParams, TokenLogprobs


def test_text_is_letters_and_spaces_and_never_the_end_of_sequence() -> None:
    text = bytes(stub_token(seed, position) for seed in range(20) for position in range(200))
    assert set(text) == set(b"abcdefghijklmnopqrstuvwxyz ")
    assert STUB_EOS_TOKEN not in text


def test_the_text_of_a_seed_never_changes() -> None:
    assert bytes(stub_token(1, position) for position in range(24)) == PINNED


PINNED = b" oyjrul ldazawac lskmu f"


def test_a_stream_is_what_stub_token_says() -> None:
    slept: list[float] = []
    engine: Engine = StubEngine(StubSettings(step_ms=2.0, us_per_token=100.0), slept.append)
    progress: list[tuple[int, int]] = []
    spec = engine.load(lambda done, total: progress.append((done, total)))
    assert spec == EngineSpec(
        16,
        4096,
        8192,
        256,
        pooling="mean",
        embedding_size=32,
        exact=True,
        labels=["relevant"],
        activation="sigmoid",
        sparse=["pages", "window"],
    )
    assert progress == [(1, 1)]
    batcher = Scheduler(spec, BatchSettings())
    for seed in (5, 6):
        params = SamplingParams(seed=seed)
        batcher.add(GenerationRequest(str(seed), "r", "m", "c", [1] * 10, 20, params, [STUB_EOS_TOKEN]))
    text: dict[str, list[int]] = {"5": [], "6": []}
    while (step := batcher.schedule()) is not None:
        plan, sequences = step
        for entry in batcher.update(engine.execute(plan, [s.sampling for s in sequences]))["c"]:
            text[entry.generation_id] += entry.tokens
    assert text == {str(seed): [stub_token(seed, position) for position in range(20)] for seed in (5, 6)}
    assert slept == pytest.approx([0.002 + 20 * 1e-4] + [0.002 + 2 * 1e-4] * 19)
    engine.close()
    engine.close()


def test_it_is_sure_of_every_token_of_a_prompt() -> None:
    engine = StubEngine(StubSettings(), lambda _: None)
    batcher = Scheduler(engine.load(lambda *_: None), BatchSettings())
    batcher.add(GenerationRequest("a", "r", "m", "c", [7, 8, 9], 0, prompt_logprobs=1))
    step = batcher.schedule()
    assert engine.execute(step[0], []) == []
    (entry,) = batcher.update([], scores=engine.scored())["c"]
    assert (entry.tokens, entry.finish) == ([], "length")
    assert list(struct.iter_unpack("<fiif", entry.prompt_scores)) == [(0.0, 1, 8, 0.0), (0.0, 1, 9, 0.0)]


@pytest.mark.parametrize(("wanted", "top"), [(-1, None), (0, []), (3, [(stub_token(0, 0), 0.0)])])
def test_log_probabilities_where_asked_for(wanted: int, top: list[tuple[int, float]] | None) -> None:
    engine = StubEngine(StubSettings(), lambda _: None)
    batcher = Scheduler(engine.load(lambda *_: None), BatchSettings())
    batcher.add(GenerationRequest("a", "r", "m", "c", [1], 1, SamplingParams(logprobs=wanted)))
    step = batcher.schedule()
    [result] = engine.execute(step[0], [s.sampling for s in step[1]])
    assert result.logprobs == (None if top is None else TokenLogprobs(0.0, top))
    with pytest.raises(InternalError, match="1 rows for 0"):
        engine.execute(step[0], [])
    engine.close()
    with pytest.raises(InternalError, match="not loaded"):
        engine.execute(step[0], [])


@pytest.mark.parametrize("settings", [StubSettings(vocab_size=100), StubSettings(vocab_size=1100, first_token=1000)])
def test_a_vocabulary_that_is_too_small_is_named(settings: StubSettings) -> None:
    with pytest.raises(ConfigurationError, match="stub engine's"):
        StubEngine(settings)


def test_tokens_of_a_real_vocabulary_begin_behind_its_bytes() -> None:
    engine = StubEngine(StubSettings(vocab_size=2000, first_token=1000))
    batcher = Scheduler(engine.load(lambda done, total: None), BatchSettings())
    batcher.add(GenerationRequest("a", "r", "m", "c", [1500], 1, SamplingParams(seed=5)))
    step = batcher.schedule()
    drawn = engine.execute(step[0], [row.sampling for row in step[1]])
    assert [each.token for each in drawn] == [1000 + stub_token(5, 0)]


def test_launched_steps_take_their_time_one_after_the_other_while_the_thread_goes_on() -> None:
    now, waits = [100.0], []

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        now[0] += seconds

    engine = StubEngine(StubSettings(step_ms=4.0), sleep, lambda: now[0])
    batcher = Scheduler(engine.load(lambda done, total: None), BatchSettings())
    request = GenerationRequest("a", "r", "m", "c", [1, 2, 3], 9, SamplingParams(seed=5))
    batcher.add(request)
    first = batcher.schedule()
    second = batcher.schedule_ahead()
    assert first is not None
    assert second is not None
    launched = [engine.launch(plan, [row.sampling for row in rows]) for plan, rows in (first, second)]
    assert waits == []
    now[0] += 0.001  # the leader's own work
    tokens = [result.token for step in launched for result in step.result()]
    assert waits == [0.003, 0.004]
    assert tokens == [stub_token(5, 0), stub_token(5, 1)]


def faulty(fault: str) -> None:
    """Has an engine compute the token that makes it end badly."""
    engine = StubEngine(StubSettings(fault=fault))
    batcher = Scheduler(engine.load(lambda done, total: None), BatchSettings())
    batcher.add(GenerationRequest("a", "r", "m", "c", [9, FAULT_TOKEN], 1))
    step = batcher.schedule()
    engine.execute(step[0], [row.sampling for row in step[1]])


def test_an_error_in_a_step_is_one_of_the_engine() -> None:
    with pytest.raises(MemoryError):
        faulty("error")


@pytest.mark.parametrize(("fault", "code"), [("exit", 3), ("crash", -signal.SIGSEGV)])
def test_a_step_can_end_the_process(fault: str, code: int) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=faulty, args=(fault,))
    process.start()
    process.join(60)
    assert process.exitcode == code


def test_a_step_can_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise InterruptedError(f"it would sleep {seconds:g} s, again and again")

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(InterruptedError):
        faulty("hang")


def test_its_draft_model_is_right_as_often_as_set() -> None:
    slept: list[float] = []
    engine = StubEngine(StubSettings(draft_right=0.7, draft_ms=2.0), slept.append)
    spec = engine.load(lambda done, total: None)
    assert spec.drafts
    samples = [SamplingState(SamplingParams(seed=seed), [1], []) for seed in range(100)]
    drafted = engine.draft(DraftPlan(StepPlan(1, 0, *[b""] * 7), 8, b""), samples)
    assert slept == pytest.approx([0.016])
    right = [
        one.token == stub_token(seed, position) for seed, row in enumerate(drafted) for position, one in enumerate(row)
    ]
    assert len(right) == 800
    assert 0.65 < sum(right) / len(right) < 0.75
    assert engine.seconds(StepPlan(1, 0, *[b""] * 7, followed=True)) == pytest.approx(0.002)
    with pytest.raises(InternalError, match="no draft model"):
        StubEngine(StubSettings()).draft(DraftPlan(StepPlan(1, 0, *[b""] * 7), 1, b""), [])
