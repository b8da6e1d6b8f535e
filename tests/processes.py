"""Service processes for tests: started for real, waited for by their heartbeats, ended by their signal."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import psutil

from shared.config import CommonSettings
from shared.messages import Heartbeat
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.process import die_with_parent
from tests.forked import ForkedProcess, fork


class ServiceProcess:
    """One service, with the heartbeats it has sent."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, log: Path) -> None:
        self.process = process
        self.log = log
        self.beats: list[Heartbeat] = []
        self._news = asyncio.Event()

    async def on_beat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)
        self._news.set()

    async def wait_for(self, condition: Callable[[Heartbeat], bool], timeout: float = 60) -> Heartbeat:
        """The next heartbeat that fulfils `condition`; fails with the log as soon as the process has ended."""
        ended = asyncio.create_task(self.process.wait())
        try:
            async with asyncio.timeout(timeout):
                return await self._next(condition, ended)
        except TimeoutError:
            beat = self.beats[-1] if self.beats else None
            raise AssertionError(f"waited {timeout:g} s; the last beat was {beat}\n{self.log.read_text()}") from None
        finally:
            ended.cancel()

    async def _next(self, condition: Callable[[Heartbeat], bool], ended: "asyncio.Task[int]") -> Heartbeat:
        seen = max(0, len(self.beats) - 1)
        while True:
            self._news.clear()
            for beat in self.beats[seen:]:
                if condition(beat):
                    return beat
            seen = len(self.beats)
            assert not ended.done(), f"it ended with {ended.result()}\n{self.log.read_text()}"
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({news, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()

    async def wait_ready(self, timeout: float = 60) -> Heartbeat:
        return await self.wait_for(
            lambda beat: beat.state == "ready" and (beat.group is None or beat.group.state == "ready"), timeout
        )

    def logged_last(self, characters: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:]

    async def leave(self) -> None:
        """Tells it to end, unless it has; whatever its exit code, and killed where it does not."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), 20)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 30)


async def _executed(
    python: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> asyncio.subprocess.Process:
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(python, "-m", module, *arguments),
            env=environment,
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )


def nats_variables(settings: CommonSettings) -> dict[str, str]:
    """Variables that say where NATS is."""
    return {
        "RYZANSTEIN_NATS_URL": settings.nats_url,
        "RYZANSTEIN_NATS_USER": settings.nats_user,
        "RYZANSTEIN_NATS_PASSWORD": settings.nats_password.get_secret_value(),
    }


def nats_address(settings: CommonSettings) -> str:
    """The same in one URL."""
    user, password = settings.nats_user, settings.nats_password.get_secret_value()
    return settings.nats_url.replace("nats://", f"nats://{user}:{password}@")


@contextlib.asynccontextmanager
async def service_process(
    bus: Bus,
    settings: CommonSettings,
    module: str,
    directory: Path,
    *arguments: str,
    instance: str,
    variables: Mapping[str, str] | None = None,
    forked: bool = True,
    python: str = "",
) -> AsyncIterator[ServiceProcess]:
    """Starts `python -m module arguments` on the test's NATS; whatever happens, nothing is left running.
    `variables` of its environment, besides those that say where NATS is. `forked`: of a process that has done its
    imports, see `tests/forked.py`; else, and where `variables` has it import other modules, it is a program of its own.
    `python`: another environment's, whose packages are taken and nothing of this tree.

    An executor that is told to end hands back what still runs at once; a test of its grace names one."""
    log = directory / f"{instance}.log"
    environment = {
        **os.environ,
        "RYZANSTEIN_DRAIN_GRACE": "0",
        **(variables or {}),
        "RYZANSTEIN_DUMP_DIRECTORY": str(directory / "dumps"),
        **nats_variables(settings),
        "RYZANSTEIN_INSTANCE": instance,
        "RYZANSTEIN_BEAT_INTERVAL": str(settings.beat_interval),
    }
    if python:
        environment |= {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    alone = not forked or bool(python) or "PYTHONPATH" in (variables or {})
    start = (
        (await _executed(python or sys.executable, module, arguments, environment, log))
        if alone
        # The first one waits for the imports: too long for whatever else goes on in this event loop.
        else await asyncio.to_thread(fork, module, arguments, environment, log)
    )
    running = ServiceProcess(start, log)
    subscription = await bus.subscribe("health.beats.*." + subjects.escape(instance), Heartbeat, running.on_beat)
    try:
        yield running
    except BaseException as error:
        error.add_note(f"what {instance} logged last:\n{running.logged_last()}")
        raise
    finally:
        await subscription.unsubscribe()
        await running.leave()


async def until_status(pid: int, *wanted: str) -> None:
    """Waits until the process is in one of these states, as psutil says them; none: it has ended."""
    async with asyncio.timeout(60):
        while True:
            try:
                found = psutil.Process(pid).status()
            except psutil.NoSuchProcess:
                found = psutil.STATUS_ZOMBIE
            if found in (wanted or (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)):
                return
            await asyncio.sleep(0.01)
