"""Takes a dump of a ring from outside, as the supervisor: whatever state its ranks are in.

question on standard input ──▶ stacks, queues, blocks  needs a thread of Python that runs: it is waited for briefly
signal ──▶ stacks, by a file per rank                  of ranks that neither answer nor go on: needs no interpreter,
                                                       only a process that is not stopped
/proc  ──▶ threads, twice                              needs nothing
memory ──▶ board, flight recorder                      needs nothing

Of dumps that are written without being asked for the last few are kept, in one directory.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.flight_recorder import Collective, StepTimes
from services.executor.ipc.rank_pipe import StateAnswer, StateQuestion, ask, stack_file
from services.executor.supervisor.diagnostics import processes
from services.executor.supervisor.diagnostics.processes import ProcessSample, StackRequest
from services.executor.supervisor.diagnostics.verdict import ProgressAge, verdict
from services.executor.supervisor.ring import Ring
from shared.keys import redact
from shared.messages import RankBeat
from shared.messages.debugging import DUMP_VERSION, CollectiveDump, Dump, RankDump, StepDump
from shared.nats.errors import without_password

LOOK = 0.02  # seconds between two looks for answers
WINDOW = 0.1  # seconds over which a thread's use of the CPU is measured, at least
# Seconds, or half of those that there are, for which a rank has neither answered nor gone on when it is signalled.
ANSWER_TIME = 1.0
STEPS_SHOWN = 16
PACKAGES = ("ryzanstein", "torch", "transformers", "numpy", "msgspec", "nats-py", "llguidance")


class GroupDump(msgspec.Struct, frozen=True):
    group: str
    model: str
    instance: str
    message: str = ""


async def take_dump(
    ring: Ring | None, group: GroupDump, settings: ExecutorSettings, still: ProgressAge, wait: float, reason: str = ""
) -> Dump:
    """`wait`: seconds for which ranks that do not answer are waited for. `ring`: None where there is none."""
    began, at = time.monotonic(), time.time()
    parts = await _gather(ring, still, wait) if ring is not None else {"epoch": 0, "state": "none"}
    found = Dump(
        version=DUMP_VERSION,
        group=group.group,
        model=group.model,
        instance=group.instance,
        host=platform.node(),
        taken_at=at,
        took=round(time.monotonic() - began, 3),
        verdict="",
        reason=reason,
        message=group.message,
        versions=versions(),
        settings=settings_of(settings),
        **parts,
    )
    return msgspec.structs.replace(found, verdict=verdict(found))


async def _gather(ring: Ring, still: ProgressAge, wait: float) -> dict[str, Any]:
    """Fields of the dump."""
    name, board, pids = f"{time.monotonic_ns():x}", ring.board, ring.pids
    before = await asyncio.to_thread(_samples, pids)
    at = time.monotonic()
    ranks = [_Rank(ring, rank, name, sample) for rank, sample in enumerate(before)]
    await _wait(lambda: _are_complete(ranks, min(ANSWER_TIME, wait / 2)), at + wait)
    await asyncio.sleep(WINDOW - (time.monotonic() - at))
    after = await asyncio.to_thread(_samples, pids)
    now = time.monotonic()
    beats = {beat.rank: beat for beat in board.beats()}
    answers = [rank.answer() for rank in ranks]
    found = []
    for number, (rank, answer, sample) in enumerate(zip(ranks, answers, after, strict=True)):
        still_seconds = still.seconds(("rank", number), now)
        found.append(rank.dump(answer, beats.get(number), sample, now - at, still_seconds))
    return {
        "epoch": ring.epoch,
        "state": ring.state,
        "loaded": ring.loaded,
        "loop_still_seconds": still.seconds(("loop", 0), now) if ring.ready.is_set() else 0.0,
        "load": msgspec.to_builtins(board.load),
        "totals": board.totals.as_dict(),
        "ranks": found,
        "leader": answers[0].leader if answers and answers[0] else None,
        "plans": ring.flight.plans.read(),
    }


def _are_complete(ranks: list["_Rank"], patience: float) -> bool:
    """Each is looked at, so that each is signalled when it is time."""
    complete = [rank.is_complete(patience) for rank in ranks]
    return all(complete)


def _samples(pids: list[int]) -> list[ProcessSample]:
    return [processes.sample(pid) for pid in pids]


class _Rank:
    """One rank, asked for its state at once."""

    def __init__(self, ring: Ring, number: int, name: str, sample: ProcessSample) -> None:
        self._ring, self._number, self._before = ring, number, sample
        self._path = ring.directory / f"state-{name}-{number}"
        self._stopped = sample.state in processes.STOPPED
        self._request: StackRequest | None = None
        self._progress, self._moved = self._look(), time.monotonic()
        ring.ask(number, ask(StateQuestion(str(self._path))))

    @property
    def _told(self) -> bool:
        return self._path.exists()

    def is_complete(self, patience: float) -> bool:
        """Whether there is nothing more to wait for, as for a stopped process. One that neither answers nor goes on
        for `patience` seconds is asked for its stacks by a signal; its own answer, which may come yet, says more."""
        if self._told or self._stopped:
            return True
        if self._request is None and self._still() >= patience:
            self._request = StackRequest(self._before.pid, stack_file(self._ring.directory, self._number))
        return self._request is not None and bool(self._request.missing)

    def _still(self) -> float:
        """Seconds for which it has done nothing: a rank that goes on is only slow to answer, and the signal's handler
        would read frames that change meanwhile."""
        progress = self._look()
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        return time.monotonic() - self._moved

    def _look(self) -> tuple[int, ...]:
        ring, number = self._ring, self._number
        beats = [(beat.step, beat.progress) for beat in ring.board.beats() if beat.rank == number]
        return (ring.board.begun(number), ring.flight.read(number).collective.begun, *(beats[0] if beats else ()))

    def _missing(self) -> str:
        """Why there are no stacks."""
        if self._stopped:
            return "a stopped process writes no stacks"
        if self._request is None:
            return "it goes on, but did not answer in time; take the dump again"
        return self._request.missing or "it did not answer the signal"

    def answer(self) -> StateAnswer | None:
        try:
            answer = msgspec.json.decode(self._path.read_bytes(), type=StateAnswer)
        except (OSError, msgspec.DecodeError):
            return None
        with contextlib.suppress(OSError):
            self._path.unlink()
        return answer

    def dump(
        self,
        answer: StateAnswer | None,
        beat: RankBeat | None,
        sample: ProcessSample,
        seconds: float,
        still_seconds: float,
    ) -> RankDump:
        """`sample`: taken `seconds` after the first one."""
        now, record = time.monotonic_ns(), self._ring.flight.read(self._number)
        stacks = answer.stacks if answer else self._request.read() if self._request else []
        return RankDump(
            rank=self._number,
            pid=sample.pid,
            process=sample.state,
            begun_step=self._ring.board.begun(self._number),
            finished_step=beat.step if beat else 0,
            in_flight=bool(beat and beat.in_flight),
            layers=beat.progress if beat else 0,
            still_seconds=still_seconds,
            memory_bytes=sample.memory_bytes,
            collective=_collective(record.collective, now),
            steps=[_step(times, now) for times in record.steps(STEPS_SHOWN)],
            stacks=stacks,
            stacks_missing="" if stacks else self._missing(),
            answered=answer is not None,
            threads=processes.with_usage(self._before, sample, seconds),
            log=[redact(line) for line in record.lines()],
        )


async def _wait(is_over: Callable[[], bool], end: float) -> None:
    while time.monotonic() < end:
        if is_over():
            return
        await asyncio.sleep(LOOK)


def _collective(seen: Collective, now: int) -> CollectiveDump | None:
    if not seen.begun:
        return None
    return CollectiveDump(
        name=seen.name,
        number=seen.begun,
        in_flight=seen.in_flight,
        bytes=seen.bytes,
        seconds=round((now - seen.since) / 1e9, 4),
        total_seconds=round(seen.busy_ns / 1e9, 4),
        waited_seconds=round(seen.waited_ns / 1e9, 4),
    )


def _step(times: StepTimes, now: int) -> StepDump:
    def ms(nanoseconds: int) -> float:
        return round(max(0, nanoseconds) / 1e6, 3)

    send, compute, sample = map(ms, times.stages)
    return StepDump(
        step=times.step,
        ms=ms((times.ended or now) - times.began),
        done=bool(times.ended),
        send_ms=send,
        compute_ms=compute,
        sample_ms=sample,
        collective_ms=ms(times.busy_ns),
        waited_ms=ms(times.waited_ns),
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "cores": str(len(os.sched_getaffinity(0)))}


def settings_of(settings: ExecutorSettings) -> dict[str, object]:
    """All of them. A secret shows as stars, and an address without its password."""
    found = settings.model_dump(mode="json") | {"nats_url": without_password(settings.nats_url)}
    return {name: redact(value) if isinstance(value, str) else value for name, value in found.items()}


_NAME = re.compile(r"dump-[\w=-]+-\d{8}T\d{6}-\d{3}\.json")
_UNSAFE = re.compile(r"[^\w=-]")


def default_directory() -> Path:
    """In the directory for temporary files, for this user alone."""
    return Path(tempfile.gettempdir()) / f"ryzanstein-dumps-{os.getuid()}"


def write_dump(directory: Path, dump: Dump, keep: int) -> Path:
    """Writes it and removes the oldest beyond `keep`. Returns its path. Raises OSError.

    The files are for their owner alone: settings and names of requests are in them.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(directory))
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(dump.taken_at))
    thousandths = int(dump.taken_at % 1 * 1000)
    path = directory / f"dump-{_UNSAFE.sub('_', dump.group)}-{moment}-{thousandths:03}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(dump)))
    _remove_old(directory, keep)
    return path


def _remove_old(directory: Path, keep: int) -> None:
    ours = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(ours, key=lambda one: one.name[-24:])[: max(0, len(ours) - keep)]:
        with contextlib.suppress(OSError):
            path.unlink()
