"""A profile of a ring, as the orchestrator sees it: asks the ranks, waits for what they write, collects it."""

import asyncio
import shutil
import time
from pathlib import Path

import msgspec

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import ProfileQuestion, ask
from services.executor.supervisor.ring import Ring
from shared.errors import ConfigurationError, RingLost
from shared.messages.debugging import ProfileCommand, ProfileSummary

LOOK = 0.1
"""Seconds between two looks for what ranks have written."""
WRITE_TIME = 60.0
"""Seconds that ranks get to write what they have."""
MOST_STEPS = 500
MOST_SECONDS = 60.0
MOST_TIMEOUT = 600.0
LEAD_TIME = 0.1
"""Seconds in which all ranks have heard of it: they begin with the same step after that."""


def refusal(command: ProfileCommand, settings: ExecutorSettings, ring: Ring | None, group: str) -> str:
    """Why there cannot be such a profile; empty where there can."""
    if settings.engine == "stub":
        return f"The group {group} runs the stub engine, which computes nothing: there is nothing to profile."
    if ring is None or not ring.ready.is_set():
        return f"The group {group} has no ring that is ready; see `ryzanstein debug dump {group}`."
    unknown = [rank for rank in command.ranks if not 0 <= rank < settings.ranks_here]
    if unknown:
        where = " on the host of its leader" if settings.nnodes > 1 else ""
        return f"The group {group} has no rank {unknown[0]}{where}; its ranks are 0 to {settings.ranks_here - 1}."
    if not 0 <= command.steps <= MOST_STEPS or not 0 <= command.seconds <= MOST_SECONDS:
        return f"A profile has at most {MOST_STEPS} steps or {MOST_SECONDS:g} s; ask for less."
    if not command.steps and not command.seconds:
        return "A profile needs a number of steps or seconds; give --steps or --seconds."
    if not 0 < command.timeout <= MOST_TIMEOUT:
        return f"The time-out of a profile must be above 0 s and at most {MOST_TIMEOUT:g} s."
    return ""


async def run_profile(ring: Ring, command: ProfileCommand, ranks: list[int], directory: Path) -> None:
    """Leaves a trace of each rank, and `summary.json`, in `directory`. Raises `RingLost`, `ConfigurationError`."""
    name = f"{time.monotonic_ns():x}"
    answers = {rank: ring.directory / f"profile-{name}-{rank}" for rank in ranks}
    first = _first_step(ring)
    for rank, path in answers.items():
        trace = f"rank-{rank}.trace.json.gz"
        question = ProfileQuestion(
            str(path),
            f"{name}-{trace}",
            command.steps,
            command.seconds,
            command.memory,
            command.timeout,
            first,
        )
        ring.ask(rank, ask(question))
    await _wait(ring, list(answers.values()), command.timeout + WRITE_TIME)
    found = []
    for rank, path in answers.items():
        summary = msgspec.json.decode(path.read_bytes(), type=ProfileSummary)
        if summary.trace:
            trace = f"rank-{rank}.trace.json.gz"
            await asyncio.to_thread(shutil.move, ring.directory / summary.trace, directory / trace)
            summary = msgspec.structs.replace(summary, trace=trace)
        found.append(summary)
        path.unlink()
    if all(summary.error for summary in found):
        raise ConfigurationError(
            f"There is no profile: {found[0].error}. A ring computes only while it has requests: send some, and ask "
            "again."
        )
    (directory / "summary.json").write_bytes(msgspec.json.encode(found))


def _first_step(ring: Ring) -> int:
    """A step that no rank has begun by the time it hears of it."""
    totals = ring.board.totals
    usual = totals.step_seconds / totals.steps if totals.steps else 0.0
    ahead = min(1000, int(LEAD_TIME / usual)) if usual else 0
    return ring.board.begun(0) + 1 + ahead


async def _wait(ring: Ring, paths: list[Path], timeout: float) -> None:
    end = asyncio.ensure_future(ring.wait_end())
    give_up = time.monotonic() + timeout
    try:
        while not all(path.exists() for path in paths):
            if end.done():
                raise RingLost(f"The ring was lost while it was profiled ({end.result().reason}).")
            if time.monotonic() > give_up:
                raise RingLost(
                    "Some ranks have not written their profile in time; see `ryzanstein debug dump`."
                )
            await asyncio.sleep(LOOK)
    finally:
        end.cancel()
