"""Every family's calls are found, and the same however the text is cut into pieces."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.tool_calls.families import FAMILIES
from services.gateway.tool_calls.parser import REASONING, Parser
from services.gateway.tool_calls.parsers.scanner import Event, Text
from tests.unit.gateway.tool_calls.texts import CASES, TYPES, Case, calls_of, content_of, thoughts_of

FRAGMENTS = sorted({part for case in CASES for part in case.text.split(" ")} | {"\n", " ", "\\", '"', "{}"})


def parse(family: str, pieces: list[str], *, thinking: str = "", opened: bool = False) -> list[Event]:
    machine = FAMILIES[family].machine if family else None
    parser = Parser(machine, TYPES, thinking=thinking, opened=opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind are one event."""
    found: list[Event] = []
    for event in events:
        if found and not hasattr(event, "name") and type(found[-1]) is type(event):
            found[-1] = type(event)(found[-1].text + event.text)
        else:
            found.append(event)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.text[:40]}")
def test_calls_are_found(case: Case) -> None:
    events = parse(case.family, [case.text])
    assert calls_of(events) == case.calls
    assert content_of(events) == (case.text if case.content == "@" else case.content)
    assert joined(parse(case.family, list(case.text))) == joined(events)


def test_every_family_has_a_text() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A family, and a text in pieces: calls, parts of calls and anything else."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    own = [case.text for case in CASES if case.family == family]
    part = st.sampled_from(own) | st.sampled_from(FRAGMENTS) | st.text(max_size=5)
    text = "".join(draw(st.lists(part, max_size=5)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400)
@given(cut_texts(), st.sampled_from([("", False), ("think", True), *((name, False) for name in REASONING)]))
@example(("hermes", ['<tool_call>{"name": "a\\', 'ud800", "arguments": "\\udfff"}']), ("", False))
def test_cuts_change_nothing(cut: tuple[str, list[str]], thinking: tuple[str, bool]) -> None:
    family, pieces = cut
    name, opened = thinking
    whole = parse(family, ["".join(pieces)], thinking=name, opened=opened)
    assert joined(parse(family, pieces, thinking=name, opened=opened)) == joined(whole)
    json.dumps([list(event) for event in whole], ensure_ascii=False).encode()  # nothing that has no UTF-8


@settings(max_examples=200)
@given(cut_texts())
def test_text_without_calls_is_the_answer_itself(cut: tuple[str, list[str]]) -> None:
    family, pieces = cut
    events = parse(family, pieces)
    if not calls_of(events):
        assert content_of(events) == "".join(pieces)


@settings(max_examples=200)
@given(st.text(max_size=20), st.integers(0, 20))
def test_plain_text_comes_without_delay(text: str, at: int) -> None:
    """No marker begins in it, so nothing but white space waits."""
    text = "x" + "".join(char for char in text if char not in "<[")
    parser = Parser(FAMILIES["hermes"].machine, TYPES)
    assert content_of(parser.feed(text[:at])) == text[:at].rstrip()


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes. ", False, "hm", "Yes. "),
        ("hm\n\nso</think>Yes.", True, "hm\n\nso", "Yes."),
        ("<think>hm", False, "hm", ""),
        ("<think></think>\nYes.", False, "", "Yes."),
        ("Yes </think>.", False, "", "Yes </think>."),
        (" \nYes", False, "", " \nYes"),
        ("<thin air", False, "", "<thin air"),
    ],
)
def test_reasoning(text: str, opened: bool, thoughts: str, content: str) -> None:
    for pieces in ([text], list(text)):
        events = parse("", pieces, thinking="think", opened=opened)
        assert (thoughts_of(events), content_of(events)) == (thoughts, content)


