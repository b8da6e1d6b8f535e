"""A trainer that computes nothing: `python -m services.executor.training.stub EVENTS_FD`, of the stub engine.

It has the life of the real one: the same pipe, states, adapters and pauses, and a result that follows from the job
alone, whatever it was interrupted by. So what is durable about jobs is tested without a model. A step takes
`stub_step_ms`.

    value 0 = hash(seed, data)      value n + 1 = hash(value n, n + 1)      the adapter's weights: the last value
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

import msgspec

from services.executor.ipc.trainer_pipe import (
    EXAMPLES,
    STATE,
    AdapterWritten,
    Finished,
    Loaded,
    Paused,
    StateWritten,
    Stepped,
    TrainerFailed,
    TrainerPipe,
    TrainerSpec,
)
from shared.errors import InternalError, InvalidRequest
from shared.messages.training import TrainingData, TrainingMetrics, steps_of
from shared.nats.adapters import CONFIG, WEIGHTS

STATE_EVERY = 5  # steps


class _State(msgspec.Struct):
    step: int
    value: str
    job: str


class StubTrainer:
    def __init__(self, spec: TrainerSpec, pipe: TrainerPipe) -> None:
        self._spec = spec
        self._pipe = pipe
        self.tell = pipe.send
        self._directory = Path(spec.directory)
        self._written = -1  # step of the last state, whose file is the supervisor's: it may be gone by now
        self.seconds = float(str(spec.settings.get("stub_step_ms") or 0.0)) / 1000

    def run(self) -> None:
        """To the end of the job, or to a pause."""
        life = self.life()
        with contextlib.suppress(StopIteration):
            next(life)
            while True:
                life.send(self._wait())

    def life(self) -> Generator[None, bool, None]:
        """The same without waiting: comes back before every step, which takes `seconds`, and is sent whether it goes
        on."""
        job, data = self._spec.job, (self._directory / EXAMPLES).read_bytes()
        examples = len(msgspec.msgpack.decode(data, type=TrainingData).training.lengths) // 4
        examples //= 2 if job.method == "dpo" else 1
        chosen = job.hyperparameters
        if not examples or not chosen.batch_size:
            self.tell(TrainerFailed(InvalidRequest.code, "The job has no examples; create it with some."))
            return
        steps, an_epoch = steps_of(chosen, examples), -(-examples // chosen.batch_size)
        state = self._read() or _State(0, _hash(str(job.seed), hashlib.sha256(data).hexdigest()), job.id)
        self.tell(Loaded(state.step, steps))
        while state.step < steps:
            if not (yield):
                self._write_state(state)
                self.tell(Paused(state.step))
                return
            state.step, state.value = state.step + 1, _hash(state.value, str(state.step + 1))
            self.tell(Stepped(_metrics(state.step)))
            epoch_ends = state.step % an_epoch == 0
            if epoch_ends and state.step < steps:
                self._write_adapter(state, is_result=False)
            if epoch_ends or state.step % STATE_EVERY == 0:
                self._write_state(state)
        self._write_adapter(state, is_result=True)
        (self._directory / "metrics.csv").write_text(_csv(steps))
        self.tell(Finished("metrics.csv", steps))

    def _wait(self) -> bool:
        """As long as a step takes; False: a pause is wanted."""
        return not self._pipe.pause.wait(self.seconds)

    def _read(self) -> _State | None:
        path = self._directory / STATE
        if not path.exists():
            return None
        state = msgspec.json.decode(path.read_bytes(), type=_State)
        if state.job != self._spec.job.id:
            raise ValueError(f"the state is one of the job {state.job}")
        return state

    def _write_state(self, state: _State) -> None:
        if state.step == self._written:
            return
        self._written = state.step
        name, content = f"state-{state.step}", msgspec.json.encode(state)
        (self._directory / name).write_bytes(content)
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        self.tell(StateWritten(state.step, name, len(content), digest))

    def _write_adapter(self, state: _State, *, is_result: bool) -> None:
        job, name = self._spec.job, f"adapter-{state.step}{'-result' if is_result else ''}"
        rank = job.hyperparameters.rank
        config = json.dumps({"peft_type": "LORA", "r": rank, "base_model_name_or_path": job.model}).encode()
        weights = state.value.encode()
        (self._directory / name).mkdir()
        (self._directory / name / CONFIG).write_bytes(config)
        (self._directory / name / WEIGHTS).write_bytes(weights)
        digest = hashlib.sha256(config + weights).hexdigest()
        metrics = _metrics(state.step)
        self.tell(AdapterWritten(state.step, name, digest, rank, len(weights), metrics, is_result))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _metrics(step: int) -> TrainingMetrics:
    return TrainingMetrics(step, train_loss=2.0 / step, train_accuracy=1.0 - 1.0 / (step + 1), tokens=step)


def _csv(steps: int) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["step", "train_loss", "train_accuracy"])
    rows.writerows([step, _metrics(step).train_loss, _metrics(step).train_accuracy] for step in range(1, steps + 1))
    return out.getvalue()


ALONE = TrainerFailed(InvalidRequest.code, "The stub engine trains alone; create the job with one replica.")


def main(events_fd: int) -> int:
    pipe = TrainerPipe(sys.stdin.buffer, events_fd)
    spec = pipe.read_spec()
    trainer = StubTrainer(spec, pipe)
    pipe.listen()
    if spec.job.hyperparameters.replicas > 1:
        pipe.send(ALONE)
        return 1
    try:
        trainer.run()
    except Exception as error:
        pipe.send(TrainerFailed(InternalError.code, f"The stub trainer has failed: {error}."))
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))  # the thread that listens must not hold it up
