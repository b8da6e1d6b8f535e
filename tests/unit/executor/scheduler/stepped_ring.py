"""A batcher with the fake engine, stepped by hand."""

import random

import pytest

from services.executor.core.engine import BadLogits, EngineSpec, RestoreFailed, SampledToken, SpilledBlock
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Entries, Scheduler
from services.executor.scheduler.steps import SampledRow
from services.executor.worker.launches import Launches
from shared.errors import InternalError
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.scheduler.drafts.fake_drafter import FakeDrafter
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, pairs

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
        lookahead: bool = False,
        stretch: float = 0.0,
        gap: float = 0.0,
        **spec: int,
    ) -> None:
        """`drafts` of a sequence at most, `right` with this probability. `lookahead`: plans ahead where it may.
        `stretch`: steps may take so many times as long beside a long prompt, `gap` seconds in any case; then each
        takes 10 ms and 1 ms a token.
        `spec`: further fields of `EngineSpec`."""
        self.lookahead = lookahead
        self.spec = EngineSpec(BLOCK, blocks, context, VOCAB, **spec)
        settings = BatchSettings(
            tokens, sequences, waiting, session_ttl=ttl, max_drafts=drafts, prefill_stretch=stretch, prefill_gap=gap
        )
        drafter = FakeDrafter(self.spec, settings, random.Random(7), right) if drafts else None
        self.batcher = Scheduler(self.spec, settings, "m", drafter)
        self.engine = FakeEngine(self.spec)
        self.launches = Launches(self.engine.execute)
        # Planned ahead, while the step before it is under way.
        self.later: tuple[StepPlan, list[SampledRow]] | None = None
        self.ahead = 0  # steps that were planned ahead
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

    def schedule(self) -> tuple[StepPlan, list[SampledRow]]:
        step = self.next_step()
        assert step is not None
        return step

    def next_step(self) -> tuple[StepPlan, list[SampledRow]] | None:
        """The one that was planned ahead, or a new one."""
        step, self.later = self.later, None
        if step is not None:
            return step
        step = self.batcher.schedule(self.now)
        if step is not None:
            self.plans.append((step[0], [s.request.generation_id for s in step[1]]))
        return step

    def look_ahead(self) -> bool:
        """Plans the step behind the one under way, where that may be."""
        self.later = self.batcher.schedule_ahead(self.now)
        if self.later is None:
            return False
        self.ahead += 1
        self.plans.append((self.later[0], [s.request.generation_id for s in self.later[1]]))
        self.batcher.check()
        return True

    def execute(self, step: tuple[StepPlan, list[SampledRow]]) -> list[SampledToken]:
        return self.launches.launch(step[0], [s.sampling for s in step[1]]).result()

    def finish(self, step: tuple[StepPlan, list[SampledRow]]) -> list[TokenEntry]:
        if self.lookahead and self.later is None:
            self.look_ahead()
        try:
            timed = self.batcher._settings.prefill_stretch > 0
            seconds = 0.010 + 0.001 * len(as_int32(step[0].token_ids)) if timed else 0.0
            entries = self.batcher.update(self.execute(step), seconds)
        except RestoreFailed as error:
            entries = self.batcher.fail_restores(error.slots)
        self.batcher.check()
        return self.take(entries)

    def fail(self, step: tuple[StepPlan, list[SampledRow]], rows: set[int]) -> list[TokenEntry]:
        """The step is executed, and these rows are no numbers; what was planned behind it is in vain."""
        self.engine.bad_rows = rows
        with pytest.raises(BadLogits):
            self.execute(step)
        if self.later is not None:
            self.execute(self.later)
            self.later = None
        entries = self.batcher.fail_step(InternalError("NaN"), rows)
        self.batcher.check()
        return self.take(entries)

    def step(self) -> list[TokenEntry]:
        return self.finish(self.schedule())

    def run(self) -> None:
        while self.batcher.has_work or self.later is not None:
            step = self.next_step()
            if step is None:
                assert self.take(self.batcher.take_entries())
            else:
                self.finish(step)

    def on_disk(self) -> list[SpilledBlock]:
        """What the plans have had written there, in that order."""
        slots: dict[int, tuple[bytes, bytes, bytes]] = {}
        for plan, _ in self.plans:
            for (_, slot), key in zip(pairs(plan.saves), plan.save_keys, strict=True):
                slots.pop(slot, None)
                slots[slot] = key
        return [SpilledBlock(slot, key) for slot, key in slots.items() if slot >= self.spec.num_host]

    def recover(self, last: "Ring") -> int:
        """This ring starts with what `last` had on disk when it was killed; how many blocks it can find."""
        blocks = last.on_disk()
        self.engine.spilled = {block.slot: list(last.engine.spilled[block.slot]) for block in blocks}
        return self.batcher.recover(blocks)

    def tokens(self, name: str) -> list[int]:
        return [token for entry in self.log if entry.generation_id == name for token in entry.tokens]

    def last(self, name: str) -> TokenEntry:
        return [entry for entry in self.log if entry.generation_id == name][-1]


def lens(plan: StepPlan) -> list[int]:
    return as_int32(plan.query_lens).tolist()


def arrays(plan: StepPlan, *names: str) -> list[list[int]]:
    return [as_int32(getattr(plan, name)).tolist() for name in names]
