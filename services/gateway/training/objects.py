"""Fine-tuning jobs, their events and checkpoints as OpenAI shows them, and what their models are called. Pure."""

import hashlib
from typing import Any, Literal
from urllib.parse import quote

from services.gateway.training.requests import SETTINGS
from services.gateway.training.states import ID
from shared.messages.registry import AdapterRecord
from shared.messages.training import MAX_EVENT_MESSAGE, TrainedAdapter, TrainingEvent, TrainingJob, TrainingMetrics

ID_DIGITS = 12  # of a job's id, in the name of its model
# Characters of them in a model's name: longer ones are cut, and end with a digest of the whole.
MAX_BASE, MAX_TENANT = 72, 24


# --- names ---------------------------------------------------------------------------------------


def model_name(job: TrainingJob) -> str:
    """`ft:<base>:<tenant>:<suffix>:<id>`: from the job alone, so that whoever publishes it takes the same. The tenant
    and the suffix may be empty; a colon or a character that no name may have is escaped as in URLs."""
    base = _part(job.model, MAX_BASE)
    return f"ft:{base}:{_part(job.tenant, MAX_TENANT)}:{job.suffix}:{job.id.removeprefix(ID)[:ID_DIGITS]}"


def checkpoint_name(job: TrainingJob, adapter: TrainedAdapter) -> str:
    """Of an adapter that is not the job's result."""
    return f"{model_name(job)}:ckpt-step-{adapter.step}"


def _part(name: str, most: int) -> str:
    escaped = quote(name, safe="/@+ ")
    if len(escaped) <= most:
        return escaped
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{escaped[: most - 9].rstrip('%')}-{digest}"


def adapter_record(job: TrainingJob, adapter: TrainedAdapter, name: str) -> AdapterRecord:
    """How it is registered: it is the tenant's alone."""
    return AdapterRecord(
        name=name,
        model=job.model,
        source=job.id,
        digest=adapter.digest,
        rank=adapter.rank,
        bytes=adapter.bytes,
        created=adapter.created,
        tenant=job.tenant,
        job=job.id,
    )


# --- objects -------------------------------------------------------------------------------------


def job_object(job: TrainingJob) -> dict[str, Any]:
    """OpenAI's `fine_tuning.job`, with what is known of its progress."""
    hyperparameters = _hyperparameters(job)
    error = None
    if job.error is not None:
        error = {"code": job.error.code, "message": job.error.message, "param": job.error.param or None}
    over = job.finished_at > 0
    return {
        "object": "fine_tuning.job",
        "id": job.id,
        "created_at": int(job.created_at),
        "finished_at": int(job.finished_at) or None,
        "estimated_finish": int(job.expected_at) or None if job.status == "running" else None,
        "model": job.model,
        "fine_tuned_model": job.fine_tuned_model or None,
        "organization_id": job.tenant,
        "status": job.status,
        "error": error,
        "training_file": job.training_file,
        "validation_file": job.validation_file or None,
        "result_files": job.result_files,
        "trained_tokens": job.trained_tokens if over and job.trained_tokens else None,
        "hyperparameters": {name: value for name, value in hyperparameters.items() if name != "beta"},
        "method": {"type": job.method, job.method: {"hyperparameters": hyperparameters}},
        "seed": job.seed,
        "user_provided_suffix": job.suffix or None,
        "metadata": job.metadata,
        "integrations": [],
        "lora": {
            "rank": job.hyperparameters.rank,
            "alpha": job.hyperparameters.alpha or "auto",
            "dropout": job.hyperparameters.dropout,
            "target_modules": job.hyperparameters.targets or "all-linear",
        },
        "settings": {name: getattr(job.hyperparameters, name) for name in SETTINGS},
        "progress": _progress(job),
        "wanted": job.wanted,
        "waiting_for": job.waiting_for or None,
        "started_at": int(job.started_at) or None,
    }


def _hyperparameters(job: TrainingJob) -> dict[str, Any]:
    given = job.hyperparameters
    shown: dict[str, Any] = {
        "n_epochs": given.epochs or "auto",
        "batch_size": given.batch_size or "auto",
        "learning_rate_multiplier": given.learning_rate_multiplier or "auto",
    }
    return shown | {"beta": given.beta or "auto"} if job.method == "dpo" else shown


