"""The pipe between a rank and the process that has started it: what either says, one JSON line each.

supervisor ──standard input──▶ rank     its specification, where the ring meets, "debug {...}", "drain 2.5"
rank ──────────events──────────▶ supervisor
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from services.executor.core.gpu_errors import EXTERNAL
from shared.messages import GroupTraits, StreamedWeights
from shared.messages.debugging import LeaderDump, StackDump


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank process is told at its start, as one JSON line on its standard input."""

    rank: int
    world_size: int
    group: str
    instance: str
    epoch: int
    board: str
    settings: dict[str, object]
    # File of the host's page of interactive requests (`HostActivity`), for rank 0; empty: nobody looks at it.
    activity: str = ""
    activity_slot: int = 0  # the ring's own


class Rendezvous(msgspec.Struct, frozen=True, tag="rendezvous"):
    """Rank 0 → supervisor → the other ranks: where the ring meets, and what it loads."""

    host: str
    plan_port: int
    secret: str  # what a rank shows to be taken for one
    store_port: int = 0
    model_directory: str = ""  # resolved once, by rank 0: a download or conversion happens once per ring
    # What the ranks map to share memory; empty: they meet in torch's process group, at `store_port`.
    shared_memory: str = ""
    backend: str = ""  # of that process group
    draft_directory: str = ""  # of the draft model, likewise resolved by rank 0; empty: there is none


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank 0: the group takes requests."""

    model: str
    kv_bytes: int = 0  # most bytes that rank 0's KV cache takes
    imports: list[str] = []  # modules that the next ring's ranks will need beyond those of every rank
    kernels: str = ""  # what computes (`EngineSpec`)
    streamed: StreamedWeights | None = None  # of rank 0
    traits: GroupTraits | None = None


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Rank 0: told to drain over the bus, and done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Any rank: why it ends. `code` is one of `shared.errors`."""

    code: str
    message: str
    missed: bool = False  # whether it ends because another rank is gone
    cause: str = EXTERNAL  # as in `supervisor/failure_detection.py`


class AdaptersHeld(msgspec.Struct, frozen=True, tag="adapters"):
    """Rank 0: digests of the LoRA adapters that the ranks hold in memory, where these are others than before."""

    digests: list[str]


class Requested(msgspec.Struct, frozen=True, tag="requested"):
    """Rank 0: somebody waits for an answer, and the host's page of activity is armed."""


RankEvent = Rendezvous | Ready | Drained | Failed | AdaptersHeld | Requested


PREFIX = b"debug "
DRAIN = b"drain"  # with the grace in seconds, or without: as the settings say


class StateQuestion(msgspec.Struct, frozen=True, tag="state"):
    path: str  # where the answer goes, a `StateAnswer`


class ProfileQuestion(msgspec.Struct, frozen=True, tag="profile"):
    path: str  # where the answer goes, a `ProfileSummary`, once the trace is written beside it
    trace: str  # name of that file, in the same directory
    steps: int
    seconds: float
    memory: bool
    timeout: float
    from_step: int  # not before this one


Question = StateQuestion | ProfileQuestion


class StateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    stacks: list[StackDump] = []  # of Python's threads, the main one last
    leader: LeaderDump | None = None


_questions = msgspec.json.Decoder(Question)


def ask(question: Question) -> bytes:
    return PREFIX + msgspec.json.encode(question) + b"\n"


def question_of(line: bytes) -> Question:
    """What `ask` has made. Raises `msgspec.MsgspecError`."""
    question: Question = _questions.decode(line[len(PREFIX) :])
    return question


STACK_SIGNAL = signal.SIGUSR2  # has a rank write its stacks


def stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stacks-{rank}"


def below(path: str, roots: list[str]) -> str:
    """`path` from the nearest of the directories `roots` on."""
    inside = [root for root in roots if root and path.startswith(root.rstrip("/") + "/")]
    return path[len(max(inside, key=len).rstrip("/")) + 1 :] if inside else path


def write_answer(path: Path, answer: msgspec.Struct) -> None:
    """Writes it so that whoever finds the file finds all of it."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_bytes(msgspec.json.encode(answer))
    unfinished.replace(path)


class DebugResponder(Protocol):
    def answer(self, line: bytes) -> None: ...

    def on_state(self, leader: Callable[[], LeaderDump | None]) -> None: ...


def read_spec(commands: BinaryIO) -> RankSpec:
    """The first line of a rank's standard input."""
    return msgspec.json.decode(commands.readline(), type=RankSpec)


class SupervisorPipe:
    """The rank's end, once its specification has been read."""

    def __init__(self, commands: BinaryIO, events_fd: int, desk: DebugResponder) -> None:
        """`desk` answers what is asked about this rank."""
        self._commands = commands
        self._events_fd = events_fd
        self.desk = desk

    def read_rendezvous(self) -> Rendezvous:
        """Waits for it; answers what is asked meanwhile."""
        while (line := self._commands.readline()).startswith(PREFIX):
            self.desk.answer(line)
        return msgspec.json.decode(line, type=Rendezvous)

    def send(self, event: RankEvent) -> None:
        os.write(self._events_fd, msgspec.json.encode(event) + b"\n")

    def listen(self, drain: Callable[[float], object] = lambda grace: None) -> None:
        """Calls `drain`, from another thread, when the ring is to, with the seconds that what runs may take (below 0:
        as its settings say). Ends the process when the supervisor is gone."""
        thread = threading.Thread(target=self._listen, args=(drain,), name="supervisor", daemon=True)
        thread.start()

    def _listen(self, drain: Callable[[float], object]) -> None:
        for line in self._commands:
            if line.startswith(DRAIN):
                drain(float(line[len(DRAIN) :] or -1))
            elif line.startswith(PREFIX):
                self.desk.answer(line)
        os._exit(1)
