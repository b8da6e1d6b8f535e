"""What is the matter with a ring, in one sentence: which rank is behind, in what. Pure.

All ranks enter the same collectives in the same order. A rank that waits in one is not at fault: it is whoever has
not come to it.

    rank 0   ──#41──#42──▶ waits in #43
    rank 1   ──#41──#42──✗                 the culprit, wherever it is
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from services.executor.supervisor.diagnostics.processes import ENDED, STOPPED
from shared.messages.debugging import CollectiveDump, Dump, RankDump, StackDump

PATIENCE = 1.0  # seconds for which a ring that works may stand still in one place

_PLACES = ("worker/engine.py", "worker/runner.py", "model/", "cpu/", "gpu/", "collectives/", "sampling/")
_COMPUTING = tuple(f"services/executor/{place}" for place in _PLACES)


def verdict(dump: Dump) -> str:
    """The sentence at the top of a dump; its own `verdict` is not looked at."""
    if dump.state == "none":
        return f"There is no ring: {dump.message or 'it is not started yet'}."
    for judge in _JUDGES:
        sentence = judge(dump)
        if sentence:
            return sentence
    return _at_rest(dump)


def _ended(dump: Dump) -> str:
    gone = [rank for rank in dump.ranks if rank.process == ENDED]
    return f"{_named(gone)} {_verb(gone, 'has', 'have')} ended; the ring is lost." if gone else ""


def _stopped(dump: Dump) -> str:
    stopped = [rank for rank in dump.ranks if rank.process in STOPPED]
    if not stopped:
        return ""
    by = "a debugger" if stopped[0].process == STOPPED[1] else "a signal (SIGSTOP)"
    return f"{_named(stopped)} {_verb(stopped, 'is', 'are')} stopped by {by}{_waiting_for(dump, stopped)}."


def _behind(dump: Dump) -> str:
    """Who has not come to the collective that others wait in."""
    waiting = [(rank, at) for rank, at in _in_collectives(dump) if at.seconds >= PATIENCE]
    if not waiting:
        return ""
    number = max(at.number for _, at in waiting)
    late = [rank for rank in dump.ranks if rank.collective is None or rank.collective.number < number]
    if late:
        return f"{_named(late)} {_verb(late, 'is', 'are')} behind{_waiting_for(dump, late)}; {_whereabouts(late[0])}."
    return _all_in_one(waiting)


def _all_in_one(waiting: list[tuple[RankDump, CollectiveDump]]) -> str:
    names = {at.name for _, at in waiting}
    if len(names) > 1:
        what = ", ".join(f"rank {rank.rank} in {_what(at)}" for rank, at in waiting)
        return f"The ranks do not do the same: {what}."
    (rank, at), *_ = waiting
    return (
        f"All ranks have been in {_what(at)} for {at.seconds:.1f} s and none gets out: what lies under it is stuck "
        f"(memory, network, GPU); {_whereabouts(rank)}."
    )


def _standing(dump: Dump) -> str:
    """Who stands still with work, in no collective that others wait in."""
    still = [rank for rank in dump.ranks if rank.in_flight and rank.still_seconds >= PATIENCE]
    if not still or dump.state == "starting":
        return ""
    worst = max(still, key=lambda rank: (not _waits(rank), rank.still_seconds))
    step = worst.finished_step + 1
    return f"{_named([worst])} has stood still in step {step} for {worst.still_seconds:.1f} s; {_whereabouts(worst)}."


def _deaf(dump: Dump) -> str:
    """A leader whose event loop does not turn although it computes nothing."""
    leader = next((rank for rank in dump.ranks if rank.rank == 0), None)
    if leader is None or dump.state == "starting" or dump.loop_still_seconds < PATIENCE + 0.5:
        return ""
    if leader.in_flight and leader.still_seconds < PATIENCE:
        return ""  # a loop that gets no turn beside a long step is busy
    main = f"; {_whereabouts(leader, _main_thread)}" if leader.stacks else ""
    return f"{_named([leader])} has not turned its event loop for {dump.loop_still_seconds:.1f} s{main}."


_JUDGES: tuple[Callable[[Dump], str], ...] = (_ended, _stopped, _behind, _standing, _deaf)


def _at_rest(dump: Dump) -> str:
    if dump.state == "starting":
        missing = len([rank for rank in dump.ranks if not rank.pid])
        wait = f", and {missing} ranks have not started yet" if missing else ""
        return f"The ring is loading ({dump.loaded:.0%} of the weights read{wait}); no rank is behind."
    last = max((rank.finished_step for rank in dump.ranks), default=0)
    between = dump.leader is not None and any(one.state == "running" for one in dump.leader.queues)
    if between or any(rank.in_flight for rank in dump.ranks):
        return f"The ring is at work in step {last + 1}; no rank is behind."
    return f"The ring is idle; step {last} was its last one."


# --- words ---------------------------------------------------------------------------------------


def _in_collectives(dump: Dump) -> list[tuple[RankDump, CollectiveDump]]:
    return [(rank, rank.collective) for rank in dump.ranks if rank.collective and rank.collective.in_flight]


def _waits(rank: RankDump) -> bool:
    return rank.collective is not None and rank.collective.in_flight


def _waiting_for(dump: Dump, late: Sequence[RankDump]) -> str:
    """Who waits for them, and where."""
    others = [(rank, at) for rank, at in _in_collectives(dump) if rank not in late]
    if not others:
        return ""
    _, at = max(others, key=lambda one: one[1].number)
    who = [one for one, _ in others]
    name, waits, them = _named(who), _verb(who, "waits", "wait"), _verb(late, "it", "them")
    return f": {name[0].lower()}{name[1:]} {waits} for {them} in {_what(at)} for {at.seconds:.1f} s"


def _what(at: CollectiveDump) -> str:
    return f"{at.name} number {at.number} ({at.bytes:,} bytes)"


def _whereabouts(rank: RankDump, choose: Callable[[RankDump], StackDump | None] | None = None) -> str:
    stack = (choose or _computing_thread)(rank)
    if stack is None or not stack.frames:
        why = rank.stacks_missing or "there is no stack of it"
        return f"it is {rank.process}, and {why}"
    return f"it is {rank.process}, in {stack.frames[0]}"


def _computing_thread(rank: RankDump) -> StackDump | None:
    """The one that is in the engine's code, else the main one."""
    for stack in rank.stacks:
        if any(frame.startswith(_COMPUTING) for frame in stack.frames):
            return stack
    return _main_thread(rank)


def _main_thread(rank: RankDump) -> StackDump | None:
    """faulthandler writes the main thread last."""
    return rank.stacks[-1] if rank.stacks else None


def _named(ranks: Sequence[RankDump]) -> str:
    if len(ranks) == 1:
        role = ", the leader" if ranks[0].rank == 0 else ""
        return f"Rank {ranks[0].rank} (process {ranks[0].pid}{role})"
    return "Ranks " + ", ".join(f"{rank.rank} (process {rank.pid})" for rank in ranks)


def _verb(ranks: Sequence[RankDump], of_one: str, of_several: str) -> str:
    return of_one if len(ranks) == 1 else of_several


class ProgressAge:
    """Looks at values from time to time, and remembers when each was last seen to change."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def look(self, values: Mapping[Hashable, object], now: float) -> None:
        """All values at `now` (seconds); those that are not there any more are forgotten."""
        self._seen = {
            key: seen if (seen := self._seen.get(key)) is not None and seen[0] == value else (value, now)
            for key, value in values.items()
        }

    def seconds(self, key: Hashable, now: float) -> float:
        """Since the value was last seen to change; 0 for one that was never looked at."""
        seen = self._seen.get(key)
        return round(now - seen[1], 2) if seen else 0.0
