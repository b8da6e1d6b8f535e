"""What a structural tag lets through is what it says, to the letter."""

from typing import Any

import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.sampling.structured_output import grammar_of_tags
from tests.unit.gateway.tool_calls.test_grammar import Vocabulary, lets_through

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ROME = '{"city":"Rome"}'


def tag(name: str, content: Any = None) -> dict[str, Any]:
    content = content or {"type": "json_schema", "json_schema": CITY}
    return {"begin": f"<f={name}>", "content": content, "end": "</f>"}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a"), tag("b")]} | more


TEXT = {"type": "any_text"}
YES = {"type": "const_string", "value": "yes"}
THOUGHTS = {"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"}
A, B = f"<f=a>{ROME}</f>", f"<f=b>{ROME}</f>"
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (YES, ["yes"], ["", "yes!", "no"]),
    ({"type": "regex", "pattern": "a/[0-9]+"}, ["a/17"], ["a/"]),
    ({"type": "json_schema", "json_schema": CITY}, [ROME], ['{"city":"Rome","more":1}', "{}"]),
    (THOUGHTS, ["<t></t>", "<t>so < </t>"], ["<t>", "<t></t> ", "<t></t></t>"]),
    ({"type": "sequence", "elements": [THOUGHTS, YES]}, ["<t>x</t>yes"], ["yes", "<t>x</t>"]),
    ({"type": "or", "elements": [YES, THOUGHTS]}, ["yes", "<t>x</t>"], ["", "yes<t></t>"]),
    (triggered(), ["", "none < f", f"so {A} and {B}."], ["<f=", "x<f=c>", "<f=a>{}</f>", f"{A}<f=b>"]),
    (triggered(at_least_one=True), [f"so {A}", A + B + "!"], ["", "none"]),
    (triggered(stop_after_first=True), ["none", f"so {A}"], [A + "!", A + B]),
    (triggered(triggers=["<f=a", "<f=b"]), [f"{A}{B} <f=c>"], ["<f=a>{}</f>", f"<f=b{A}"]),
    ({"type": "tag", "begin": "[", "content": triggered(), "end": "]"}, ["[]", f"[so {A}]"], ["[", f"[{A}", "[]]"]),
    (
        {"type": "tags_with_separator", "tags": [tag("a"), tag("b")], "separator": ", "},
        ["", A, f"{A}, {B}, {A}"],
        [f"{A}{B}", f"{A}, ", "x"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("a")], "separator": ",", "at_least_one": True},
        [A],
        [""],
    ),
    ({"type": "const_string", "value": 'a ::= "b"\n'}, ['a ::= "b"\n'], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "good", "bad"), CASES)
def test_a_format_is_followed_to_the_letter(given: dict[str, Any], good: list[str], bad: list[str]) -> None:
    vocabulary = Vocabulary(())
    grammar = grammar_of_tags({"format": given}, "response_format", closes=True)
    assert [text for text in good if not lets_through(grammar, vocabulary, text)] == []
    assert [text for text in bad if lets_through(grammar, vocabulary, text)] == []


def test_objects_are_open_where_the_request_says_so() -> None:
    grammar = grammar_of_tags({"format": triggered()}, "response_format", closes=False)
    assert lets_through(grammar, Vocabulary(()), '<f=a>{"city":"Rome","more":1}</f>')


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"type": "grammar"}, "response_format.format.type", "'triggered_tags'"),
        ({"type": "tag", "begin": "a"}, "response_format.format.content", "Missing"),
        (triggered(triggers=[]), "response_format.format.triggers", "empty array"),
        (triggered(triggers=["<f="] * 65), "response_format.format.triggers", "limit structural_triggers"),
        (triggered(triggers=["<g="]), "response_format", "0 of the triggers begin the tag '<f=a>'"),
        (triggered(triggers=["<", "<f"]), "response_format", "2 of the triggers"),
        ({"type": "sequence", "elements": [TEXT, YES]}, "response_format", "put it last, or in a tag"),
        (tag("a", {"type": "json_schema", "json_schema": {"const": 2**60}}), "response_format", "beyond 2^53"),
        ({"type": "or", "elements": [YES], "more": 1}, "response_format.format.more", "more"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(given: dict[str, Any], param: str, words: str) -> None:
    given = {"type": "tag", **given}
    with pytest.raises(InvalidParameter) as caught:
        grammar_of_tags({"format": given}, "response_format", closes=True)
    assert (caught.value.param, words in caught.value.message) == (param, True), caught.value.message


def test_nesting_is_bounded() -> None:
    given: dict[str, Any] = YES
    for _ in range(1000):
        given = {"type": "or", "elements": [given]}
    with pytest.raises(InvalidParameter, match="limit nesting"):
        grammar_of_tags({"format": given}, "response_format", closes=True)
