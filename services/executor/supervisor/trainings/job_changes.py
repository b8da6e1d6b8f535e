"""What becomes of a job's record while a host trains it. Pure: times are unix seconds.

queued ──begun──▶ running ──stepped, state_written, adapter_written──▶ ... ──finished──▶ result: a gateway publishes it
                    ├── paused, cancelled, failed      as its tenant wants, or what would fail anywhere
                    └── given_back, crashed            no host has it: the scheduler gives it to one again
"""

from typing import Literal, NamedTuple

import msgspec

from shared.errors import InternalError
from shared.messages.training import (
    TrainedAdapter,
    TrainingError,
    TrainingJob,
    TrainingMetrics,
    TrainingState,
    steps_of,
)
from shared.training_storage import KEPT_ADAPTERS

MOST_CRASHES = 5  # times that a trainer may end by a fault without a new state in between
# Seconds before a job whose trainer has ended by a fault is given to a host again; twice as many each time.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
MAX_REASON = 1000  # characters of why it has failed, or waits

_replace = msgspec.structs.replace


def is_mine(job: TrainingJob | None, host: str, attempt: int) -> bool:
    """Whether the host is to train the job in that attempt, or a part of it."""
    return (
        job is not None
        and host in job.hosts
        and job.attempt == attempt
        and job.status in ("queued", "running")
        and job.result is None
    )


def begun(
    job: TrainingJob, runner: str, before: TrainingJob, threads: int, now: float, secret: str = ""
) -> TrainingJob:
    """Its trainer is being started by the executor `runner`, which has found it as `before`. `threads`: what its first
    host chooses; `secret`: of its replicas, if there are several."""
    examples, chosen = job.data.examples if job.data is not None else 0, job.hyperparameters
    return _replace(
        job,
        status="running",
        waiting_for="",
        started_at=job.started_at or now,
        steps=job.steps or (steps_of(chosen, examples) if chosen.batch_size else 0),
        threads=job.threads or threads,
        meeting="",
        secret=secret,
        runner=runner,
        losses=before.losses + (before.runner != ""),
        resumed_from=state_step(job) if before.runner else job.resumed_from,
    )


def state_step(job: TrainingJob) -> int:
    """The step that it goes on from after a death."""
    return job.state.step if job.state is not None else 0


def stepped(job: TrainingJob, metrics: TrainingMetrics, expected_at: float, waiting_for: str) -> TrainingJob:
    """After a step. `waiting_for`: what keeps it from writing its state, where something does."""
    return _replace(job, metrics=metrics, expected_at=round(expected_at), waiting_for=waiting_for)


def state_written(job: TrainingJob, state: TrainingState) -> TrainingJob:
    """It goes on from there after a death."""
    return _replace(job, state=state, crashes=0 if state.step > state_step(job) else job.crashes)


def adapter_written(job: TrainingJob, adapter: TrainedAdapter) -> tuple[TrainingJob, list[TrainedAdapter]]:
    """An epoch's end has an adapter; also those that the record names no more. Written again, it keeps its name."""
    known = next((one for one in job.adapters if one.step == adapter.step), None)
    if known is not None:
        return job, []
    adapters = sorted([*job.adapters, adapter], key=lambda one: one.step)
    return _replace(job, adapters=adapters[-KEPT_ADAPTERS:]), adapters[:-KEPT_ADAPTERS]


def finished(job: TrainingJob, result: TrainedAdapter, metrics_object: str, trained_tokens: int) -> TrainingJob:
    """All steps are done: what is left is to publish it, which needs no host."""
    return _replace(
        job,
        host="",
        result=result,
        metrics=result.metrics,
        metrics_object=metrics_object,
        trained_tokens=trained_tokens,
        expected_at=0.0,
        waiting_for="",
        crashes=0,
    )


def paused(job: TrainingJob) -> TrainingJob:
    """As its tenant wants it."""
    return _replace(job, status="paused", host="", waiting_for="", expected_at=0.0, runner="")


def cancelled(job: TrainingJob, now: float) -> TrainingJob:
    """As its tenant wants it."""
    return _replace(job, status="cancelled", host="", waiting_for="", expected_at=0.0, finished_at=now)


def failed(job: TrainingJob, code: str, message: str, now: float) -> TrainingJob:
    """It would fail anywhere."""
    error = TrainingError(code, message[:MAX_REASON])
    return _replace(job, status="failed", host="", waiting_for="", expected_at=0.0, finished_at=now, error=error)


def given_back(job: TrainingJob, reason: str, retry_at: float) -> TrainingJob:
    """By no fault of its own: another host, or this one later, goes on."""
    return _replace(job, host="", waiting_for=reason[:MAX_REASON], expected_at=0.0, retry_at=retry_at, runner="")


def crashed(job: TrainingJob, reason: str, now: float) -> TrainingJob:
    """Its trainer has ended by a fault that may not come again; one that comes time and again fails the job.
    `reason`: one sentence, with its last words after it."""
    crashes = job.crashes + 1
    if crashes >= MOST_CRASHES:
        message = f"The trainer has crashed {crashes} times after step {state_step(job)}. {reason}"
        return failed(job, InternalError.code, message, now)
    pause = min(FIRST_PAUSE * 2.0 ** (crashes - 1), LONGEST_PAUSE)
    waiting = f"It will be retried in {pause:g} s. {reason}"
    return _replace(given_back(job, waiting, now + pause), crashes=crashes)


class End(NamedTuple):
    """How a training has ended on this host before it was done."""

    # `left`: by a further replica, when the first one ended: what comes of the job is the first one's to say.
    kind: Literal["failed", "given_back", "crashed", "left"]
    reason: str = ""  # one sentence
    code: str = ""  # of `failed`: one of `shared.errors`
    retry_after: float = 0.0  # of `given_back`: seconds before a host is told again


def ended(job: TrainingJob, end: End, now: float) -> TrainingJob:
    """What its tenant wants goes first; but what would fail anywhere is not paused."""
    if end.kind == "left":
        return job
    if job.wanted == "cancel":
        return cancelled(job, now)
    if end.kind == "failed":
        return failed(job, end.code, end.reason, now)
    if job.wanted == "pause":
        return paused(job)
    if end.kind == "given_back":
        return given_back(job, end.reason, now + end.retry_after)
    return crashed(job, end.reason, now)
