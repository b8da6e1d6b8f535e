"""What a trainer writes, on its way into object stores that are full, away, or another's by now."""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.executor.ipc.trainer_pipe import AdapterWritten, Finished, StateWritten
from services.executor.supervisor.trainings import job_record, job_storage
from services.executor.supervisor.trainings.job_files import JobFiles
from services.executor.supervisor.trainings.job_record import LocalJobRecord, NotMine
from services.executor.supervisor.trainings.job_storage import JobStorage, OverReserved
from shared.errors import BrokerUnavailable, StorageFull
from shared.messages.training import TrainedAdapter, TrainingJob, TrainingMetrics, TrainingState
from shared.nats.kv import KvEntry
from shared.nats.tenants import TenantBucket

JOB = TrainingJob("job", "t", 1.0, "m", "supervised", "f", "f", 1, status="running", host="h", attempt=1)


class FakeBucket:
    """One record, which others may write too."""

    def __init__(self) -> None:
        self.job, self.revision = JOB, 1

    async def get(self, tenant: str, job: str) -> KvEntry[TrainingJob]:
        return KvEntry("t.job", self.job, self.revision)

    async def update(self, key: str, job: TrainingJob, revision: int) -> int | None:
        if revision != self.revision:
            return None
        self.job, self.revision = job, revision + 1
        return self.revision

    def other(self, **fields: Any) -> None:
        """Somebody else writes it."""
        self.job, self.revision = msgspec.structs.replace(self.job, **fields), self.revision + 1


class FakeFiles:
    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.stored: list[str] = []
        self.removed: list[str] = []
        self.away = 0  # times that nothing can be removed

    async def put_state(self, written: StateWritten) -> TrainingState:
        self._fail()
        self.stored.append(written.file)
        return TrainingState(written.step, f"job/1/{written.file}", written.bytes, written.digest)

    async def put_adapter(self, written: AdapterWritten) -> None:
        self._fail()
        self.stored.append(written.directory)

    async def put_metrics(self, file: str) -> str:
        self._fail()
        return f"job/1/{file}"

    async def remove(self, name: str) -> None:
        if self.away:
            self.away -= 1
            raise BrokerUnavailable("It is away.")
        self.removed.append(name)

    async def remove_adapter(self, adapter: TrainedAdapter) -> None:
        self.removed.append(adapter.digest)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class World:
    def __init__(self, directory: Path) -> None:
        self.bucket, self.files = FakeBucket(), FakeFiles()
        bucket = cast("TenantBucket[TrainingJob]", self.bucket)
        self.record = LocalJobRecord(bucket, "h", "t", "job", 1)
        self.storage = JobStorage(self.record, cast("JobFiles", self.files), directory, self.tell)
        self.directory = directory
        self.untold: list[int] = []  # steps of which no event was published yet
        self.told: list[int] = []
        self.away = 0  # times that no event can be published

    async def tell(self) -> None:
        while self.untold:
            if self.away:
                self.away -= 1
                raise BrokerUnavailable("It is away.")
            self.told.append(self.untold.pop(0))

    async def begin(self) -> None:
        await self.record.read()

    def state(self, step: int) -> Path:
        path = self.directory / f"state-{step}"
        path.write_bytes(b"state")
        self.storage.add(StateWritten(step, path.name, 5, "d"))
        return path

    def adapter(self, step: int, *, is_result: bool = False) -> None:
        (self.directory / f"adapter-{step}").mkdir()
        metrics = TrainingMetrics(step)
        self.storage.add(AdapterWritten(step, f"adapter-{step}", f"d{step}", 4, 10, metrics, is_result))

    async def run(self) -> None:
        self.storage.close()
        await asyncio.wait_for(self.storage.run(), 30)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(job_storage, "STORE_PAUSE", 0.0)
    monkeypatch.setattr(job_record, "RETRY", 0.0)
    made = World(tmp_path)
    await made.begin()
    return made


