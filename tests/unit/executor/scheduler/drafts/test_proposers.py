"""Proposers: each can be taken out of the list, and the rest serves as ever."""

import pytest

from services.executor.scheduler.drafts.proposer import ProposerMaker
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.scheduler.drafts.proposers.draft_models import draft_heads, draft_models
from services.executor.scheduler.drafts.proposers.ngrams import ngrams
from tests.unit.executor.scheduler.drafts.test_draft_model import Ring
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import ask


class Said:
    """What a ring gives for some requests, one of which has a prediction that is right."""

    def __init__(self, makers: list[ProposerMaker], drafts: bool = False, **engine: bool) -> None:
        ring = Ring(devoted=False, makers=makers, with_model=drafts, **engine)
        requests = [ask("a", 5, 40), ask("bb", 9, 37), ask("ccc", 14, 30)]
        requests[0] = ask("a", 5, 40, prediction=undisturbed(requests[0], 40))
        ring.add(*requests)
        ring.run()
        self.drafter, self.steps = ring.batcher.drafter, len(ring.plans)
        self.texts = {one.generation_id: ring.text(one.generation_id) for one in requests}
        assert self.texts == {one.generation_id: undisturbed(one, one.max_tokens) for one in requests}


ENGINES = {"plain": {}, "model": {"drafts": True}, "head": {"drafts": True, "draft_reads_states": True}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("left_out", [None, *PROPOSERS], ids=lambda maker: getattr(maker, "__name__", "none"))
def test_without_one_proposer_the_rest_serves(left_out: ProposerMaker | None, engine: str) -> None:
    own = {"plain": None, "model": draft_models, "head": draft_heads}[engine]
    said = Said([maker for maker in PROPOSERS if maker is not left_out], **ENGINES[engine])
    assert (said.drafter.engine is not None) == (own is not None and own is not left_out)
    assert (said.drafter.engine_counts.accepted > 0) == (said.drafter.engine is not None)
    if said.drafter.engine is None:
        assert (said.drafter.accepted > 25) == (left_out is not ngrams), "the prediction is one of 40 tokens"


def test_without_any_nothing_is_drafted() -> None:
    said = Said([], drafts=True)
    assert said.drafter.drafted == 0
    assert said.drafter.engine is None
    assert said.steps == 40, "a token each"
