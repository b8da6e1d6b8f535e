"""The pipe between a trainer and the executor that has started it: what either says, one JSON line each.

supervisor ──standard input──▶ trainer   its specification, then `suspended 12.3` and `pause`; its end ends it
trainer ──────events─────────▶ supervisor

A job of several replicas has a trainer on each of its hosts: the first one alone writes states and adapters.
The trainer knows no broker: files come and go in a directory that the supervisor has made.
"""

import os
import threading
import time
from typing import BinaryIO

import msgspec

from shared.messages.training import TrainingJob, TrainingMetrics

EXAMPLES = "examples.msgpack"  # in the directory: `TrainingData`
STATE = "state.safetensors"  # what an earlier attempt has written; not there: it begins anew
# Bytes that a trainer keeps at most, from a layer's forward to its backward pass, so as not to compute them again; of a
# quantized base a quarter. Its host reckons with them.
KEPT_ACTIVATIONS = 1 << 30
PAUSE = b"pause\n"  # write a state and end; the step that is under way is given up, and made again later
# With the seconds, since its start, for which it was suspended (SIGSTOP): told before it goes on. They count neither
# as time of its steps nor as time between its states.
SUSPENDED = b"suspended"


class TrainerSpec(msgspec.Struct, frozen=True):
    """What a trainer is told at its start, as one JSON line on its standard input."""

    job: TrainingJob  # its hyperparameters are chosen, none of them is `auto`
    directory: str  # for its files
    model_directory: str
    settings: dict[str, object]  # of the executor, for its base (`ExecutorSettings`)
    threads: int  # of its computing: the same for all attempts, or sums would be others
    replica: int = 0
    secret: str = ""  # what replicas show to be taken for one
    store: str = ""  # `host:port` where the first replica waits for this one
    # Seconds between two states, at least; larger states are written less often. 0: one after every step.
    state_interval: float = 60.0
    # Which share of the base the process has. Rank 0 is the one that the executor starts, and starts the others.
    rank: int = 0
    ranks: int = 1  # of those that rank 0 has started: how many there are with it,
    ring: str = ""  # and the memory where they meet


class Met(msgspec.Struct, frozen=True, tag="met"):
    """Where the first of several replicas waits for the others."""

    address: str  # `host:port`


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The base is there, and the state read."""

    step: int  # done already
    steps: int


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    metrics: TrainingMetrics


class StateWritten(msgspec.Struct, frozen=True, tag="state"):
    """A file in the directory, which is the supervisor's now."""

    step: int
    file: str
    bytes: int
    digest: str


class AdapterWritten(msgspec.Struct, frozen=True, tag="adapter"):
    """A directory as peft writes it, below the directory, which is the supervisor's now."""

    step: int
    directory: str
    digest: str  # as `AdapterRecord` has it
    rank: int
    bytes: int
    metrics: TrainingMetrics
    is_result: bool


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All steps are done, and their adapter written before."""

    metrics: str  # file in the directory: CSV of all steps, those of earlier attempts too
    trained_tokens: int


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """As it was told; its state is written."""

    step: int


class TrainerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Why it ends. `code` is one of `shared.errors`; what would fail anywhere is not retryable."""

    code: str
    message: str
    step: int = 0


TrainerEvent = Met | Loaded | Stepped | StateWritten | AdapterWritten | Finished | Paused | TrainerFailed


class TrainerPipe:
    """The trainer's end."""

    def __init__(self, commands: BinaryIO, events_fd: int) -> None:
        self._commands = commands
        self._events_fd = events_fd
        self.pause = threading.Event()  # is set when a pause is wanted
        self._suspended = 0.0

    def clock(self) -> float:
        """Seconds of a clock that stands while the process is suspended; it may jump back by a suspension that it has
        not heard of at once."""
        return time.monotonic() - self._suspended

    def read_spec(self) -> TrainerSpec:
        """The first line. Raises `msgspec.MsgspecError`."""
        return msgspec.json.decode(self._commands.readline(), type=TrainerSpec)

    def send(self, event: TrainerEvent) -> None:
        """Ends the process where the supervisor is gone."""
        try:
            os.write(self._events_fd, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            os._exit(1)

    def listen(self) -> None:
        """From now on `pause` is set when it is wanted, and the process ends when the supervisor is gone or wants it
        to."""
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def _listen(self) -> None:
        for line in self._commands:
            if line == PAUSE:
                self.pause.set()
            elif line.startswith(SUSPENDED):
                self._suspended = float(line[len(SUSPENDED) :])
        os._exit(1)
