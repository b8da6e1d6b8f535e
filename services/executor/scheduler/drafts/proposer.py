"""The interface of what proposes tokens for a step to check: n-grams, draft models, draft heads (`proposers/`).

    before a step   propose ──▶ offers ──▶ `Speculation` takes what pays ──▶ chosen
    behind it       learn: what was drawn where they had looked

A proposer is asked once per step, for all of its sequences. What it keeps of a sequence lies in `Sequence.proposing`,
under its name. One whose proposals the engine computes (`engine_drafts.py`) has a round before a step is planned, too.
Proposals change how long a text takes, and never the text.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.drafts.speculation import Offer, StepCost
from services.executor.scheduler.sequence import Sequence


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
        """Its offers of these sequences were the best of all. Nothing, for one that knows by the drafts that are
        checked."""
        return

    def pass_over(self, sequences: Seq[Sequence]) -> None:
        """No drafts could pay in the next step, of these sequences: it is not asked. Nothing, for one that learns all
        the same."""
        return

    def learn(self, results: Seq[Result]) -> None:
        """Of the sequences of a step, in their order."""
        ...

    def is_sure(self, sequence: Sequence) -> bool:
        """Whether its next offer for a sequence needs no other beside it."""
        return False

    def must_look(self, sequences: Seq[Sequence]) -> bool:
        """Whether no step of one token for each of `sequences` may be planned without asking it."""
        ...


class DraftingContext(NamedTuple):
    """What proposers know of their ring."""

    spec: EngineSpec
    settings: BatchSettings
    most: int  # drafts of a step at most
    cost: StepCost  # of steps
    limit: Callable[[Sequence], int]  # drafts after which a sequence may still put out one more token


ProposerMaker = Callable[[DraftingContext], Proposer | None]  # None: not with this engine
