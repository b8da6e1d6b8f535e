"""Tables of states are the code's own, and what was seen is counted against them."""

import importlib
import io
from typing import get_args

import pytest
from rich.console import Console

from tests.simulation.search.coverage import Coverage
from tests.simulation.search.states import MACHINES
from tests.simulation.systems.outcome import Seen
from tests.simulation.systems.transitions import Transitions


@pytest.mark.parametrize("kind", MACHINES)
def test_a_table_has_each_state_of_the_code_and_no_other(kind: str) -> None:
    module, _, name = MACHINES[kind].states.partition(":")
    assert MACHINES[kind].all_states() == set(get_args(getattr(importlib.import_module(module), name)))


def test_transitions_are_counted_under_the_faults_that_last() -> None:
    lasting: list[str] = []
    transitions = Transitions(lambda: lasting)
    transitions.moved("batch", "one", "validating")
    transitions.moved("batch", "one", "validating")
    lasting += ["pause", "kill"]
    transitions.moved("batch", "one", "in_progress")
    transitions.moved("batch", "two", "validating")
    transitions.gone("batch", "two")
    transitions.moved("batch", "two", "validating")
    assert transitions.seen() == [
        Seen("batch", "", "validating", "", 1),
        Seen("batch", "", "validating", "kill+pause", 2),
        Seen("batch", "validating", "in_progress", "kill+pause", 1),
    ]


def test_what_was_never_seen_is_named_and_what_no_table_has_too() -> None:
    coverage = Coverage()
    coverage.add([Seen("batch", "", "validating", "kill+pause", 2), Seen("batch", "completed", "failed", "", 1)])
    coverage.add([Seen("batch", "", "validating", "kill", 3)])
    assert ("batch", "", "validating") not in coverage.never()
    assert ("batch", "finalizing", "expired") in coverage.never()
    assert coverage.unknown() == [("batch", "completed", "failed")]
    console = Console(width=120, record=True, file=io.StringIO())
    for table in coverage.tables():
        console.print(table)
    text = console.export_text()
    shown = {" ".join(line.split("│")).strip() for line in text.splitlines()}
    rows = {" ".join(row.split()) for row in shown}
    assert "new → validating 5 kill 5, pause 2" in rows
    assert "finalizing → expired NEVER" in rows
    assert "completed → failed (in no table) 1 none 1" in rows
