"""What is kept for a while: dumps in a directory, jobs and their files, how long counters stand still; which profiles
there cannot be."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.diagnostics import service as jobs_module
from services.executor.supervisor.diagnostics.dump import settings_of, write_dump
from services.executor.supervisor.diagnostics.service import DiagnosticJobs, Job, refusal
from services.executor.supervisor.diagnostics.verdict import ProgressAge
from shared.errors import ConfigurationError
from shared.messages.debugging import DUMP_VERSION, Dump, JobReply, Piece, ProfileCommand


def dump(at: float, group: str = "g/1") -> Dump:
    return Dump(DUMP_VERSION, group, "m", "i", "h", 1, at, 0.1, "It is idle.", "ready")


def test_the_newest_dumps_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "dumps"
    (tmp_path / "made").mkdir()
    paths = [write_dump(directory, dump(1000.0 + second), 3) for second in range(5)]
    (directory / "notes.txt").touch()
    write_dump(directory, dump(1005.0, "another"), 3)
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [paths[3].name, paths[4].name, "dump-another-19700101T001645-000.json", "notes.txt"]
    )
    assert msgspec.json.decode(paths[4].read_bytes(), type=Dump) == dump(1004.0)
    assert (paths[4].stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_dump_holds_no_secret() -> None:
    settings = ExecutorSettings(nats_password="hush-1", nats_url="nats://user:hush-2@host:4222", served_model_name="m")
    shown = msgspec.json.encode(settings_of(settings)).decode()
    assert "hush" not in shown
    assert "nats://host:4222" in shown


def test_counters_stand_still_from_when_they_last_moved() -> None:
    still = ProgressAge()
    assert still.seconds("a", 5.0) == 0.0
    still.look({"a": 1, "b": 1}, 10.0)
    still.look({"a": 1, "b": 2}, 12.0)
    assert (still.seconds("a", 13.0), still.seconds("b", 13.0)) == (3.0, 1.0)
    still.look({"a": 1}, 14.0)
    assert still.seconds("b", 15.0) == 0.0


async def finished(jobs: DiagnosticJobs, job: Job) -> JobReply:
    async with asyncio.timeout(10):
        while True:
            reply = jobs.result(job.identity)
            if reply.done:
                return reply
            await asyncio.sleep(0)


async def test_files_of_a_job_are_fetched_in_pieces() -> None:
    jobs = DiagnosticJobs("executor-1")

    async def work(directory: Path) -> None:
        (directory / "file").write_bytes(b"abcdef")

    reply = await finished(jobs, job := await jobs.begin(work))
    assert [(file.name, file.size) for file in reply.files] == [("file", 6)]
    assert await jobs.piece(job.identity, "file", 4, 4) == Piece(b"ef")
    assert await jobs.piece(job.identity, "file", 6, 4) == Piece(b"")
    assert await jobs.piece(job.identity, "../file", 0, 4) == Piece(b"")
    assert await jobs.piece("executor-1/unknown", "file", 0, 4) == Piece(b"")
    assert await jobs.piece("executor-2/1", "file", 0, 4) is None, "another executor answers"
    assert jobs.result("executor-2/1") is None
    await jobs.close()
    assert not job.directory.exists()


async def test_a_job_that_fails_says_why() -> None:
    jobs = DiagnosticJobs("i")

    async def refuse(directory: Path) -> None:
        raise ConfigurationError("There is nothing to see.")

    async def fail(directory: Path) -> None:
        raise KeyError("x")

    assert (await finished(jobs, await jobs.begin(refuse))).error == "There is nothing to see."
    assert "KeyError" in (await finished(jobs, await jobs.begin(fail))).error
    await jobs.close()


async def test_old_jobs_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MOST_JOBS", 2)
    jobs = DiagnosticJobs("i")

    async def work(directory: Path) -> None:
        (directory / "file").write_bytes(b"x")

    made = []
    for _ in range(4):
        made.append(await jobs.begin(work))
        await finished(jobs, made[-1])
    told = [jobs.result(job.identity) for job in made]
    assert [bool(reply and reply.error) for reply in told] == [True, True, False, False]
    assert [job.directory.exists() for job in made] == [False, False, True, True]
    await jobs.close()


def ring(*, ready: bool) -> Any:
    event = asyncio.Event()
    if ready:
        event.set()
    return SimpleNamespace(ready=event)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (ProfileCommand(), ""),
        (ProfileCommand(ranks=[2]), "has no rank 2; its ranks are 0 to 1"),
        (ProfileCommand(steps=501), "at most 500 steps or 60 s; ask for less"),
        (ProfileCommand(seconds=61.0), "at most 500 steps or 60 s; ask for less"),
        (ProfileCommand(steps=0), "give --steps or --seconds"),
        (ProfileCommand(timeout=0.0), "must be above 0 s and at most 600 s"),
    ],
)
def test_a_profile_is_within_its_bounds(command: ProfileCommand, why: str) -> None:
    found = refusal(command, ExecutorSettings(model="m", tp=2), ring(ready=True), "g")
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("lost", [None, ring(ready=False)], ids=["no ring", "starting"])
def test_without_a_ring_nothing_is_profiled(lost: Any) -> None:
    assert "has no ring that is ready" in refusal(ProfileCommand(), ExecutorSettings(model="m"), lost, "g")