HARMONY = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "text", "thoughts", "content"),
    [
        ("mistral", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
        ("seed_oss", "<seed:think>hm</seed:think>Yes.", "hm", "Yes."),
        ("longcat", "<longcat_think>hm</longcat_think>\nYes.", "hm", "Yes."),
        ("hy_v3", "<think:opensource>hm</think:opensource>Yes.", "hm", "Yes."),
        ("hy_v3", "<think>hm</think> Yes.", "hm", "Yes."),
        ("hy_v3", "<think:a1>h</thinker>m</think:a1>Yes.", "h</thinker>m", "Yes."),
        ("hy_v3", "<thinker>Yes.", "", "<thinker>Yes."),
        ("hy_v3", "<think", "", "<think"),
        ("gemma4", "<|channel>thought\nhm\n<channel|>Yes.", "hm", "Yes."),
        ("granite", "Here is my thought process: hm. Here is my response: Yes.", "hm.", "Yes."),
        ("granite", "Here is no thought", "", "Here is no thought"),
        ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>", "hm", "Yes.\n"),
        ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes, <answer", "hm", "Yes, <answer"),
        ("hunyuan_a13b", "Yes.</answer>", "", "Yes.</answer>"),
        ("ernie45", "<think>hm</think>\n\n<response>\nYes.</response>\n", "hm", "Yes.\n"),
        ("apertus", "<|inner_prefix|>hm<|inner_suffix|>Yes.", "hm", "Yes."),
        ("cohere_command3", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "hm", "Yes."),
        ("cohere_command4", "<|START_TEXT|>Yes.<|END_TEXT|>", "", "Yes."),
        ("kimi_k2", "<think>hm</think>Yes.", "hm", "Yes."),
        ("kimi_k2", "<think>hm<|tool_calls_section_begin|>x", "hm", "<|tool_calls_section_begin|>x"),
        ("openai_gptoss", f"<|channel|>analysis<|message|>hm<|end|>{HARMONY}Yes.<|return|>", "hm", "Yes."),
        (
            "openai_gptoss",
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>{HARMONY}c",
            "a\nb",
            "c",
        ),
        ("openai_gptoss", "<|channel|>commentary<|message|>I look.<|end|>", "", "I look."),
        ("openai_gptoss", "<|channel|>analysis<|message|>hm", "hm", ""),
        ("openai_gptoss", "<|channel|>analysis", "", "<|channel|>analysis"),
        ("openai_gptoss", '{"a": "<|b"}', "", '{"a": "<|b"}'),
        ("openai_gptoss", "<|start|>" + "x" * 600 + "<|message|>", "", "<|start|>" + "x" * 600 + "<|message|>"),
    ],
)
def test_reasoning_of_each_family(name: str, text: str, thoughts: str, content: str) -> None:
    whole = parse("", [text], thinking=name)
    assert (thoughts_of(whole), content_of(whole)) == (thoughts, content)
    assert joined(parse("", list(text), thinking=name)) == joined(whole)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("a<think:6124c78e>\n", True),
        ("a<think>", True),
        ("a<think:x></think:x>", False),
        ("a<thinking>", False),
        ("", False),
    ],
)
def test_prompts_that_end_within_the_reasoning(prompt: str, opened: bool) -> None:
    assert REASONING["hy_v3"].opened_by(prompt) == opened


def test_every_reasoning_parser_has_a_text() -> None:
    marks = test_reasoning_of_each_family.pytestmark[0]  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} | {"think"} == set(REASONING)


def test_calls_among_messages_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    )
    for pieces in ([text], list(text)):
        events = parse("openai", pieces, thinking="openai_gptoss")
        assert (thoughts_of(events), content_of(events)) == ("hm", "I look.")
        assert calls_of(events) == (("now", "{}"),)


def test_calls_behind_reasoning() -> None:
    text = '<think>I could <tool_call>.</think>\n<tool_call>{"name": "now"}</tool_call>'
    events = parse("hermes", [text], thinking="think")
    assert thoughts_of(events) == "I could <tool_call>."
    assert calls_of(events) == (("now", "{}"),)
    assert not content_of(events)


def test_arguments_come_as_they_are_written() -> None:
    parser = Parser(FAMILIES["hermes"].machine, TYPES)
    assert parser.feed('<tool_call>{"name": "f"') != []
    assert calls_of([*parse("hermes", ['<tool_call>{"name": "f"'])]) == (("f", ""),)
    seen = [parser.feed(piece) for piece in (', "arguments": {"b":', ' "lo', "ng", ' text"', "}}")]
    assert all(seen)
    assert "".join(event.text for events in seen for event in events) == '{"b": "long text"}'  # type: ignore[union-attr]


def test_long_arguments_take_linear_time() -> None:
    """A file of 200,000 characters as an argument, in pieces of four."""
    text = '<tool_call>{"name": "f", "arguments": {"b": "' + "x" * 200_000
    parser = Parser(FAMILIES["hermes"].machine, TYPES)
    found = [event for at in range(0, len(text), 4) for event in parser.feed(text[at : at + 4])]
    assert calls_of(found)[0][1].count("x") == 200_000
    assert not any(isinstance(event, Text) for event in found)
