"""The states of a fine-tuning job, and who may change which. Pure: times are arguments, in unix seconds.

    validating_files ──▶ queued ──▶ running ──▶ succeeded          a gateway, a host, a gateway
            │              │ ▲         │
            │              ▼ │         ▼
            │             paused ◀─────┤                            what its tenant wants
            └──▶ failed, cancelled ◀───┘

What its tenant wants is done at once while no host has the job; else the host does it (`wanted`).
"""

from typing import Any

import msgspec

from services.gateway.core.errors import RouteError
from shared.messages.training import (
    TRAINING_OVER,
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingError,
    TrainingJob,
    steps_of,
)

_replace = msgspec.structs.replace
ID = "ftjob-"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries of a gateway, each time twice as many


# --- the check of its files, by the gateway that has the lease -----------------------------------


def queued(job: TrainingJob, data: TokenizedData, hyperparameters: Hyperparameters) -> TrainingJob:
    """Its files are in order, and nothing of its hyperparameters is `auto` any more. Ends the lease."""
    if job.status != "validating_files":
        return job
    steps = steps_of(hyperparameters, data.examples)
    return _replace(
        job,
        status="paused" if job.wanted == "pause" else "queued",
        data=data,
        hyperparameters=hyperparameters,
        steps=steps,
        waiting_for="",
        owner="",
        **_UNBLOCKED,
    )


def reserved(job: TrainingJob, storage: int) -> TrainingJob:
    """Its examples are known, and its tenant has room for it. `storage`: bytes."""
    return _replace(job, storage=storage) if job.status == "validating_files" else job


def failed(job: TrainingJob, now: float, error: TrainingError) -> TrainingJob:
    """Its files are not in order, or its base cannot be trained. Ends the lease."""
    if job.status != "validating_files":
        return job
    return _replace(job, status="failed", finished_at=now, error=error, waiting_for="", owner="")


def waiting(job: TrainingJob, reason: str) -> TrainingJob:
    """Why nothing is done for it now, while a gateway is to do it."""
    return job if job.status in TRAINING_OVER else _replace(job, waiting_for=reason)


def postponed(job: TrainingJob, now: float, reason: str, least: float = 0.0) -> TrainingJob:
    """A gateway could not do its part now: none tries again before a while has passed, `least` seconds at least. Ends
    the lease, so that the place is another job's meanwhile."""
    pause = max(min(FIRST_PAUSE * 2.0 ** min(job.tries, 16), LONGEST_PAUSE), least)
    since = job.blocked_since or now
    return _replace(waiting(job, reason), owner="", tries=job.tries + 1, blocked_since=since, look_at=now + pause)


# Of a job for which a gateway has done something.
_UNBLOCKED: dict[str, Any] = {"tries": 0, "blocked_since": 0.0, "look_at": 0.0}


# --- what its tenant wants -----------------------------------------------------------------------


def cancelled(job: TrainingJob, now: float) -> TrainingJob:
    """Raises `RouteError` for one that is over for another reason, or as good as over."""
    if job.status == "cancelled":
        return job
    _check(job, "cancel")
    if job.host:
        return _replace(job, wanted="cancel")
    return _replace(job, status="cancelled", wanted="cancel", finished_at=now, waiting_for="", expected_at=0.0)


def paused(job: TrainingJob) -> TrainingJob:
    """Raises `RouteError` as `cancelled`."""
    _check(job, "pause")
    if job.wanted == "cancel":
        raise _conflict(job, "pause", "it is being cancelled")
    if job.host or job.status == "validating_files":
        return _replace(job, wanted="pause")
    return _replace(job, status="paused", wanted="pause", waiting_for="", expected_at=0.0)


def resumed(job: TrainingJob) -> TrainingJob:
    """Raises `RouteError` as `cancelled`, and for one that is not paused."""
    _check(job, "resume")
    if job.wanted == "cancel" or (job.wanted == "run" and job.status != "paused"):
        raise _conflict(job, "resume", "it is not paused")
    return _replace(job, wanted="run", status="queued" if job.status == "paused" else job.status)


def settled(job: TrainingJob, now: float) -> TrainingJob:
    """What its tenant wanted while a host had it, which has given it back without doing so."""
    if job.status in TRAINING_OVER or job.host or job.result is not None:
        return job
    if job.wanted == "cancel":
        return cancelled(job, now)
    if job.wanted == "pause" and job.status in ("queued", "running"):
        return paused(job)
    if job.wanted == "run" and job.status == "paused":
        return resumed(job)
    return job


def _check(job: TrainingJob, verb: str) -> None:
    if job.status in TRAINING_OVER:
        raise _conflict(job, verb, f"it is over, with the status '{job.status}'")
    if job.result is not None:
        raise _conflict(job, verb, "it is trained, and its model is being published")


def _conflict(job: TrainingJob, verb: str, why: str) -> RouteError:
    """409, as for batches."""
    return RouteError(f"Cannot {verb} the fine-tuning job '{job.id}': {why}.", status=409, reason="invalid_job_status")


# --- its publication, by the gateway that has the lease ------------------------------------------


def named(job: TrainingJob, adapter: TrainedAdapter, name: str) -> TrainingJob:
    """One of its checkpoints is registered."""
    adapters = [
        _replace(one, name=name) if (one.step, one.digest) == (adapter.step, adapter.digest) else one
        for one in job.adapters
    ]
    return _replace(job, adapters=adapters, **_UNBLOCKED)


def unpublished(job: TrainingJob, now: float, error: TrainingError) -> TrainingJob:
    """There is no place for its models: it has failed, unless it was over, and keeps those that have a name."""
    job = _replace(job, adapters=[one for one in job.adapters if one.name])
    if job.status in TRAINING_OVER:
        return job
    return _replace(
        job, status="failed", finished_at=now, error=error, result=None, waiting_for="", expected_at=0.0, host=""
    )


def succeeded(job: TrainingJob, now: float, model: str, result_files: list[str]) -> TrainingJob:
    """Its model is registered, and its files are written."""
    if job.status in TRAINING_OVER or job.result is None:
        return job
    return _replace(
        job,
        status="succeeded",
        finished_at=now,
        fine_tuned_model=model,
        result=_replace(job.result, name=model),
        result_files=result_files,
        waiting_for="",
        expected_at=0.0,
        host="",
        **_UNBLOCKED,
    )


def cleaned(job: TrainingJob) -> TrainingJob:
    """What it kept for training is gone. Ends the lease."""
    return _replace(job, clean=True, state=None, metrics_object="", owner="")


# --- who has to do something for it --------------------------------------------------------------


def needs_preparation(job: TrainingJob) -> bool:
    """Whether a gateway has to check its files."""
    return job.status == "validating_files"


def needs_publication(job: TrainingJob) -> bool:
    """Whether a gateway has to publish something of it, to clean up after it, or to do what its tenant wants."""
    if job.status == "validating_files":
        return False
    if any(not one.name for one in job.adapters):
        return True
    if job.status in TRAINING_OVER:
        return not job.clean
    return job.result is not None or settled(job, 0.0) != job
