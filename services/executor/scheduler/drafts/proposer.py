"""The interface of what proposes tokens for a step to check: n-grams, draft models, draft heads (`proposers/`).

    before a step   propose ──▶ offers ──▶ `Speculation` takes what pays ──▶ chosen
    behind it       learn: what was drawn where they had looked

A proposer is asked once per step, for all of its sequences. What it keeps of a sequence lies in `Sequence.proposing`,
under its name. One whose proposals the engine computes (`EngineProposer`) has a round before a step is planned, too.
Proposals change how long a text takes, and never the text.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, runtime_checkable

from services.executor.core.engine import DraftPlan, DraftToken, EngineSpec
from services.executor.kv_cache.block_pool import Copies
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.drafts.speculation import Offer, StepCost
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import SampledRow, ScheduledTokens


class Result(NamedTuple):
    """What a step has given for one sequence, which has it already."""

    sequence: Sequence
    drafts: tuple[int, ...]  # what was checked
    drawn: list[int]  # new tokens: as many of the drafts as were right, and one more


class Proposer(Protocol):
    name: str

    @property
    def expects(self) -> bool:
        """Whether it has looked where tokens are about to be drawn, and is to be told of them: `learn`."""
        ...

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], least: float, skipped: int) -> Seq[Offer | None]:
        """For each sequence, `limits` tokens at most, as far as all of them are right with a probability above
        `least`. An offer says what that costs (`Offer.worth`). `skipped`: steps since the last one in which it was
        asked."""
        ...

    def chosen(self, sequences: Collection[Sequence]) -> None:
        """Its offers of these sequences were the best of all."""
        ...

    def pass_over(self, sequences: Seq[Sequence]) -> None:
        """No drafts could pay in the next step, of these sequences: it is not asked."""
        ...

    def learn(self, results: Seq[Result]) -> None:
        """Of the sequences of a step, in their order."""
        ...

    def is_sure(self, sequence: Sequence) -> bool:
        """Whether its next offer for a sequence needs no other beside it."""
        ...

    def must_look(self, sequences: Seq[Sequence]) -> bool:
        """Whether no step of one token for each of `sequences` may be planned without asking it."""
        ...


class EngineCounts:
    """What the engine has drafted since the ring has started."""

    def __init__(self) -> None:
        self.drafted = 0  # of the drafts that were checked, those that it has proposed
        self.accepted = 0  # of these, what was put out
        self.passes = 0
        self.seconds = 0.0  # of its rounds


@runtime_checkable
class EngineProposer(Proposer, Protocol):
    """One whose proposals the engine computes, in rounds before a step is planned (`Engine.draft`)."""

    counts: EngineCounts
    members: list[Sequence]  # of the round that is under way

    @property
    def used(self) -> bool:
        """Whether it keeps up with what steps compute, and proposes: as long as it pays."""
        ...

    def begin_round(
        self, running: Collection[Sequence], tables: BlockTables, is_sure: Callable[[Sequence], bool]
    ) -> int:
        """Chooses the `members` of a round before the next step, and makes room for their proposals. Returns how many
        these are to be of each; 0: there is no round. `is_sure`: of the sequences for which others propose."""
        ...

    def draft_plan(self, step: int, copies: Copies) -> tuple[DraftPlan, list[SampledRow]]:
        """The plan of the round that has begun, which takes the numbers from `step` on."""
        ...

    def take_round(self, found: Seq[Seq[DraftToken]], seconds: float) -> list[Sequence]:
        """Ends the round: `found` for each of the plan's rows, after so many seconds (0: nobody knows). Returns its
        members."""
        ...

    def drop_round(self) -> list[Sequence]:
        """Ends the round without a result: the engine drafts no more for its members. Returns these."""
        ...

    def forget(self) -> None:
        """The step that the proposals were for has failed."""
        ...

    def follows(self, batch: Seq[ScheduledTokens]) -> bool:
        """Whether it is to compute the rows of a step too (`StepPlan.followed`): else it would be behind for good
        with some sequence."""
        ...

    def checkable(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """How many of `drafts`, whoever has proposed them, may be checked without leaving it behind."""
        ...

    def without_following(self, seconds: float, rows: int) -> float:
        """What a step of so many rows would have taken, had it not computed them too."""
        ...

    def step_over(self, running: int) -> None:
        """A step is over, of a batch of `running` sequences."""
        ...


class DraftingContext(NamedTuple):
    """What proposers know of their ring."""

    spec: EngineSpec
    settings: BatchSettings
    most: int  # drafts of a step at most
    cost: StepCost  # of steps
    limit: Callable[[Sequence], int]  # drafts after which a sequence may still put out one more token


ProposerMaker = Callable[[DraftingContext], Proposer | None]  # None: not with this engine
