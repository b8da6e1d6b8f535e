"""Publication, cut off at every one of its steps: whoever does it again ends with the same, once."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.jobs.leases import JobLease, LeaseLost
from services.gateway.training import publication, runner, states
from services.gateway.training.publication import Publication
from services.gateway.training.runner import TrainingRunner
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, StorageFull
from shared.messages.batches import FileRecord
from shared.messages.registry import AdapterRecord
from shared.messages.training import TrainingJob
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles, job_holder, name_holder
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL
from tests.integration.gateway.training.fake_trainer import CSV, HOST, FakeTrainer

JOB = "ftjob-0123456789abcdef"
NAME = f"ft:{MODEL}:::0123456789ab"


class Killed(BaseException):
    """The gateway's end."""


class Until:
    """Lets so many calls pass."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def around(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def done(*args: Any, **named: Any) -> Any:
            if not self.left:
                raise Killed
            self.left -= 1
            return await call(*args, **named)

        return done


class Publishing:
    """Gateways, one after the other, that publish a job."""

    def __init__(self, bus: Bus, settings: GatewaySettings, trainer: FakeTrainer) -> None:
        self.bus, self.settings, self.trainer = bus, settings, trainer
        self.registry = AdapterRegistry(bus, 100.0)
        self.files = Files(bus, settings)

    async def start(self) -> None:
        await self.trainer.start()
        await self.files.start()
        await AdapterFiles(self.bus).open()

    async def run(self, gateway: int, calls: int = 1000) -> None:
        """Raises `Killed` after so many calls that change anything."""
        until = Until(calls)
        lease = await self.lease(f"gateway-{gateway}")
        registry, files = AdapterRegistry(self.bus, 100.0), Files(self.bus, self.settings)
        await files.start()
        for record in (await (await self.adapters()).items()).values():
            registry._set(record.name, record)
        for part, name in (
            (lease, "write"), (registry, "put"), (registry, "remove"), (files, "put"), (self.trainer.events, "add"),
            (self.trainer.objects, "delete"),
        ):  # fmt: skip
            original = getattr(type(part), name).__get__(part)
            setattr(part, name, until.around(original))
        published = Publication(registry, files, self.trainer.events, self.trainer.objects)
        while states.needs_publication(lease.job):
            await published.publish(lease)

    async def lease(self, gateway: str) -> JobLease[TrainingJob]:
        entry = await self.trainer.jobs.bucket.get("", JOB)
        lease = await self.trainer.jobs.claim(entry.key, entry.value, entry.revision, gateway)
        assert lease is not None
        return lease

    async def look(self) -> None:
        """As a gateway that has a place for the job."""
        published = Publication(self.registry, self.files, self.trainer.events, self.trainer.objects)
        await TrainingRunner(await self.lease("gateway-0"), states.needs_publication, published.publish).run()

    async def adapters(self) -> Bucket[AdapterRecord]:
        return await Bucket.open(self.bus, subjects.ADAPTERS_BUCKET, AdapterRecord)

    async def found(self) -> tuple[Any, ...]:
        """What is there, times aside."""
        job = await self.trainer.known(JOB)
        records = await (await self.adapters()).items()
        names = {name: (one.digest, one.tenant, one.job) for name, one in records.items() if one.digest}
        files = [(one.id, one.purpose, one.bytes) for one in await self.files.listed("", None)]
        events = sorted([entry.value.kind async for entry in self.trainer.events.of("", JOB)])
        shown = msgspec.structs.replace(job, finished_at=0.0, beat=0, adapters=[], result=None)
        return shown, names, files, events


@pytest.fixture
async def publishing(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> Publishing:
    made = Publishing(bus, GatewaySettings(**nats_settings.model_dump()), FakeTrainer(bus, tmp_path))
    await made.start()
    return made


async def trained(trainer: FakeTrainer) -> None:
    """A job that has made four checkpoints, of which its host keeps three, and its result."""
    job = TrainingJob(
        JOB, "", 1.0, MODEL, "supervised", "file-1", "file-1", 1, status="running", host=HOST, attempt=1, steps=4
    )
    await trainer.jobs.create(job)
    for step in range(1, 4):
        await trainer.checkpoint(JOB, step, step)
    await trainer.finish(JOB, 9)


@pytest.mark.slow
async def test_whoever_goes_on_ends_with_the_same(publishing: Publishing) -> None:
    trainer = publishing.trainer
    outcomes, calls = [], -1
    while True:
        await trained(trainer)
        try:
            await publishing.run(0, 1000 if calls < 0 else calls)
        except Killed:
            await publishing.run(1)
            ended = False
        else:
            ended = calls >= 0
        outcomes.append(await publishing.found())
        calls += 1
        if ended:
            break
        await forget(publishing)
    job, names, files, events = outcomes[0]
    assert (job.status, job.fine_tuned_model, job.clean, job.owner) == ("succeeded", NAME, True, "")
    assert sorted(names) == [NAME, *(f"{NAME}:ckpt-step-{step}" for step in (1, 2, 3))]
    assert {(tenant, made) for _, tenant, made in names.values()} == {("", JOB)}
    assert files == [("file-0123456789abcdefmetrics", "fine-tune-results", len(CSV))]
    assert events == ["checkpoint"] * 3 + ["job_succeeded", "model_created"]
    assert len(outcomes) > 10, "it was killed at each of its steps"
    for killed in outcomes[1:]:
        assert killed == outcomes[0]
    assert await trainer.objects.info(f"{JOB}/metrics.csv") is None
    held = await (await adapter_files(publishing)).holders()
    assert {holder for one in held.values() for holder in one.holders} == {name_holder(name) for name in names}


async def adapter_files(publishing: Publishing) -> AdapterFiles:
    files = AdapterFiles(publishing.bus)
    await files.open()
    return files


async def forget(publishing: Publishing) -> None:
    """As if nothing had been."""
    bucket = await publishing.adapters()
    for name in await bucket.items():
        await bucket.delete(name)
    for file in await publishing.files.listed("", None):
        await publishing.files.delete(file.id, "")
    trainer = publishing.trainer
    await trainer.events.clear("", JOB)
    await trainer.jobs.forget(await trainer.known(JOB))


async def test_checkpoints_that_a_job_drops_lose_their_names_and_files(publishing: Publishing) -> None:
    trainer = publishing.trainer
    await trained(trainer)
    await trainer.write(JOB, result=None, metrics_object="")
    await publishing.run(0)
    dropped = (await trainer.known(JOB)).adapters[0]
    await trainer.checkpoint(JOB, 4, 4)
    files = AdapterFiles(publishing.bus)
    await files.open()
    await files.release(dropped.digest, job_holder(JOB, dropped.step))  # as its host does
    assert await files.has(dropped.digest), "its name has it"
    await publishing.run(1)
    assert not await files.has(dropped.digest)
    records = await (await publishing.adapters()).items()
    kept = {name for name, one in records.items() if one.digest}
    assert kept == {f"{NAME}:ckpt-step-{step}" for step in (2, 3, 4)}
    assert {one.name for one in (await trainer.known(JOB)).adapters} == kept


@pytest.mark.parametrize("names", [0, 1, 3])
async def test_a_full_registry_fails_the_job_with_its_reason(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """While it runs still, too; what has a name keeps it."""
    trainer = publishing.trainer
    await trained(trainer)
    monkeypatch.setattr("services.gateway.core.adapters.MAX_PER_MODEL", names)
    await publishing.run(0)
    job = await trainer.known(JOB)
    assert (job.status, job.host, job.result, job.clean) == ("failed", "", None, True)
    assert job.error.code == "too_many_adapters"
    assert f"limit {names}, fixed" in job.error.message
    assert [one.name for one in job.adapters] == [f"{NAME}:ckpt-step-{step + 1}" for step in range(names)]
    said = [entry.value async for entry in trainer.events.of("", JOB) if entry.value.kind == "job_failed"]
    assert [(one.level, one.message) for one in said] == [("error", job.error.message)]


async def test_a_full_registry_leaves_a_cancelled_job_cancelled(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = publishing.trainer
    await trained(trainer)
    await trainer.write(JOB, status="cancelled", result=None, host="")
    monkeypatch.setattr("services.gateway.core.adapters.MAX_PER_MODEL", 0)
    await publishing.run(0)
    job = await trainer.known(JOB)
    assert (job.status, job.error, job.adapters, job.clean) == ("cancelled", None, [], True)


async def test_without_room_for_its_file_a_result_waits_and_says_so(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = publishing.trainer
    await trained(trainer)

    async def no_room(files: Files, *_: Any) -> None:
        raise StorageFull("It is full.")

    monkeypatch.setattr(Files, "put", no_room)
    await publishing.look()
    job = await trainer.known(JOB)
    assert (job.status, job.waiting_for, job.owner, job.tries) == ("running", "It is full.", "", 1)
    assert job.blocked_since < job.look_at
    monkeypatch.setattr(publication, "FILES_WITHIN", 0.0)
    await publishing.run(1)
    job = await trainer.known(JOB)
    assert (job.tries, job.blocked_since, job.look_at) == (0, 0.0, 0.0)
    assert (job.status, job.result_files, job.waiting_for) == ("succeeded", [], "")
    said = [entry.value.message async for entry in trainer.events.of("", JOB)]
    assert any("It is full." in one for one in said)


async def test_lost_metrics_cost_the_file_alone(publishing: Publishing) -> None:
    trainer = publishing.trainer
    await trained(trainer)
    await trainer.objects.delete(f"{JOB}/metrics.csv")
    await publishing.run(0)
    job = await trainer.known(JOB)
    assert (job.status, job.result_files) == ("succeeded", [])


async def test_a_failure_that_cannot_be_written_is_tried_again_until_another_has_the_job(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.jobs.leases.RENEW", 0.05)
    monkeypatch.setattr(runner, "BROKER_PAUSE", 0.0)
    trainer, tried = publishing.trainer, 0
    await trained(trainer)

    async def step(lease: JobLease[TrainingJob]) -> None:
        nonlocal tried
        tried += 1
        if tried == 3:
            monkeypatch.setattr(lease.bucket, "update", update)
            await trainer.write(JOB, owner="gateway-2")
        raise BrokerUnavailable("Nobody answers.")

    async def away(*_: object) -> int | None:
        raise BrokerUnavailable("Nobody answers.")

    lease = await publishing.lease("gateway-1")
    update = lease.bucket.update
    monkeypatch.setattr(lease.bucket, "update", away)
    running = TrainingRunner(lease, states.needs_publication, step)
    with pytest.raises(LeaseLost):
        await running.run()
    assert tried == 3
    await running.release()
    assert (await trainer.known(JOB)).owner == "gateway-2"


async def test_a_tenant_whose_results_find_no_room_holds_up_nobody_else(
    nats_settings: CommonSettings, bus: Bus, tmp_path: Path
) -> None:
    """Its files are full, and it has a job for every place."""
    hog = FakeTrainer(bus, tmp_path / "hog", "hog")
    other = FakeTrainer(bus, tmp_path / "other", "other")
    async with run_gateway(nats_settings, tenant_file_bytes=1000):
        await hog.start()
        await other.start()
        files = Files(bus, GatewaySettings(**nats_settings.model_dump()))
        await files.start()
        await files.publish(FileRecord("file-1", "hog", "f", "batch", 1.0, "file-1", bytes=2000))
        stuck = [f"ftjob-{number:012x}cdef" for number in range(runner.PUBLISHED_AT_ONCE)]
        for job in stuck:
            await finished(hog, job)
        for job in stuck:
            await hog.until(job, lambda known: known.tries > 0)
        await finished(other, JOB)
        await other.until(JOB, lambda known: known.status == "succeeded" and known.clean)
        for job in stuck:
            known = await hog.known(job)
            assert known.status == "running"
            assert "RYZANSTEIN_TENANT_FILE_BYTES" in known.waiting_for


async def finished(trainer: FakeTrainer, name: str) -> None:
    """A job of which only the result is to be published."""
    job = TrainingJob(
        name, trainer.tenant, 1.0, MODEL, "supervised", "file-1", "file-1", 1, status="running", host=HOST,
        attempt=1, steps=4,
    )  # fmt: skip
    await trainer.jobs.create(job)
    await trainer.finish(name, 9)
