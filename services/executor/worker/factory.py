"""Makes the engine that the settings ask for; torch is imported only where it is needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from services.executor.core.engine import Engine
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.plan_channel import PlanListener, PlanReceiver
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.worker.stub import StubEngine, StubSettings
from shared.errors import ModelLoadError

STUB_VOCABULARY = 256
FIRST_WORD = 1000
"""Token ids from here on stand for pieces of words in every vocabulary."""


def make_engine(
    settings: ExecutorSettings,
    spec: RankSpec,
    board: RingBoard,
    announce: Callable[[Rendezvous], None],
) -> Engine:
    """The leader's engine. `announce` tells the other ranks where to meet."""
    if settings.engine == "torch":
        from services.executor.worker.engine import RingEngine

        return RingEngine(settings, spec, board, announce)
    from services.executor.worker.stub import StubRing

    directory = Path(settings.model).expanduser() if settings.model else None
    stub = StubEngine(
        StubSettings(
            vocab_size=STUB_VOCABULARY if directory is None else vocabulary_of(directory),
            first_token=0 if directory is None else FIRST_WORD,
            step_ms=settings.stub_step_ms,
            us_per_token=settings.stub_us_per_token,
            block_size=settings.block_size,
            num_blocks=settings.stub_blocks,
            context_length=settings.stub_context_length,
            fault=settings.stub_fault,
        )
    )
    return StubRing(stub, spec, board, PlanListener(settings.meeting_host), announce, directory)


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
        mine.clock.run(plan, lambda: None)
        mine.launched(plan.step)
