"""The process of one rank: `python -m services.executor.rank EVENTS_FD`, started by the supervisor, or forked by its
fork server.

Standard input brings the rank's specification, where the ring meets, and later "drain"; its end
means that the supervisor is gone, and the rank goes too. Rank 0 is the leader.

torch is imported only where the settings ask for it.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvloop

from services.executor.core import gpu_errors
from services.executor.core.engine import Engine
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.plan_channel import PlanListener, PlanReceiver
from services.executor.ipc.rank_pipe import Failed, RankSpec, Rendezvous, SupervisorPipe, read_spec
from services.executor.supervisor.ranks.fork_server import leave
from services.executor.worker.diagnostics import RankDebug
from services.executor.worker.stub import StubEngine, StubSettings
from shared import tracing
from shared.errors import InternalError, ModelLoadError, RingLost, RyzansteinError
from shared.service.logs import configure_logging
from shared.service.logs import follow as follow_level
from shared.tracing import Attributes

STUB_VOCABULARY = 256
FIRST_WORD = 1000  # token ids from here on stand for pieces of words in every vocabulary


def make_engine(
    settings: ExecutorSettings, spec: RankSpec, board: RingBoard, announce: Callable[[Rendezvous], None]
) -> Engine:
    """The leader's engine. `announce` tells the other ranks where to meet."""
    if settings.engine == "torch":
        from services.executor.worker.engine import RingEngine

        return RingEngine(settings, spec, board, announce)
    from services.executor.worker.stub import StubRing

    directory = Path(settings.model).expanduser() if settings.model else None
    stub = StubEngine(stub_settings(settings, directory))
    return StubRing(stub, spec, board, PlanListener(settings.meeting_host), announce, directory)


def stub_settings(settings: ExecutorSettings, directory: Path | None) -> StubSettings:
    """`directory`: of the model whose tokenizer clients' text goes through. Raises `ModelLoadError`."""
    return StubSettings(
        vocab_size=STUB_VOCABULARY if directory is None else vocabulary_of(directory),
        first_token=0 if directory is None else FIRST_WORD,
        step_ms=settings.stub_step_ms,
        us_per_token=settings.stub_us_per_token,
        block_size=settings.block_size,
        num_blocks=settings.stub_blocks,
        context_length=settings.stub_context_length,
        fault=settings.stub_fault,
        max_adapters=settings.max_adapters,
        max_adapter_rank=settings.max_adapter_rank,
        draft_right=settings.stub_draft_right,
        draft_ms=settings.stub_draft_ms,
    )


def vocabulary_of(directory: Path) -> int:
    """How many tokens the model in `directory` has. Raises `ModelLoadError`."""
    path = directory / "config.json"
    try:
        return int(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["vocab_size"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
        raise ModelLoadError(
            f"The stub engine found no vocab_size in {path}; name a model's directory with --model, or none."
        ) from None


def follow(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, rendezvous: Rendezvous) -> None:
    """The life of a rank that is not the leader: executes plans until the leader closes the ring."""
    if settings.engine == "torch":
        from services.executor.worker.engine import follow_ring

        follow_ring(settings, spec, board, rendezvous)
        return
    mine = board.rank(spec.rank)
    receiver = PlanReceiver(rendezvous.host, rendezvous.plan_port, rendezvous.secret, settings.start_timeout)
    while (plan := receiver.receive()) is not None:
        mine.begin(plan.step)
        mine.run(plan, lambda: None)
        mine.launched(plan.step)


log = structlog.get_logger(__name__)


def main(events_fd: int) -> int:
    """The process. `events_fd`: where its events go."""
    spec = read_spec(sys.stdin.buffer)
    settings = ExecutorSettings.model_validate(spec.settings)
    desk = RankDebug(spec)
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
            rendezvous = supervisor.read_rendezvous()
            supervisor.listen()
            follow(settings, spec, board, rendezvous)
    except Exception as error:
        event = failed(error, f"Rank {spec.rank} of group {spec.group}")
        if settings.serving_engine:  # no other rank is there that could say more
            event = msgspec.structs.replace(event, missed=False)
        supervisor.send(event)
        return 1
    finally:
        tracing.close()  # last: a collector that is away must not keep anybody waiting for what was said before
    return 0


def failed(error: Exception, who: str) -> Failed:
    """What the rank `who` says of what it ends with."""
    if isinstance(error, RyzansteinError):
        cause = gpu_errors.CRASHED if isinstance(error, InternalError) else gpu_errors.EXTERNAL
        return Failed(error.code, str(error), isinstance(error, RingLost), cause)
    log.exception("rank_failed", exc_info=error)
    fault = gpu_errors.explain(error, who)
    if fault is not None:
        return Failed(fault.code, str(fault), cause=gpu_errors.cause(error))
    reason = f"{who} failed: {type(error).__name__}: {error}."
    return Failed(InternalError.code, reason, cause=gpu_errors.cause(error))


def _lead(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, supervisor: SupervisorPipe) -> None:
    about: Attributes = {"ryzanstein.group": spec.group, "ryzanstein.rank": spec.rank, "ryzanstein.epoch": spec.epoch}
    tracing.configure("executor", spec.instance, about)
    if settings.serving_engine:
        uvloop.run(_lead_engine(settings, spec, board, supervisor))
        return
    from services.executor.leader.leader import Leader

    engine = make_engine(settings, spec, board, supervisor.send)
    leader = Leader(settings, spec, board, engine, supervisor)
    uvloop.run(leader.run())


async def _lead_engine(
    settings: ExecutorSettings, spec: RankSpec, board: RingBoard, supervisor: SupervisorPipe
) -> None:
    """With an engine that schedules for itself."""
    from services.executor.engines.catalog import ENGINES
    from services.executor.engines.leader import EngineLeader
    from services.executor.model.loading.checkpoints import model_directory

    directory = await asyncio.to_thread(model_directory, settings)
    engine = ENGINES[settings.serving_engine](settings, directory)
    await EngineLeader(settings, spec, board, supervisor, engine, directory).run()


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
