"""The process of one rank: `python -m services.executor.rank EVENTS_FD`, started by the orchestrator, or forked by its
fork server.

Standard input brings the rank's specification, where the ring meets, and later "drain"; its end
means that the orchestrator is gone, and the rank goes too. Rank 0 is the leader.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
import uvloop

from services.executor import deaths, gpu_errors
from services.executor.board import RingBoard
from services.executor.debug.rank_side import PREFIX, RankDesk
from services.executor.fork_server import leave
from services.executor.ring import Failed, RankEvent, RankSpec, Rendezvous
from services.executor.settings import ExecutorSettings
from shared import tracing
from shared.errors import InternalError, RingLost, RyzansteinError
from shared.messages.debugging import LeaderDump
from shared.service.logs import configure_logging
from shared.service.logs import follow as follow_level
from shared.tracing import Attributes

log = structlog.get_logger(__name__)


class Orchestrator:
    """The rank's line to the process that started it."""

    def __init__(self, commands: BinaryIO, events_fd: int) -> None:
        self._commands = commands
        self._events_fd = events_fd
        self._on_drain: Callable[[], object] | None = None
        self._on_debug: Callable[[bytes], object] | None = None
        self.on_state: Callable[[Callable[[], LeaderDump | None]], object] = lambda leader: None
        """Takes what the leader tells whoever looks into the ring."""

    def read_spec(self) -> RankSpec:
        return msgspec.json.decode(self._commands.readline(), type=RankSpec)

    def read_rendezvous(self) -> Rendezvous:
        """Waits for it; answers what is asked meanwhile."""
        while (line := self._commands.readline()).startswith(PREFIX):
            if self._on_debug is not None:
                self._on_debug(line)
        return msgspec.json.decode(line, type=Rendezvous)

    def send(self, event: RankEvent) -> None:
        os.write(self._events_fd, msgspec.json.encode(event) + b"\n")

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Calls `callback`, from another thread, when the orchestrator wants the ring to drain."""
        self._on_drain = callback

    def attach(self, desk: RankDesk) -> None:
        """Has `desk` answer what is asked about this rank."""
        self._on_debug, self.on_state = desk.answer, desk.on_state

    def listen(self) -> None:
        """Ends the process when the orchestrator is gone."""
        threading.Thread(target=self._listen, name="orchestrator", daemon=True).start()

    def _listen(self) -> None:
        for line in self._commands:
            if line == b"drain\n" and self._on_drain is not None:
                self._on_drain()
            elif line.startswith(PREFIX) and self._on_debug is not None:
                self._on_debug(line)
        os._exit(1)


def main(events_fd: int) -> int:
    """The process. `events_fd`: where its events go."""
    orchestrator = Orchestrator(sys.stdin.buffer, events_fd)
    spec = orchestrator.read_spec()
    settings = ExecutorSettings.model_validate(spec.settings)
    desk = RankDesk(spec)
    orchestrator.attach(desk)
    configure_logging(
        "executor",
        spec.instance,
        level=settings.log_level,
        fmt=settings.log_format,
        about={"group": spec.group, "rank": spec.rank, "epoch": spec.epoch},
    )
    board = RingBoard(Path(spec.board), spec.world_size)
    board.record(desk.recorder)
    follow_level(board.log_level)
    try:
        if spec.rank == 0:
            _lead(settings, spec, board, orchestrator)
        else:
            _follow(settings, spec, board, orchestrator)
    except RyzansteinError as error:
        cause = deaths.CRASHED if isinstance(error, InternalError) else deaths.EXTERNAL
        orchestrator.send(Failed(error.code, str(error), isinstance(error, RingLost), cause))
        return 1
    except Exception as error:
        log.exception("rank_failed")
        orchestrator.send(_failed(error, f"Rank {spec.rank} of group {spec.group}"))
        return 1
    finally:
        tracing.close()  # last: a collector that is away must not keep anybody waiting for what was said before
    return 0


def _failed(error: Exception, who: str) -> Failed:
    """What the rank `who` says of an error that is not one of ours."""
    fault = gpu_errors.told(error, who)
    if fault is not None:
        return Failed(fault.code, str(fault), cause=gpu_errors.cause(error))
    reason = f"{who} failed: {type(error).__name__}: {error}."
    return Failed(InternalError.code, reason, cause=gpu_errors.cause(error))


def _lead(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, orchestrator: Orchestrator) -> None:
    from services.executor.engine.factory import make_engine
    from services.executor.leader import Leader

    about: Attributes = {
        "ryzanstein.group": spec.group,
        "ryzanstein.rank": spec.rank,
        "ryzanstein.epoch": spec.epoch,
    }
    tracing.configure("executor", spec.instance, about)
    engine = make_engine(settings, spec, board, orchestrator.send)
    orchestrator.listen()
    leader = Leader(settings, spec, board, engine, orchestrator)
    uvloop.run(leader.run())


def _follow(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, orchestrator: Orchestrator) -> None:
    from services.executor.engine.factory import follow

    rendezvous = orchestrator.read_rendezvous()
    orchestrator.listen()
    follow(settings, spec, board, rendezvous)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
