"""The summary of the reasoning is an extract, and a function of the text however it is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.responses.stream.items import Summary, SummaryStep

THOUGHTS = "First. I look\nat it! More.\n\n\nThen 3.14 is near. Yes.\n \n Last"


def steps_of(pieces: list[str], *, concise: bool) -> list[SummaryStep]:
    summary = Summary(concise=concise)
    return [step for piece in pieces for step in summary.feed(piece)] + summary.finish()


@pytest.mark.parametrize(
    ("concise", "parts"),
    [
        (False, ["First. I look\nat it! More.", "Then 3.14 is near. Yes.", "Last"]),
        (True, ["First.", "Then 3.14 is near.", "Last"]),
    ],
)
def test_each_paragraph_is_a_part(concise: bool, parts: list[str]) -> None:
    steps = steps_of([THOUGHTS], concise=concise)
    assert [step.text for step in steps if step.kind == "end"] == parts
    assert [step.part for step in steps if step.kind == "begin"] == [0, 1, 2]


@given(st.text("a. \n", max_size=40), st.booleans(), st.lists(st.integers(0, 40)))
def test_cuts_change_nothing(text: str, concise: bool, cuts: list[int]) -> None:
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    whole, cut = steps_of([text], concise=concise), steps_of(pieces, concise=concise)
    assert [step for step in whole if step.kind != "text"] == [step for step in cut if step.kind != "text"]
    for part in {step.part for step in whole}:
        said = "".join(step.text for step in cut if step.kind == "text" and step.part == part)
        (end,) = (step.text for step in cut if step.kind == "end" and step.part == part)
        assert said == end
        assert end == end.strip() != ""


def test_nothing_but_space_has_no_summary() -> None:
    assert steps_of(["\n \n"], concise=True) == []