def _progress(job: TrainingJob) -> dict[str, Any] | None:
    if job.data is None:
        return None
    return {
        "step": 0 if job.metrics is None else job.metrics.step,
        "steps": job.steps,
        "examples": job.data.examples,
        "tokens": job.data.tokens,
        "trained_tokens_per_epoch": job.data.trained,
        "validation_examples": job.data.validation_examples,
        "state_step": 0 if job.state is None else job.state.step,
        "attempt": job.attempt,
        "host": job.host or None,
        "executors_lost": job.losses,
        "resumed_from_step": job.resumed_from if job.losses else None,
        "metrics": None if job.metrics is None else metrics_data(job.metrics),
    }


def metrics_data(metrics: TrainingMetrics) -> dict[str, Any]:
    """As OpenAI names them; what was not measured is left out."""
    data: dict[str, Any] = {
        "step": metrics.step,
        "train_loss": metrics.train_loss,
        "train_mean_token_accuracy": metrics.train_accuracy,
        "valid_loss": metrics.valid_loss,
        "valid_mean_token_accuracy": metrics.valid_accuracy,
        "reward_margin": metrics.margin,
        "valid_reward_margin": metrics.valid_margin,
        "learning_rate": metrics.learning_rate,
        "grad_norm": metrics.grad_norm,
        "tokens": metrics.tokens,
        "seconds": metrics.seconds,
    }
    return {name: value for name, value in data.items() if value is not None}


def event_id(key: str) -> str:
    """From where it lies: what was said again after a death has the id that it had."""
    return f"ftevent-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"


def event_object(key: str, event: TrainingEvent, steps: int) -> dict[str, Any]:
    """OpenAI's `fine_tuning.job.event`. `key`: its own, in the bucket; `steps`: of the job."""
    data = dict(event.data)
    if event.metrics is not None:
        data = {**metrics_data(event.metrics), "total_steps": steps, **data}
    return {
        "object": "fine_tuning.job.event",
        "id": event_id(key),
        "created_at": int(event.created),
        "level": event.level,
        "message": event.message,
        "type": "message" if event.metrics is None else "metrics",
        "data": data,
    }


def event_of(
    job: TrainingJob,
    kind: str,
    message: str,
    now: float,
    *,
    level: Literal["info", "warn", "error"] = "info",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> TrainingEvent:
    """What a gateway says of a job. `step`: None for that of its last metrics."""
    if step is None:
        step = 0 if job.metrics is None else job.metrics.step
    return TrainingEvent(job.id, step, kind, level, message[:MAX_EVENT_MESSAGE], now, data=data or {})


def checkpoint_object(job: TrainingJob, adapter: TrainedAdapter) -> dict[str, Any]:
    """OpenAI's `fine_tuning.job.checkpoint`."""
    names = (
        "step", "train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy",
    )  # fmt: skip
    known = metrics_data(adapter.metrics)
    metrics = {name: known[name] for name in names if name in known}
    if adapter.metrics.valid_loss is not None:  # every example for validation is looked at each time
        metrics["full_valid_loss"] = adapter.metrics.valid_loss
        metrics["full_valid_mean_token_accuracy"] = adapter.metrics.valid_accuracy
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": checkpoint_id(job, adapter),
        "created_at": adapter.created,
        "fine_tuned_model_checkpoint": adapter.name,
        "fine_tuning_job_id": job.id,
        "step_number": adapter.step,
        "metrics": metrics,
    }


def checkpoint_id(job: TrainingJob, adapter: TrainedAdapter) -> str:
    return f"ftckpt_{job.id.removeprefix(ID)}{adapter.step}"


def published_checkpoints(job: TrainingJob) -> list[TrainedAdapter]:
    """The newest first; the result is one too."""
    found = {one.step: one for one in [*job.adapters, *([job.result] if job.result else [])] if one.name}
    return [found[step] for step in sorted(found, reverse=True)]
