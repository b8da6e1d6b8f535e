"""Several trainers of one job: the same adapter on every run, and that of one trainer but for rounding."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from services.executor.ipc.proofs import NONCE_SIZE, challenge
from services.executor.ipc.trainer_pipe import STATE, AdapterWritten, Finished, Met, Paused, StateWritten
from services.executor.training.trainer import replicas
from services.executor.training.trainer.process import Trainer
from services.executor.training.trainer.replicas import FirstReplica, FurtherReplica
from shared.errors import ConfigurationError, InternalError, RyzansteinError, Unavailable
from tests.unit.executor.training.trainer.jobs import StandIn, examples_of, job_of, make_spec, random_texts

SECRET = "of this attempt"


class Died(Exception):
    """Stands for a trainer's death."""


class Ring:
    """Trainers of one job, each in a thread, which meet over real sockets."""

    def __init__(self, directory: Path, replicas: int, die: tuple[int, int] = (-1, 0), **changes: Any) -> None:
        """`die`: which replica, at how many layers; `directory` may have a state."""
        self.told: list[list[Any]] = [[] for _ in range(replicas)]
        self.errors: dict[int, Exception] = {}
        self.models: list[StandIn] = []
        self.pauses = [threading.Event() for _ in range(replicas)]
        self._directory, self._replicas, self._die, self._changes = directory, replicas, die, changes
        self._met = threading.Event()
        threads = [threading.Thread(target=self._live, args=(at,)) for at in range(replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _live(self, replica: int) -> None:
        try:
            if replica == 0 or self._met.wait():
                self._train(replica)
        except Exception as error:
            self.errors[replica] = error
            self._met.set()

    def _train(self, replica: int) -> None:
        job = job_of(replicas=self._replicas, batch_size=6, **self._changes)
        address = self.told[0][0].address if replica else ""
        spec = make_spec(
            self._directory / str(replica),
            job,
            examples_of(random_texts(20)),
            examples_of(random_texts(6, seed=1)),
            replica=replica,
            secret=SECRET,
            store=address,
        )
        model = StandIn(dropout=job.hyperparameters.dropout)
        self.models.append(model)
        trainer = Trainer(
            spec,
            lambda spec, device, between: self._model(model, replica),
            lambda event: self._tell(replica, event),
            self.pauses[replica],
            torch.device("cpu"),
        )
        trainer.run()

    def _model(self, model: StandIn, replica: int) -> StandIn:
        left = self._die[1] if replica == self._die[0] else -1

        def layer() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died

        model.between_layers = layer
        return model

    def _tell(self, replica: int, event: Any) -> None:
        self.told[replica].append(event)
        if isinstance(event, Met):
            self._met.set()
        if isinstance(event, StateWritten):
            written = (self._directory / "0" / event.file).read_bytes()
            for at in range(self._replicas):
                directory = self._directory / str(at)
                directory.mkdir(exist_ok=True)
                (directory / f"next-{STATE}").write_bytes(written)

    def restored(self) -> None:
        """What an executor does before the next attempt: the newest state is where all find it."""
        for at in range(self._replicas):
            later = self._directory / str(at) / f"next-{STATE}"
            if later.exists():
                later.rename(self._directory / str(at) / STATE)

    @property
    def result(self) -> AdapterWritten:
        (found,) = [one for one in self.told[0] if isinstance(one, AdapterWritten) and one.is_result]
        return found


def weights(ring: Ring, replica: int = 0) -> torch.Tensor:
    (pair,) = ring.models[replica].factors.values()
    return (pair.b @ pair.a).detach()


@pytest.mark.parametrize("changes", [{}, {"method": "dpo"}])
def test_three_make_what_one_makes_but_for_rounding(tmp_path: Path, changes: dict[str, Any]) -> None:
    alone, together = Ring(tmp_path / "1", 1, **changes), Ring(tmp_path / "3", 3, **changes)
    assert not together.errors
    torch.testing.assert_close(weights(together), weights(alone), rtol=1e-3, atol=1e-5)
    metrics, expected = together.result.metrics, alone.result.metrics
    assert (metrics.step, metrics.tokens, metrics.train_accuracy) == (
        expected.step,
        expected.tokens,
        expected.train_accuracy,
    )
    assert metrics.valid_loss == pytest.approx(expected.valid_loss, rel=1e-4)
    assert all(torch.equal(weights(together), weights(together, at)) for at in (1, 2)), "each is as the first"
    assert all(model.batches for model in together.models), "each had a part"
    for told in together.told[1:]:
        assert not [one for one in told if isinstance(one, (StateWritten, AdapterWritten))]
        assert isinstance(told[-1], Finished)


@pytest.mark.parametrize("dies", [0, 1])
def test_whichever_dies_the_adapter_is_that_of_an_undisturbed_run(tmp_path: Path, dies: int) -> None:
    calm = Ring(tmp_path / "calm", 2, dropout=0.1)
    for number, layers in enumerate((3, 2, 3)):
        hit = Ring(tmp_path / "hit", 2, die=(dies, layers), dropout=0.1)
        assert isinstance(hit.errors[dies], Died), number
        assert isinstance(hit.errors[1 - dies], Unavailable)
        hit.restored()
    hit = Ring(tmp_path / "hit", 2, dropout=0.1)
    assert not hit.errors
    assert hit.result.digest == calm.result.digest
    tables = [(tmp_path / name / "0" / "steps.csv").read_bytes() for name in ("calm", "hit")]
    assert tables[0] == tables[1]


def first(replicas: int = 2, between: Any = lambda: None) -> FirstReplica:
    return FirstReplica(replicas, "127.0.0.1", SECRET, between)


def further(address: str, secret: str = SECRET, replica: int = 1) -> FurtherReplica:
    return FurtherReplica(replica, 2, address, secret, lambda: None)


def test_strangers_are_sent_away_and_the_replica_is_taken() -> None:
    one = first()
    host, _, port = one.address.rpartition(":")
    socket.create_connection((host, int(port))).close()
    stranger, other = further(one.address, "a guess"), further(one.address)
    found: list[Exception] = []

    def come() -> None:
        try:
            stranger.meet(3, "f" * 64)
        except RyzansteinError as error:
            found.append(error)
        other.meet(3, "f" * 64)

    thread = threading.Thread(target=come)
    thread.start()
    one.meet(3, "f" * 64)
    thread.join()
    stranger.close()
    assert isinstance(found[0], Unavailable)
    one.close()
    with pytest.raises(Unavailable, match="gone"):
        other.add([torch.zeros(2)])
    other.close()


def test_a_greeting_that_one_was_suspended_in_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "GREETING_WITHIN", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    other = further(f"127.0.0.1:{listener.getsockname()[1]}")
    thread = threading.Thread(target=other.meet, args=(3, "f" * 64))
    thread.start()
    stopped, _ = listener.accept()
    stopped.sendall(b"\0" * NONCE_SIZE)  # and then nothing: as the first one, in the middle of its greeting
    nonces = None
    while nonces is None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):  # it has waited for too long again
            by = time.monotonic() + 60
            nonces = challenge(connection, SECRET.encode(), replicas.FIRST, replicas.FURTHER, by)
    thread.join()
    assert connection.recv(4) == b"\1\0\0\0", "the replica says who it is"
    for one in (stopped, connection, listener, other):
        one.close()


def test_one_that_goes_on_from_another_state_is_refused() -> None:
    one = first()
    other = further(one.address)
    thread = threading.Thread(target=other.meet, args=(4, "f" * 64))
    thread.start()
    with pytest.raises(InternalError, match="after step 4, and the first one after step 3"):
        one.meet(3, "f" * 64)
    thread.join()
    one.close()
    other.close()


def test_what_was_changed_on_its_way_is_refused() -> None:
    one = first()
    other = further(one.address)
    thread = threading.Thread(target=other.meet, args=(0, "f" * 64))
    thread.start()
    one.meet(0, "f" * 64)
    thread.join()
    other._link._connection.sendall(b"\0" * 24)
    with pytest.raises(InternalError, match="changed on its way"):
        one.add([torch.zeros(2)])
    one.close()
    other.close()


def test_where_nobody_can_meet_it_is_said_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match="RYZANSTEIN_RING_HOST"):
        FirstReplica(2, "192.0.2.1", SECRET, lambda: None)
    one = first()
    one.close()
    with pytest.raises(InternalError, match="cannot reach the first one"):
        further(one.address).meet(0, "f" * 64)


def test_it_is_paused_while_it_waits_for_others(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, job_of(replicas=2), examples_of(random_texts(8)), secret=SECRET)
    told: list[Any] = []
    pause, model = threading.Event(), StandIn()
    trainer = Trainer(spec, lambda *_: model, told.append, pause, torch.device("cpu"))
    pause.set()
    trainer.run()
    assert isinstance(told[0], Met)
    assert told[1:] == [Paused(0)]
