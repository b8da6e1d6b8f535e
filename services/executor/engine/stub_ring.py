"""The stub engine on a ring: the other ranks get every plan and compute nothing either."""

from collections.abc import Callable, Sequence

from services.executor.board import RingBoard
from services.executor.engine.plan import StepPlan
from services.executor.engine.protocol import EngineSpec, ProgressCallback, SampledToken
from services.executor.engine.sampling_state import SamplingState
from services.executor.engine.stub import StubEngine
from services.executor.plan_channel import PlanListener, PlanSender
from services.executor.ring import RankSpec, Rendezvous

JOIN_TIMEOUT = 60.0


class StubRing:
    """`Engine` of the leader of a ring that only pretends."""

    def __init__(
        self,
        stub: StubEngine,
        spec: RankSpec,
        board: RingBoard,
        listener: PlanListener,
        announce: Callable[[Rendezvous], None],
    ) -> None:
        self._stub = stub
        self._spec = spec
        self._board = board.rank(0)
        self._listener = listener
        self._announce = announce
        self._sender = PlanSender([])

    def load(self, progress: ProgressCallback) -> EngineSpec:
        self._announce(Rendezvous(self._listener.host, self._listener.port, store_port=0))
        self._sender = self._listener.accept(self._spec.world_size - 1, JOIN_TIMEOUT)
        return self._stub.load(progress)

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self._board.begin(plan.step)
        self._sender.send(plan)
        sampled = self._stub.execute(plan, samples)
        self._board.tick()
        self._board.end(plan.step)
        return sampled

    def close(self) -> None:
        self._sender.close()
        self._stub.close()
