"""Makes the engine that the settings ask for; torch is imported only where it is needed."""

from collections.abc import Callable

from services.executor.board import RingBoard
from services.executor.engine.protocol import Engine
from services.executor.engine.stub import StubEngine, StubSettings
from services.executor.plan_channel import PlanListener, PlanReceiver
from services.executor.ring import RankSpec, Rendezvous
from services.executor.settings import ExecutorSettings


def make_engine(
    settings: ExecutorSettings,
    spec: RankSpec,
    board: RingBoard,
    announce: Callable[[Rendezvous], None],
) -> Engine:
    """The leader's engine. `announce` tells the other ranks where to meet."""
    if settings.engine == "torch":
        from services.executor.engine.ring_engine import RingEngine

        return RingEngine(settings, spec, board, announce)
    from services.executor.engine.stub_ring import StubRing

    stub = StubEngine(
        StubSettings(
            step_ms=settings.stub_step_ms,
            us_per_token=settings.stub_us_per_token,
            block_size=settings.block_size,
            num_blocks=settings.stub_blocks,
            context_length=settings.stub_context_length,
        )
    )
    return StubRing(stub, spec, board, PlanListener(settings.ring_host), announce)


def follow(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, rendezvous: Rendezvous) -> None:
    """The life of a rank that is not the leader: executes plans until the leader closes the ring."""
    if settings.engine == "torch":
        from services.executor.engine.ring_engine import follow_ring

        follow_ring(settings, spec, board, rendezvous)
        return
    mine = board.rank(spec.rank)
    receiver = PlanReceiver(rendezvous.host, rendezvous.plan_port, rendezvous.secret, settings.start_timeout)
    while (plan := receiver.receive()) is not None:
        mine.begin(plan.step)
        mine.end(plan.step)
