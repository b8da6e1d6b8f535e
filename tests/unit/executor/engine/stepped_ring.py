"""A batcher with the fake engine, stepped by hand."""

import random

from services.executor.engine.admission import BatchSettings
from services.executor.engine.batching import ContinuousBatcher, Entries
from services.executor.engine.plan import StepPlan, as_int32
from services.executor.engine.plan_builder import Row
from services.executor.engine.protocol import EngineSpec, RestoreFailed
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.engine.fake_drafter import FakeDrafter
from tests.unit.executor.engine.fake_engine import VOCAB, FakeEngine

BLOCK = 4


def ask(name: str, prompt: int | list[int] = 5, max_tokens: int = 4, **fields: object) -> GenerationRequest:
    tokens = [(i * 7 + len(name)) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    return GenerationRequest(name, "r", "m", "gateway", tokens, max_tokens, **fields)  # type: ignore[arg-type]


class Ring:
    """A batcher with the fake engine, stepped by hand."""

    def __init__(
        self,
        blocks: int = 64,
        tokens: int = 16,
        sequences: int = 4,
        waiting: int = 100,
        context: int = 200,
        ttl: float = 0.0,
        drafts: int = 0,
        right: float = 0.7,
        **spec: int,
    ) -> None:
        """`drafts` of a sequence at most, `right` with this probability. `spec`: further fields of
        `EngineSpec`."""
        self.spec = EngineSpec(BLOCK, blocks, context, VOCAB, **spec)
        settings = BatchSettings(tokens, sequences, waiting, session_ttl=ttl, max_drafts=drafts)
        drafter = FakeDrafter(self.spec, settings, random.Random(7), right) if drafts else None
        self.batcher = ContinuousBatcher(self.spec, settings, "m", drafter)
        self.engine = FakeEngine(self.spec)
        self.now = 0.0
        self.log: list[TokenEntry] = []
        self.plans: list[tuple[StepPlan, list[str]]] = []

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            assert self.batcher.add(request) is None

    def take(self, entries: Entries) -> list[TokenEntry]:
        new = [entry for batch in entries.values() for entry in batch]
        self.log += new
        return new

    def schedule(self) -> tuple[StepPlan, list[Row]]:
        step = self._schedule()
        assert step is not None
        return step

    def _schedule(self) -> tuple[StepPlan, list[Row]] | None:
        step = self.batcher.schedule(self.now)
        if step is not None:
            self.plans.append((step[0], [s.request.generation_id for s in step[1]]))
        return step

    def finish(self, step: tuple[StepPlan, list[Row]]) -> list[TokenEntry]:
        plan, sequences = step
        try:
            entries = self.batcher.update(self.engine.execute(plan, [s.sampling for s in sequences]))
        except RestoreFailed as error:
            entries = self.batcher.fail_restores(error.slots)
        self.batcher.check()
        return self.take(entries)

    def step(self) -> list[TokenEntry]:
        return self.finish(self.schedule())

    def run(self) -> None:
        while self.batcher.has_work:
            step = self._schedule()
            if step is None:
                assert self.take(self.batcher.take_entries())
            else:
                self.finish(step)

    def tokens(self, name: str) -> list[int]:
        return [token for entry in self.log if entry.generation_id == name for token in entry.tokens]

    def last(self, name: str) -> TokenEntry:
        return [entry for entry in self.log if entry.generation_id == name][-1]


def lens(plan: StepPlan) -> list[int]:
    return as_int32(plan.query_lens).tolist()
