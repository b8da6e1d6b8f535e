"""States of fine-tuning jobs: whatever their tenants, hosts and gateways do, in any order."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.core.errors import RouteError
from services.gateway.training import states
from services.gateway.training.objects import checkpoint_name, job_object, model_name, published_checkpoints
from shared.messages.training import (
    TRAINING_OVER,
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingError,
    TrainingJob,
    TrainingMetrics,
)
from shared.registry import wrong_name

NEW = TrainingJob("ftjob-0123456789abcdef", "acme", 1.0, "org/base", "supervised", "file-1", "file-1", 7)
DATA = TokenizedData("d", 10, 100, 50, 20)
CHOSEN = Hyperparameters(epochs=2, batch_size=4)
MADE = TrainedAdapter(3, "d" * 64, 8, 400, 5, TrainingMetrics(3, 1.0))
_replace = msgspec.structs.replace


def host(job: TrainingJob, does: str) -> TrainingJob:
    """What a scheduler and a host may do (ADR 0031)."""
    if does == "taken" and job.status == "queued" and not job.host and job.wanted == "run":
        return _replace(job, host="h", attempt=job.attempt + 1)
    if does == "lost" and job.host and job.result is None:
        return _replace(job, host="")
    if not job.host or job.status in TRAINING_OVER or job.result is not None:
        return job
    if does == "running":
        return _replace(job, status="running")
    if does == "trained" and job.status == "running":
        return _replace(job, result=MADE)
    if does == "obeyed" and job.wanted != "run":
        return _replace(job, status="paused" if job.wanted == "pause" else "cancelled", host="")
    return job


STEPS = st.lists(
    st.sampled_from(
        ["queued", "failed", "cancel", "pause", "resume", "settled", "succeeded", "cleaned", "taken", "running",
         "lost", "trained", "obeyed"]
    ),
    max_size=30,
)  # fmt: skip


def gateway(job: TrainingJob, does: str) -> TrainingJob:
    if does == "queued":
        return states.queued(job, DATA, CHOSEN)
    if does == "failed":
        return states.failed(job, 9.0, TrainingError("invalid_training_file", "It is empty."))
    if does == "settled":
        return states.settled(job, 9.0)
    if does == "succeeded":
        return states.succeeded(job, 9.0, model_name(job), [])
    if does == "cleaned":
        return states.cleaned(job) if job.status in TRAINING_OVER else job
    ask = {"cancel": lambda one: states.cancelled(one, 9.0), "pause": states.paused, "resume": states.resumed}
    try:
        return ask[does](job) if does in ask else host(job, does)
    except RouteError:
        return job


@given(STEPS)
def test_what_is_over_stays_so_and_what_is_wanted_comes(steps: list[str]) -> None:
    job = NEW
    for step in steps:
        before, job = job, gateway(job, step)
        if before.status in TRAINING_OVER:
            assert (job.status, job.finished_at) == (before.status, before.finished_at)
        assert (job.status == "succeeded") == bool(job.fine_tuned_model)
        assert job.steps == (6 if job.data is not None else 0)
        assert not (job.status in ("cancelled", "failed") and job.result is not None)
    for _ in range(4):  # nobody hinders it any more
        job = gateway(gateway(gateway(job, "lost"), "settled"), "queued")
        job = gateway(job, "succeeded")
    if job.status not in TRAINING_OVER:
        wanted = {"run": "queued", "pause": "paused"}[job.wanted]
        assert job.status == wanted or (job.status == "running" and job.wanted == "run")
    assert states.needs_publication(job) == (job.status in TRAINING_OVER and not job.clean)
    assert not states.needs_preparation(job)
    assert job_object(job)["status"] == job.status


@pytest.mark.parametrize(
    ("tenant", "base", "name"),
    [
        ("acme", "org/base", "ft:org/base:acme:s:0123456789ab"),
        ("", "base", "ft:base::s:0123456789ab"),
        ("a:b", "org/base:Q4", "ft:org/base%3AQ4:a%3Ab:s:0123456789ab"),
    ],
)
def test_a_models_name_is_of_four_parts(tenant: str, base: str, name: str) -> None:
    assert model_name(_replace(NEW, tenant=tenant, model=base, suffix="s")) == name


@example("t" * 256, "b" * 200, "s" * 64)
@given(st.text(max_size=256), st.text(min_size=1, max_size=200), st.from_regex(r"[A-Za-z0-9._-]{0,64}", fullmatch=True))
def test_whatever_a_tenant_and_a_base_are_called_the_name_is_one(tenant: str, base: str, suffix: str) -> None:
    job = _replace(NEW, tenant=tenant, model=base, suffix=suffix)
    name = checkpoint_name(job, _replace(MADE, step=123_456))
    assert wrong_name(name) == ""
    assert name.count(":") == 5


def test_the_result_is_a_checkpoint_too() -> None:
    job = _replace(NEW, adapters=[_replace(MADE, step=1, name="a"), _replace(MADE, step=2)], result=MADE)
    assert [one.step for one in published_checkpoints(job)] == [1]
    done = states.succeeded(states.named(job, job.adapters[1], "b"), 9.0, "ft", [])
    assert [(one.step, one.name) for one in published_checkpoints(done)] == [(3, "ft"), (2, "b"), (1, "a")]
