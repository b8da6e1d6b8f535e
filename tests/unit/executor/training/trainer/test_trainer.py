"""A whole attempt at a job, in this process, over a model that stands in for a transformer."""

import csv
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from services.executor.ipc.trainer_pipe import (
    STATE,
    AdapterWritten,
    Finished,
    Loaded,
    Paused,
    StateWritten,
    Stepped,
    TrainerEvent,
    TrainerSpec,
)
from services.executor.training.trainer.process import Trainer
from shared.errors import ConfigurationError, InternalError, StorageFull, TrainingDiverged
from shared.messages.training import TrainingJob
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.training.trainer.jobs import StandIn, examples_of, job_of, make_spec, random_texts

CPU = torch.device("cpu")


class Killed(BaseException):
    """Ends an attempt in the middle of an event."""


class Attempt:
    """Runs a trainer, and keeps what it tells."""

    def __init__(
        self, spec: TrainerSpec, model: StandIn | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.events: list[TrainerEvent] = []
        self.pause = threading.Event()
        self.pause_in_a_layer = False
        self.on_event: Callable[[TrainerEvent], None] = lambda event: None
        self.model = model or StandIn(dropout=spec.job.hyperparameters.dropout)
        self.trainer = Trainer(spec, self._load, self._tell, self.pause, CPU, clock)

    def run(self) -> "Attempt":
        self.trainer.run()
        return self

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def result(self) -> AdapterWritten:
        (result,) = [event for event in self.of(AdapterWritten) if event.is_result]
        return result

    def _load(self, spec: TrainerSpec, device: torch.device, between: Callable[[], None]) -> StandIn:
        def layer() -> None:
            if self.pause_in_a_layer:
                self.pause.set()
            between()

        self.model.between_layers = layer
        return self.model

    def _tell(self, event: TrainerEvent) -> None:
        self.events.append(event)
        self.on_event(event)


def spec_of(directory: Path, job: TrainingJob, **changes: Any) -> TrainerSpec:
    count = 22 if job.method == "supervised" else 20
    training = examples_of(random_texts(count))
    return make_spec(directory, job, training, examples_of(random_texts(6, seed=1)), **changes)


JOBS = {
    "supervised": job_of(dropout=0.2, epochs=3, batch_size=8),
    "dpo": job_of("dpo", dropout=0.2, learning_rate_multiplier=100.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_lanes(JOBS, ["supervised"]))
def test_a_death_at_any_event_ends_in_the_same_adapter_and_table(kind: str, tmp_path: Path) -> None:
    job = JOBS[kind]
    whole = Attempt(spec_of(tmp_path / "whole", job)).run()
    (finished,) = whole.of(Finished)
    table = (tmp_path / "whole" / finished.metrics).read_bytes()
    for death in range(1, len(whole.events)):
        directory = tmp_path / f"{death}"
        spec = spec_of(directory, job)
        first = Attempt(spec)

        def die(event: TrainerEvent, first: Attempt = first, death: int = death) -> None:
            if len(first.events) == death:
                raise Killed

        first.on_event = die
        with pytest.raises(Killed):
            first.run()
        # The supervisor has what was told before; the last of it may be lost with the host.
        states = [event for event in first.events[:-1] if isinstance(event, StateWritten)]
        if states:
            shutil.copyfile(directory / states[-1].file, directory / STATE)
        second = Attempt(spec).run()
        assert second.of(Loaded)[0].step == (states[-1].step if states else 0)
        assert second.result.digest == whole.result.digest, f"died at {first.events[-1]}"
        assert (directory / second.of(Finished)[0].metrics).read_bytes() == table
        told = {event.digest for event in first.of(AdapterWritten) + second.of(AdapterWritten)}
        assert told == {event.digest for event in whole.of(AdapterWritten)}


def test_other_seeds_make_other_adapters(tmp_path: Path) -> None:
    digests = {Attempt(spec_of(tmp_path / str(seed), job_of(seed=seed))).run().result.digest for seed in (1, 2, 3)}
    assert len(digests) == 3


def test_what_is_told_of_a_job(tmp_path: Path) -> None:
    texts = [[3 + (first + at) % 20 for at in range(10)] for first in range(22)]
    job = job_of(epochs=2, learning_rate_multiplier=200.0)
    attempt = Attempt(make_spec(tmp_path, job, examples_of(texts), examples_of(texts[:5]))).run()
    assert attempt.events[0] == Loaded(0, 12)
    steps = [event.metrics for event in attempt.of(Stepped)]
    assert [step.step for step in steps] == [*range(1, 7), 6, *range(7, 13), 12]
    assert all(0 <= step.train_accuracy <= 1 and step.train_loss > 0 and step.grad_norm > 0 for step in steps)
    assert [step.step for step in steps if step.valid_loss is not None] == [6, 12]
    assert all(step.margin is None for step in steps)
    first, last = attempt.of(AdapterWritten)
    assert (first.step, first.is_result, last.step, last.is_result) == (6, False, 12, True)
    assert last.metrics == steps[-1]
    assert last.rank == 4
    assert last.metrics.train_loss < 0.8 * steps[0].train_loss
    (finished,) = attempt.of(Finished)
    assert finished.trained_tokens == 2 * 220 == steps[-1].tokens
    rows = list(csv.DictReader((tmp_path / finished.metrics).read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert list(rows[0])[:5] == ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    assert rows[0]["valid_loss"] == rows[0]["train_reward_margin"] == ""
    assert float(rows[11]["valid_loss"]) == pytest.approx(steps[-1].valid_loss)


def test_dpo_raises_the_margin(tmp_path: Path) -> None:
    pairs = [text for text in random_texts(12) for text in ([1, 2, *text], [1, 2, *reversed(text)])]
    job = job_of("dpo", epochs=6, learning_rate_multiplier=2000.0)
    attempt = Attempt(make_spec(tmp_path, job, examples_of(pairs), examples_of(pairs[:8]))).run()
    steps = [event.metrics for event in attempt.of(Stepped)]
    assert steps[0].margin == 0.0
    assert steps[0].train_loss == pytest.approx(0.6931472)
    assert steps[-1].margin > 0.1
    assert steps[-1].valid_margin > 0.1
    assert steps[-1].train_accuracy == 1.0
    assert steps[-1].train_loss < 0.66


def test_a_loss_that_is_no_number_ends_the_job_with_its_step(tmp_path: Path) -> None:
    texts = random_texts(8)
    texts[5] = [1, 2, 60, 61, 62]
    model = StandIn()
    model.poisoned = 61
    texts = [[token % 60 for token in text] if at != 5 else text for at, text in enumerate(texts)]
    attempt = Attempt(make_spec(tmp_path, job_of(batch_size=1), examples_of(texts)), model)
    with pytest.raises(TrainingDiverged) as failed:
        attempt.run()
    done = attempt.trainer.done
    assert f"Step {done + 1} of 16 has diverged (the loss is nan)" in str(failed.value)
    assert "learning_rate_multiplier" in str(failed.value)
    assert str(failed.value).endswith("counted from 1: 6.")
    assert not failed.value.retryable
    assert len(attempt.of(StateWritten)) == done
    assert all(torch.isfinite(factor).all() for factor in attempt.trainer._factors.values())


def test_a_pause_after_the_step_under_way(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, job_of())
    spec = structs.replace(spec, state_interval=1e9)
    whole = Attempt(spec).run()
    first = Attempt(spec)
    first.on_event = lambda event: first.pause.set() if event in first.of(Stepped)[3:4] else None
    first.run()
    assert first.events[-1] == Paused(4)
    (state,) = first.of(StateWritten)
    shutil.copyfile(tmp_path / state.file, tmp_path / STATE)
    assert state.step == 4
    assert Attempt(spec).run().result.digest == whole.result.digest


def test_a_pause_before_the_first_step_has_nothing_to_keep(tmp_path: Path) -> None:
    attempt = Attempt(spec_of(tmp_path, job_of()))
    attempt.pause.set()
    attempt.run()
    assert attempt.events == [Loaded(0, 12), Paused(0)]


def test_a_clock_that_jumps_back_makes_no_step_negative(tmp_path: Path) -> None:
    """As the trainer's does that has just heard for how long it was suspended."""
    times = iter(range(1000, 0, -5))
    attempt = Attempt(spec_of(tmp_path, job_of()), clock=lambda: float(next(times))).run()
    assert {event.metrics.seconds for event in attempt.of(Stepped)} == {0.0}


@pytest.mark.parametrize("at_the_end_of_an_epoch", [False, True])
def test_a_pause_in_a_step_gives_it_up(tmp_path: Path, at_the_end_of_an_epoch: bool) -> None:
    spec = spec_of(tmp_path, job_of())
    whole = Attempt(spec).run()
    first = Attempt(spec)
    last = 6 if at_the_end_of_an_epoch else 3

    def on_event(event: TrainerEvent) -> None:
        if isinstance(event, StateWritten) and event.step == last:
            first.pause_in_a_layer = True

    first.on_event = on_event
    first.run()
    assert first.events[-1] == Paused(last)
    shutil.copyfile(tmp_path / first.of(StateWritten)[-1].file, tmp_path / STATE)
    second = Attempt(spec).run()
    assert second.result.digest == whole.result.digest
    assert len(second.of(AdapterWritten)) == 2


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, job_of())
    attempt = Attempt(spec)
    attempt.pause.set()
    first = Attempt(spec).run()
    shutil.copyfile(tmp_path / first.of(StateWritten)[0].file, tmp_path / STATE)
    for other, told in (
        (job_of(rank=8), "other examples, hyperparameters or threads"),
        (job_of(seed=8), "other examples, hyperparameters or threads"),
    ):
        with pytest.raises(InternalError, match=told):
            Attempt(spec_of(tmp_path, other))
    (tmp_path / STATE).write_bytes(b"no tensors")
    with pytest.raises(InternalError, match=r"state\.safetensors of the job ftjob-test is damaged"):
        Attempt(spec)


def test_no_room_for_a_state_is_told_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.executor.training.trainer.state.save_file", full)
    attempt = Attempt(spec_of(tmp_path, job_of()))
    with pytest.raises(StorageFull, match=r"state-1\.safetensors cannot be written .*No space left"):
        attempt.run()


def test_optimizers_of_gpus_are_refused_on_cpus(tmp_path: Path) -> None:
    for optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        with pytest.raises(ConfigurationError, match=f"The optimizer {optimizer} needs a CUDA GPU"):
            Attempt(spec_of(tmp_path, job_of(optimizer=optimizer)))
