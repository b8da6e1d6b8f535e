"""The process of one rank: `python -m services.executor.rank EVENTS_FD`, started by the orchestrator, or forked by its
fork server.

Standard input brings the rank's specification, where the ring meets, and later "drain"; its end
means that the orchestrator is gone, and the rank goes too. Rank 0 is the leader.
"""

import sys
from pathlib import Path

import structlog
import uvloop

from services.executor.core import gpu_errors
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import Failed, RankSpec, SupervisorPipe, read_spec
from services.executor.supervisor.fork_server import leave
from services.executor.worker.diagnostics.desk import RankDesk
from shared import tracing
from shared.errors import InternalError, RingLost, RyzansteinError
from shared.service.logs import configure_logging
from shared.service.logs import follow as follow_level
from shared.tracing import Attributes

log = structlog.get_logger(__name__)


def main(events_fd: int) -> int:
    """The process. `events_fd`: where its events go."""
    spec = read_spec(sys.stdin.buffer)
    settings = ExecutorSettings.model_validate(spec.settings)
    desk = RankDesk(spec)
    supervisor = SupervisorPipe(sys.stdin.buffer, events_fd, desk)
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
            _lead(settings, spec, board, supervisor)
        else:
            _follow(settings, spec, board, supervisor)
    except RyzansteinError as error:
        cause = gpu_errors.CRASHED if isinstance(error, InternalError) else gpu_errors.EXTERNAL
        supervisor.send(Failed(error.code, str(error), isinstance(error, RingLost), cause))
        return 1
    except Exception as error:
        log.exception("rank_failed")
        supervisor.send(_failed(error, f"Rank {spec.rank} of group {spec.group}"))
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


def _lead(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, supervisor: SupervisorPipe) -> None:
    from services.executor.leader.leader import Leader
    from services.executor.worker.factory import make_engine

    about: Attributes = {
        "ryzanstein.group": spec.group,
        "ryzanstein.rank": spec.rank,
        "ryzanstein.epoch": spec.epoch,
    }
    tracing.configure("executor", spec.instance, about)
    engine = make_engine(settings, spec, board, supervisor.send)
    leader = Leader(settings, spec, board, engine, supervisor)
    uvloop.run(leader.run())


def _follow(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, supervisor: SupervisorPipe) -> None:
    from services.executor.worker.factory import follow

    rendezvous = supervisor.read_rendezvous()
    supervisor.listen()
    follow(settings, spec, board, rendezvous)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
