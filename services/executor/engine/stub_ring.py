"""The stub engine on a ring: the other ranks get every plan and compute nothing either."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from services.executor.board import RankBoard, RingBoard
from services.executor.engine.plan import StepPlan
from services.executor.engine.prompt_scores import Scores
from services.executor.engine.protocol import EngineSpec, Launched, ProgressCallback, SampledToken
from services.executor.engine.sampling_state import SamplingState
from services.executor.engine.stub import STUB_EOS_TOKEN, StubEngine
from services.executor.engine.vectors import Floats
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.plan_channel import PlanListener, PlanSender
from shared.messages import ModelCard

JOIN_TIMEOUT = 60.0


class _RingStep:
    """`Launched`, of the leader."""

    def __init__(self, board: RankBoard, plan: StepPlan, launched: Launched) -> None:
        self._board, self._plan, self._launched = board, plan, launched

    def result(self) -> list[SampledToken]:
        try:
            return self._board.clock.run(self._plan, self._launched.result)
        finally:
            self._board.end(self._plan.step)


class StubRing:
    """`Engine` of the leader of a ring that only pretends."""

    def __init__(
        self,
        stub: StubEngine,
        spec: RankSpec,
        board: RingBoard,
        listener: PlanListener,
        announce: Callable[[Rendezvous], None],
        directory: Path | None = None,
    ) -> None:
        """`directory`: of the model whose tokenizer clients' text goes through; None: a token is a byte."""
        self._stub = stub
        self._directory = directory
        self._spec = spec
        self._board = board.rank(0)
        self._listener = listener
        self._announce = announce
        self._sender = PlanSender([])

    def load(self, progress: ProgressCallback) -> EngineSpec:
        self._announce(Rendezvous(self._listener.host, self._listener.port, self._listener.secret))
        self._sender = self._listener.accept(self._spec.world_size - 1, JOIN_TIMEOUT)
        self._engine_spec = self._stub.load(progress)
        return self._engine_spec

    def card(self, model: str) -> tuple[ModelCard, bytes]:
        """Without a directory: no tokenizer (a token is a byte)."""
        spec = self._engine_spec
        if self._directory is not None:
            from services.executor.model_card import read_card  # with transformers, which takes seconds

            return read_card(self._directory, model, spec)
        card = ModelCard(model, spec.context_length, spec.vocab_size, [STUB_EOS_TOKEN], "", int(time.time()))
        return msgspec.structs.replace(card, embedding_size=spec.embedding_size), b""

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self._board.begin(plan.step)
        try:
            self._sender.send(plan)
            return self._board.clock.run(plan, partial(self._stub.execute, plan, samples))
        finally:
            self._board.end(plan.step)

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        self._board.begin(plan.step)
        self._sender.send(plan)
        return _RingStep(self._board, plan, self._stub.launch(plan, samples))

    def pooled(self) -> Floats:
        return self._stub.pooled()

    def scored(self) -> Scores:
        return self._stub.scored()

    def close(self) -> None:
        self._sender.close()
        self._stub.close()