async def test_of_several_states_the_newest_is_stored_and_the_older_object_goes(world: World) -> None:
    paths = [world.state(step) for step in (1, 2, 3)]
    await world.run()
    assert world.files.stored == ["state-3"]
    assert not any(path.exists() for path in paths)
    assert world.bucket.job.state == TrainingState(3, "job/1/state-3", 5, "d")
    world.state(4)
    await world.run()
    assert world.files.removed == ["job/1/state-3"]
    world.files.away = 2
    world.state(5)
    await world.run()
    assert world.files.removed == ["job/1/state-3", "job/1/state-4"]


async def test_adapters_are_named_and_the_result_waits_for_the_metrics(world: World) -> None:
    for step in (1, 2, 3, 4):
        world.adapter(step)
    world.adapter(5, is_result=True)
    world.storage.add(Finished("steps.csv", 90))
    await world.run()
    assert [one.step for one in world.bucket.job.adapters] == [2, 3, 4]
    assert world.files.removed == ["d1"]
    assert (world.storage.result.digest, world.storage.metrics_object) == ("d5", "job/1/steps.csv")
    assert world.storage.finished == Finished("steps.csv", 90)
    assert world.bucket.job.result is None, "it is written with all that belongs to it"
    assert not list(world.directory.iterdir())


async def test_a_broker_that_is_away_is_waited_for(world: World) -> None:
    world.files.failures = [BrokerUnavailable("It is away.")] * 3
    world.state(1)
    await world.run()
    assert world.bucket.job.state is not None


async def test_events_are_published_before_the_state_that_covers_them(world: World) -> None:
    """Who goes on from a state publishes no event of the steps before it."""
    world.untold, world.away = [1, 2, 3], 2
    named: list[list[int]] = []
    update = world.bucket.update

    async def watched(key: str, job: TrainingJob, revision: int) -> int | None:
        named.append(list(world.told))
        return await update(key, job, revision)

    world.bucket.update = watched  # type: ignore[method-assign]
    world.state(3)
    await world.run()
    assert named == [[1, 2, 3]]
    assert world.bucket.job.state is not None


async def test_room_is_waited_for_and_said_to_lack(world: World) -> None:
    world.files.failures = [StorageFull("It is full.")] * 2
    world.state(1)
    said: list[str] = []
    fail = world.files._fail

    def watched() -> None:
        said.append(world.storage.full)
        fail()

    world.files._fail = watched  # type: ignore[method-assign]
    await world.run()
    assert said == ["", *["What it has learned cannot be stored: It is full."] * 2]
    assert world.storage.full == ""
    assert world.bucket.job.state is not None


async def test_without_room_for_too_long_it_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_storage, "STORE_PATIENCE", 0.0)
    world.files.failures = [StorageFull("It is full.")]
    world.state(1)
    with pytest.raises(StorageFull):
        await world.run()


async def test_a_training_that_is_to_end_waits_for_no_room(world: World) -> None:
    world.files.failures = [StorageFull("It is full.")]
    world.storage.hurries = True
    world.state(1)
    await world.run()
    assert world.bucket.job.state is None


async def test_no_more_is_stored_than_was_reserved(world: World) -> None:
    """Two states of 5 bytes beside 3 adapters of 10 fit, and one more byte does not."""
    world.bucket.other(storage=40)
    await world.begin()
    for step in (1, 2, 3):
        world.adapter(step)
        world.state(step)
    await world.run()
    world.adapter(4)
    with pytest.raises(OverReserved) as refused:
        await world.run()
    assert "RYZANSTEIN_TENANT_TRAINING_BYTES" in refused.value.message
    assert [one.step for one in world.bucket.job.adapters] == [1, 2, 3]
    assert "adapter-4" not in world.files.stored


async def test_what_others_write_is_kept_and_what_is_anothers_is_left(world: World) -> None:
    world.bucket.other(wanted="pause")
    world.state(1)
    await world.run()
    assert (world.bucket.job.wanted, world.bucket.job.state is not None) == ("pause", True)
    world.bucket.other(host="i", attempt=2)
    world.state(2)
    with pytest.raises(NotMine):
        await world.run()
    assert world.bucket.job.state.step == 1
    assert world.files.removed == ["job/1/state-2"], "nobody else knows of it"
