"""A drafter that knows what the fake engine will say, and is wrong when it likes."""

import random
from collections.abc import Sequence as Seq

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.engine_drafts import AcceptanceStats, DraftPolicy, EngineDrafts, Proposal
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.scheduler.drafts.speculation import StepCost
from services.executor.scheduler.sequence import Sequence
from tests.unit.executor.scheduler.fake_engine import VOCAB, next_token


class WhimsicalPolicy(DraftPolicy):
    """Decides by chance, and anew each time."""

    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__(most, StepCost())
        self._rng = rng

    def takes_on(self, stats: AcceptanceStats, decodes: int) -> bool:
        return self._rng.random() < 0.99

    def count(self, decodes: int, stats: Seq[AcceptanceStats], most: int) -> int:
        return self._rng.randint(0, most)

    def step_over(self, running: int) -> None:
        self.used = self._rng.random() < 0.97


class DevotedPolicy(DraftPolicy):
    """Takes part wherever it can, with as much as it may."""

    def __init__(self, most: int) -> None:
        super().__init__(most, StepCost())
        self.right = self.wrong = 0  # proposals, as far as they were compared

    def learn(self, proposal: Proposal, drawn: Seq[int]) -> int:
        right = super().learn(proposal, drawn)
        self.right += right
        self.wrong += right < min(len(proposal.drafted), len(drawn))
        return right

    def takes_on(self, stats: AcceptanceStats, decodes: int) -> bool:
        return True

    def count(self, decodes: int, stats: Seq[AcceptanceStats], most: int) -> int:
        return min(self._most, most)

    def step_over(self, running: int) -> None:
        """It stays in use."""


def engine_of(drafter: Drafter) -> EngineDrafts:
    assert isinstance(drafter.engine, EngineDrafts)
    return drafter.engine


class FakeDrafter(Drafter):
    """Proposes as much as it may, of tokens that are right with a set probability."""

    def __init__(self, spec: EngineSpec, settings: BatchSettings, rng: random.Random, right: float = 0.7) -> None:
        super().__init__(spec, settings, PROPOSERS)
        self._rng = rng
        self._right = right
        if self.engine is not None:
            engine_of(self).policy = WhimsicalPolicy(settings.max_drafts, rng)

    def may_rest(self, sequences: Seq[Sequence]) -> bool:
        return self._rng.random() < 0.5

    def _may_pay(self, decodes: int) -> bool:
        return True

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        found = []
        for sequence, limit in zip(sequences, limits, strict=True):
            count = self._rng.randint(0, min(limit, budget))
            offer = engine_of(self).proposals.get(sequence) if self.engine is not None else None
            drafts = self._tokens(sequence, count)
            if offer is not None and self._rng.random() < 0.8:
                drafts = offer.tokens(count)
            budget -= len(drafts)
            found.append(drafts)
        return found

    def _tokens(self, sequence: Sequence, count: int) -> list[int]:
        drafts: list[int] = []
        seed = sequence.request.sampling.seed
        for position in range(sequence.output_tokens, sequence.output_tokens + count):
            token = next_token(list(sequence.tokens) + drafts, seed, position)
            drafts.append(token if self._rng.random() < self._right else self._rng.randrange(VOCAB))
        return drafts
