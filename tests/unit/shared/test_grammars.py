"""Grammars that would kill whoever compiles them cost a process made for that, and a reason comes back."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.grammars import TOO_COMPLEX, GrammarCheck, verdict_on
from shared.messages import Grammar

FINE = Grammar("regex", "[0-9]+")


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck()
    yield made
    made.close()


def chain(length: int) -> Grammar:
    """Rules that lead from one to the next: the compiler follows them down its stack."""
    rules = "".join(f'r{index}: "x" r{index + 1}\n' for index in range(length))
    return Grammar("lark", f'start: r0\n{rules}r{length}: "a"')


def intersection(count: int) -> Grammar:
    """Time and memory double with each further pattern."""
    patterns = [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n}}}x"} for n in range(count)]
    return Grammar("json_schema", json.dumps({"allOf": patterns}))


@pytest.mark.slow
@pytest.mark.parametrize("grammar", [chain(12_000), intersection(24)], ids=["stack", "time and memory"])
def test_what_kills_the_compiler_is_refused_and_the_next_one_is_answered(check: GrammarCheck, grammar: Grammar) -> None:
    assert check.check(grammar).problem == TOO_COMPLEX
    assert check.check(FINE).grammar == FINE


def test_what_the_compiler_gives_up_by_itself_gets_the_same_answer() -> None:
    assert verdict_on(intersection(8)).problem == TOO_COMPLEX


def test_one_process_answers_one_after_the_other(check: GrammarCheck) -> None:
    assert check.check(FINE).problem == ""
    process = check._process
    assert check.check(Grammar("regex", "(")).problem
    assert check.check(Grammar("lark", "start: b")).problem
    assert check._process is process


def test_it_has_none_of_our_settings(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_NATS_PASSWORD", "secret")
    check.check(Grammar("regex", "a+"))
    assert b"RYZANSTEIN_" not in Path(f"/proc/{check._process.pid}/environ").read_bytes()


def test_a_process_that_was_killed_is_replaced(check: GrammarCheck) -> None:
    check.check(FINE)
    check._process.kill()
    check._process.wait()
    assert check.check(FINE).grammar == FINE


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", "[]"), "not a JSON object"),
        (Grammar("json_schema", '{"enum": [1, {"a": 9007199254740993}]}'), "9007199254740993"),
        (Grammar("lark", "  "), "empty"),
        (Grammar("regex", ""), "empty"),
    ],
)
def test_what_is_no_grammar_is_told(grammar: Grammar, reason: str) -> None:
    assert reason in verdict_on(grammar).problem


def test_gbnf_becomes_larks_notation() -> None:
    grammar = verdict_on(Grammar("lark", 'root ::= "a" [0-9]+')).grammar
    assert "start:" in grammar.text
    assert "GBNF" in verdict_on(Grammar("lark", "root ::= (((")).problem


def test_nesting_is_no_danger() -> None:
    for opening, closing in (('{"type":"array","items":', "}"), ('{"anyOf":[', "]}"), ('{"const":[', "]}")):
        text = opening * 20_000 + "{}" + closing * 20_000
        assert verdict_on(Grammar("json_schema", text)).problem
    for kind in ("regex", "lark"):
        deep = "(" * 50_000 + '"a"' + ")" * 50_000
        assert verdict_on(Grammar(kind, deep if kind == "regex" else f"start: {deep}")).problem  # type: ignore[arg-type]
