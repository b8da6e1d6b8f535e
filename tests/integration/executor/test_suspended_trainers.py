"""Trainers that stand still while their executor, or the first of their own processes, is killed: none is left."""

import asyncio
import contextlib
import os
import signal
import sys

import psutil
import pytest

from tests.processes import until_status

SUSPENDS_ITS_TRAINER = """
import asyncio, ctypes, os, signal, sys
from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.trainings import trainer_process
from services.executor.ipc.trainer_pipe import TrainerSpec
from shared.messages.training import TrainingJob

if "posix" in sys.argv:
    trainer_process._die_with_parent = None
if "first" in sys.argv:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as an executor with a fork server
trainer_process.STUB = "tests.integration.executor.idle_trainer"

async def main():
    settings = ExecutorSettings(engine="stub")
    job = TrainingJob("job", "t", 0.0, "base", "supervised", "f", "f", 3)
    spec = TrainerSpec(job, "", "", settings.model_dump(mode="json"), 1)
    process = await trainer_process.TrainerProcess.start(spec, settings, {})
    pids = [process.pid] + [event.step async for event in first(process)]
    process.suspend()
    print(*pids, flush=True)
    if "first" in sys.argv:
        os.kill(process.pid, signal.SIGKILL)
        async for event in process.events():
            print("unexpected", event)
        print(await process.end(), flush=True)
    await asyncio.Event().wait()

async def first(process):
    async for event in process.events():
        yield event
        return

asyncio.run(main())
"""


async def suspending(how: str) -> tuple[asyncio.subprocess.Process, list[int]]:
    """An executor, and the processes of its trainer."""
    executor = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", SUSPENDS_ITS_TRAINER, how),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # whoever gets its children is then in another one
    )
    return executor, [int(word) for word in (await executor.stdout.readline()).split()]


@pytest.mark.parametrize("how", ["linux", "posix"])
async def test_suspended_ones_end_with_their_executor(how: str) -> None:
    """All processes of it; by the kernel's signal for a parent's death, and without it."""
    executor, pids = await suspending(how)
    assert len(pids) == 2
    for pid in pids:
        await until_status(pid, psutil.STATUS_STOPPED)
    executor.kill()
    await executor.wait()
    for pid in pids:
        await until_status(pid)


async def test_of_ranks_whose_first_was_killed_while_they_stood_still_none_is_left() -> None:
    """The others have not asked the kernel yet to end with it, and hold its pipe open."""
    executor, pids = await suspending("first")
    assert executor.stdout is not None
    try:
        assert await asyncio.wait_for(executor.stdout.readline(), 30) == b"signal SIGKILL\n"
        for pid in pids:
            await until_status(pid)
    finally:
        executor.kill()
        await executor.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
