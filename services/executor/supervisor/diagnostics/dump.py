"""Takes a dump of a ring from outside, as the supervisor: whatever state its ranks are in.

question on standard input ──▶ stacks, queues, blocks  needs a thread of Python that runs: it is waited for briefly
signal ──▶ stacks, by a file per rank                  of ranks that do not answer: needs no interpreter, only a process
                                                       that is not stopped
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

import msgspec

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import Collective, RankRecord, StepTimes
from services.executor.ipc.rank_pipe import StateAnswer, StateQuestion, ask, stack_file
from services.executor.supervisor.diagnostics import processes
from services.executor.supervisor.diagnostics.processes import StackRequest
from services.executor.supervisor.diagnostics.verdict import ProgressAge, verdict
from services.executor.supervisor.ring import Ring
from shared.keys import redact
from shared.messages.debugging import (
    DUMP_VERSION,
    CollectiveDump,
    Dump,
    LeaderDump,
    RankDump,
    StepDump,
)
from shared.nats.errors import without_password

LOOK = 0.02
"""Seconds between two looks for answers."""
WINDOW = 0.1
"""Seconds over which a thread's use of the CPU is measured, at least."""
ANSWER_TIME = 1.0
"""Seconds, or half of those that there are, after which a rank that has not answered is signalled."""
STEPS_SHOWN = 16
PACKAGES = ("ryzanstein", "torch", "transformers", "numpy", "msgspec", "nats-py", "llguidance")


class Group(msgspec.Struct, frozen=True):
    group: str
    model: str
    instance: str
    message: str = ""


async def take_dump(
    ring: Ring | None,
    group: Group,
    settings: ExecutorSettings,
    still: ProgressAge,
    wait: float,
    reason: str = "",
) -> Dump:
    """`wait`: seconds for which ranks that do not answer are waited for. `ring`: None where there is none."""
    began = time.monotonic()
    base = Dump(
        version=DUMP_VERSION,
        group=group.group,
        model=group.model,
        instance=group.instance,
        host=platform.node(),
        epoch=ring.epoch if ring else 0,
        taken_at=time.time(),
        took=0.0,
        verdict="",
        state="none",
        reason=reason,
        message=group.message,
        versions=versions(),
        settings=settings_of(settings),
    )
    if ring is not None:
        base = await _Gathering(ring, still).fill(base, wait)
    took = time.monotonic() - began
    return msgspec.structs.replace(base, verdict=verdict(base), took=round(took, 3))


class _Gathering:
    def __init__(self, ring: Ring, still: ProgressAge) -> None:
        self._ring = ring
        self._pids = ring.pids
        self._still = still
        name = f"{time.monotonic_ns():x}"
        self._answers = [ring.directory / f"state-{name}-{rank}" for rank in range(len(self._pids))]

    async def fill(self, base: Dump, wait: float) -> Dump:
        before = await asyncio.to_thread(self._sample)
        at = time.monotonic()
        for rank, path in enumerate(self._answers):
            self._ring.ask(rank, ask(StateQuestion(str(path))))
        await _wait(lambda: self._all_answered(before), at + min(ANSWER_TIME, wait / 2))
        requests = [self._request_stacks(rank, sample) for rank, sample in enumerate(before)]
        await _wait(lambda: self._is_complete(requests, at), at + max(wait, WINDOW))
        after = await asyncio.to_thread(self._sample)
        seconds = time.monotonic() - at
        told = [_read(path) for path in self._answers]
        board = self._ring.board
        beats = {beat.rank: beat for beat in board.beats()}
        ranks = []
        for rank, (pid, sample) in enumerate(zip(self._pids, after, strict=True)):
            answer = told[rank]
            stacks = answer.stacks if answer else requests[rank].read()
            beat = beats.get(rank)
            found = _of_record(rank, pid, sample.state, self._ring.flight.read(rank))
            ranks.append(
                msgspec.structs.replace(
                    found,
                    begun_step=board.begun(rank),
                    finished_step=beat.step if beat else 0,
                    in_flight=bool(beat and beat.in_flight),
                    layers=beat.progress if beat else 0,
                    still_seconds=self._still.seconds(("rank", rank), time.monotonic()),
                    memory_bytes=sample.memory_bytes,
                    stacks=stacks,
                    stacks_missing="" if stacks else requests[rank].missing or "it did not answer the signal",
                    answered=answer is not None,
                    threads=processes.with_usage(before[rank], sample, seconds),
                )
            )
        leader = told[0].leader if told and told[0] else None
        return self._of_ring(base, board, ranks, leader)

    def _of_ring(
        self, base: Dump, board: RingBoard, ranks: list[RankDump], leader: LeaderDump | None
    ) -> Dump:
        ready = self._ring.ready.is_set()
        return msgspec.structs.replace(
            base,
            state=self._ring.state,
            loaded=self._ring.loaded,
            loop_still_seconds=self._still.seconds(("loop", 0), time.monotonic()) if ready else 0.0,
            load=msgspec.to_builtins(board.load),
            totals=board.totals.as_dict(),
            ranks=ranks,
            leader=leader,
            plans=self._ring.flight.plans.read(),
        )

    def _sample(self) -> list[processes.ProcessSample]:
        return [processes.sample(pid) for pid in self._pids]

    def _all_answered(self, samples: list[processes.ProcessSample]) -> bool:
        """But for those that are stopped."""
        pairs = zip(self._answers, samples, strict=True)
        return all(path.exists() or sample.state in processes.STOPPED for path, sample in pairs)

    def _request_stacks(self, rank: int, sample: processes.ProcessSample) -> StackRequest:
        """Of a rank that has not answered by itself."""
        path = stack_file(self._ring.directory, rank)
        missing = "a stopped process writes no stacks" if sample.state in processes.STOPPED else ""
        return StackRequest(sample.pid, path, "it has answered" if self._answers[rank].exists() else missing)

    def _is_complete(self, requests: list[StackRequest], began: float) -> bool:
        """A stopped process is not waited for."""
        complete = [request.poll() for request in requests]
        answered = [path.exists() for path in self._answers]
        told = (there or request.missing for there, request in zip(answered, requests, strict=True))
        return time.monotonic() >= began + WINDOW and all(complete) and all(told)


async def _wait(is_over: Callable[[], bool], end: float) -> None:
    while time.monotonic() < end:
        if is_over():
            return
        await asyncio.sleep(LOOK)


def _of_record(rank: int, pid: int, process: str, record: RankRecord) -> RankDump:
    now = time.monotonic_ns()
    return RankDump(
        rank=rank,
        pid=pid,
        process=process,
        collective=_collective(record.collective, now),
        steps=[_step(times, now) for times in record.steps(STEPS_SHOWN)],
        log=[redact(line) for line in record.lines()],
    )


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


def _read(path: Path) -> StateAnswer | None:
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=StateAnswer)
    except (OSError, msgspec.DecodeError):
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    return answer


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
