"""Tenants take turns at the compiler, and nobody has all of it."""

import pytest

from services.gateway.core.errors import RateLimited
from services.gateway.intake.sampling.grammars import MINUTE, GrammarTurns
from shared.errors import QueueFull
from shared.limits import GRAMMAR_SECONDS, GRAMMARS_WAITING, TENANT_GRAMMARS


def drained(turns: GrammarTurns[str]) -> list[str]:
    found = []
    while (job := turns.next()) is not None:
        found.append(job)
    return found


def test_tenants_take_turns() -> None:
    turns: GrammarTurns[str] = GrammarTurns()
    for job in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.admit(job[0], job, 0.0)
    assert len(turns) == 6
    assert drained(turns) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert not len(turns)


def test_a_tenant_that_has_many_waiting_keeps_none_of_the_others_out() -> None:
    turns: GrammarTurns[str] = GrammarTurns()
    for number in range(TENANT_GRAMMARS.value):
        turns.admit("a", f"a{number}", 0.0)
    with pytest.raises(QueueFull, match="limit tenant_grammars: 16 entries, fixed"):
        turns.admit("a", "one more", 0.0)
    turns.admit("b", "b0", 0.0)
    assert drained(turns)[:2] == ["a0", "b0"]


def test_no_more_wait_of_all_tenants_than_may() -> None:
    turns: GrammarTurns[str] = GrammarTurns()
    for number in range(GRAMMARS_WAITING.value):
        turns.admit(f"t{number}", "job", 0.0)
    with pytest.raises(QueueFull, match="limit grammars_waiting"):
        turns.admit("another", "job", 0.0)


def test_time_at_the_compiler_is_the_tenants_own() -> None:
    turns: GrammarTurns[str] = GrammarTurns()
    for at in range(GRAMMAR_SECONDS.value):
        turns.admit("a", "job", float(at))
        turns.next()
        turns.spent("a", 1.0, float(at))
    with pytest.raises(RateLimited, match="limit grammar_seconds: 20 seconds") as caught:
        turns.admit("a", "job", 20.0)
    assert caught.value.wait == MINUTE - 20.0
    turns.admit("b", "job", 20.0)
    turns.admit("a", "job", MINUTE + 0.5)
