"""What the debugging has produced and somebody may still fetch: a few jobs, some files each, for a while."""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from shared.errors import RyzansteinError
from shared.messages.debugging import JobFile, JobReply, Piece

log = structlog.get_logger(__name__)

MOST_JOBS = 8
MOST_BYTES = 512 << 20
"""Of all jobs' files."""
KEPT_FOR = 600.0
"""Seconds."""

Work = Callable[[Path], Awaitable[None]]
"""Leaves its files in that directory. Raises `RyzansteinError` with the reason where there are none."""


class Job:
    """One piece of work, and its files."""

    def __init__(self, identity: str, directory: Path, work: Work) -> None:
        self.identity = identity
        self.directory = directory
        self.began = time.monotonic()
        self.error = ""
        directory.mkdir()
        self._task = asyncio.create_task(self._run(work))

    @property
    def done(self) -> bool:
        return self._task.done()

    def files(self) -> list[JobFile]:
        return [JobFile(path.name, path.stat().st_size) for path in sorted(self.directory.iterdir())]

    def reply(self) -> JobReply:
        if not self.done:
            return JobReply(self.identity)
        return JobReply(self.identity, True, self.error, [] if self.error else self.files())

    async def remove(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.directory, True)

    async def _run(self, work: Work) -> None:
        try:
            await work(self.directory)
        except RyzansteinError as error:
            self.error = str(error)
        except Exception as error:
            log.exception("debug_failed")
            self.error = f"The dump or profile failed ({type(error).__name__}: {error}); the executor's log says where."


class Jobs:
    """All of them. Methods belong to one event loop."""

    def __init__(self, instance: str) -> None:
        """`instance`: of the executor, by which it knows its own jobs."""
        self._prefix = f"{instance}/"
        self._directory = Path(tempfile.mkdtemp(prefix="ryzanstein-debug-"))
        self._jobs: dict[str, Job] = {}

    async def begin(self, work: Work) -> Job:
        await self._forget_old()
        token = secrets.token_hex(8)
        job = Job(self._prefix + token, self._directory / token, work)
        self._jobs[job.identity] = job
        return job

    def result(self, identity: str) -> JobReply | None:
        """None: it is another executor's."""
        if not identity.startswith(self._prefix):
            return None
        job = self._jobs.get(identity)
        if job is None:
            return JobReply(identity, True, "The executor does not have the result any more; ask again.")
        return job.reply()

    async def piece(self, identity: str, name: str, offset: int, size: int) -> Piece | None:
        """`size` bytes of a job's file; None: it is another executor's."""
        if not identity.startswith(self._prefix):
            return None
        job = self._jobs.get(identity)
        if job is None or not job.done or name not in [file.name for file in job.files()]:
            return Piece(b"")
        return Piece(await asyncio.to_thread(_read, job.directory / name, max(0, offset), size))

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            await job.remove()
        self._jobs.clear()
        await asyncio.to_thread(shutil.rmtree, self._directory, True)

    async def _forget_old(self) -> None:
        """The oldest that are over, beyond the limits; those that are not over are few by themselves."""
        now = time.monotonic()
        over = [job for job in self._jobs.values() if job.done]
        size = sum(file.size for job in over for file in job.files())
        for job in over:
            if len(self._jobs) < MOST_JOBS and size <= MOST_BYTES and now - job.began < KEPT_FOR:
                continue
            size -= sum(file.size for file in job.files())
            with contextlib.suppress(KeyError):
                del self._jobs[job.identity]
            await job.remove()


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
