"""What becomes of a job's record on a host: one state follows from another, and nothing is lost on the way."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.supervisor.trainings.job_changes import (
    KEPT_ADAPTERS,
    LONGEST_PAUSE,
    MAX_REASON,
    MOST_CRASHES,
    End,
    adapter_written,
    begun,
    crashed,
    ended,
    finished,
    is_mine,
    state_written,
    stepped,
)
from services.executor.supervisor.trainings.memory import FACTOR_BYTES, MICRO_BATCH, PROCESS, training_bytes
from shared.messages.training import (
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingJob,
    TrainingMetrics,
    TrainingState,
)

NOW = 1_700_000_000.0
JOB = TrainingJob(
    "job",
    "t",
    NOW,
    "m",
    "supervised",
    "f",
    "f",
    1,
    Hyperparameters(epochs=2, batch_size=3),
    status="queued",
    host="h",
    attempt=2,
    data=TokenizedData("o", 10, 100, 90, 20),
)
MESSAGE = "A sentence."


def adapter(step: int, name: str = "") -> TrainedAdapter:
    return TrainedAdapter(step, f"{step:064x}", 4, 10, 1, TrainingMetrics(step), name)


def test_a_job_is_a_hosts_in_one_attempt_and_until_it_is_done() -> None:
    assert is_mine(JOB, "h", 2)
    assert not is_mine(None, "h", 2)
    parted = msgspec.structs.replace(JOB, helpers=["i"])
    assert is_mine(parted, "i", 2), "a part of it"
    assert not is_mine(msgspec.structs.replace(parted, host=""), "i", 2)
    for host, attempt in (("i", 2), ("h", 1), ("h", 3)):
        assert not is_mine(JOB, host, attempt)
    assert not is_mine(finished(JOB, adapter(8), "csv", 90), "h", 2)
    assert not is_mine(msgspec.structs.replace(JOB, status="paused"), "h", 2)


def test_the_first_host_chooses_the_threads_and_says_when_it_began() -> None:
    first = begun(JOB, "h", JOB, 4, NOW)
    assert (first.status, first.steps, first.threads, first.started_at) == ("running", 8, 4, NOW)
    again = begun(first, "h", first, 16, NOW + 100)
    assert (again.threads, again.started_at) == (4, NOW)
    shown = stepped(again, TrainingMetrics(3), NOW + 0.4, "It is full.")
    assert (shown.metrics, shown.expected_at, shown.waiting_for) == (TrainingMetrics(3), NOW, "It is full.")


def test_an_executor_that_was_lost_is_counted_once_and_one_that_gave_it_back_is_not() -> None:
    first = state_written(begun(JOB, "h", JOB, 4, NOW), TrainingState(5, "o", 1, "d"))
    assert (first.runner, first.losses) == ("h", 0)
    again = begun(first, "i", first, 4, NOW)
    assert (again.runner, again.losses, again.resumed_from) == ("i", 1, 5)
    assert begun(again, "i", first, 4, NOW) == again, "written once more, for the broker's answer was lost"
    for end in (End("given_back", MESSAGE), End("crashed", MESSAGE)):
        left = ended(again, end, NOW)
        assert begun(left, "h", left, 4, NOW).losses == 1
    paused = ended(msgspec.structs.replace(again, wanted="pause"), End("given_back"), NOW)
    assert begun(paused, "h", paused, 4, NOW).losses == 1


def test_the_last_adapters_are_named_and_what_is_written_again_keeps_its_name() -> None:
    job, forgotten = JOB, []
    for step in range(1, KEPT_ADAPTERS + 3):
        job, gone = adapter_written(job, adapter(step))
        forgotten += gone
    assert [one.step for one in job.adapters] == [3, 4, 5]
    assert [one.step for one in forgotten] == [1, 2]
    named = msgspec.structs.replace(job, adapters=[*job.adapters[:-1], adapter(5, "ft:m")])
    assert adapter_written(named, adapter(5)) == (named, [])


def test_a_fault_that_comes_time_and_again_fails_the_job_and_a_new_state_forgives() -> None:
    job, pauses = JOB, []
    for number in range(1, MOST_CRASHES):
        job = crashed(msgspec.structs.replace(job, host="h"), MESSAGE, NOW)
        pauses.append(job.retry_at - NOW)
        assert (job.host, job.status, job.crashes) == ("", "queued", number)
        assert job.waiting_for.endswith(MESSAGE)
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE
    state = TrainingState(5, "o", 1, "d")
    assert state_written(job, state).crashes == 0
    old = msgspec.structs.replace(job, state=state)
    assert state_written(old, state).crashes == old.crashes, "it has got no further"
    failed = crashed(job, "x" * 5000, NOW)
    assert (failed.status, failed.host, failed.finished_at) == ("failed", "", NOW)
    assert len(failed.error.message) == MAX_REASON


ENDS = st.builds(
    End,
    st.sampled_from(["failed", "given_back", "crashed"]),
    st.just(MESSAGE),
    st.just("training_diverged"),
    st.floats(0, 100),
)


@given(end=ENDS, wanted=st.sampled_from(["run", "pause", "cancel"]), crashes=st.integers(0, MOST_CRASHES))
def test_no_host_has_a_job_that_has_ended_here_and_its_tenants_will_is_done(
    end: End, wanted: str, crashes: int
) -> None:
    kept = [adapter(1, "ft:m:ckpt")]
    state = TrainingState(5, "o", 1, "d")
    job = msgspec.structs.replace(JOB, wanted=wanted, status="running", crashes=crashes, adapters=kept, state=state)
    after = ended(job, end, NOW)
    assert (after.host, after.adapters, after.state, after.result) == ("", kept, state, None)
    assert (after.finished_at > 0) == (after.status in ("failed", "cancelled"))
    if wanted == "cancel":
        assert after.status == "cancelled"
    elif end.kind == "failed":
        assert after.status == "failed"
        assert (after.error.code, after.error.message) == ("training_diverged", MESSAGE)
    elif wanted == "pause":
        assert after.status == "paused"
    elif end.kind == "given_back":
        assert (after.status, after.waiting_for, after.crashes) == ("running", MESSAGE, crashes)
        assert after.retry_at == NOW + end.retry_after


@pytest.mark.parametrize("nested", [False, True])
def test_memory_grows_with_what_is_trained_and_never_counts_a_base_twice(nested: bool) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    facts = {"text_config": config} if nested else config
    small = training_bytes(facts, Hyperparameters(rank=8), 10, 0)
    assert small > PROCESS + 4 * MICRO_BATCH * 2 * 64
    assert training_bytes(facts, Hyperparameters(rank=8), 10, 1000) == small + 1000
    assert training_bytes(facts, Hyperparameters(rank=8), MICRO_BATCH, 0) == small, "short ones are packed"
    assert training_bytes(facts, Hyperparameters(rank=8), 2 * MICRO_BATCH, 0) > small
    shared = training_bytes(facts, Hyperparameters(rank=8), 10, 1000, ranks=2)
    assert shared == 2 * small + 1000, "processes share the base alone"
    wide = 4 * 2 * 64 + 3 * (64 + 128)
    more = training_bytes(facts, Hyperparameters(rank=16), 10, 0)
    assert more - small == 8 * wide * 2 * FACTOR_BYTES
    assert training_bytes({}, Hyperparameters(), 10, 0) > 5 * small, "what is unknown is taken for large"
