"""What an answer must look like where tools are demanded, or promised to be strict. Pure.

required, named     reasoning?  calls
strict, auto        reasoning?  text without the trigger, and calls behind each trigger
a format, auto      reasoning?  calls, or the format
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.tool_calls.closed_objects import closed
from services.gateway.tool_calls.grammar_rules import (
    NOTHING,
    CallGrammarSource,
    Form,
    Rules,
    Specials,
    form_of,
    joined,
    literal,
    up_to,
    without,
)
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.parsers.tagged import without_suffix
from services.gateway.tool_calls.schemas import FunctionDefinition
from shared.grammars import embedded
from shared.messages import Grammar


class Calling(NamedTuple):
    """How calls are written, and which there may be."""

    family: str
    variant: str
    functions: Sequence[FunctionDefinition]
    single: bool
    specials: Specials
    closes: bool = True
    """Whether objects among arguments have no properties but those that their schemas name."""


def required_calls(calling: Calling, reasoning: str, *, opened: bool) -> Grammar:
    """One call or more, and nothing else but the reasoning before them."""
    rules = Rules()
    before = _before_calls(rules, calling, reasoning, opened=opened)
    rules.add("start", joined(before, "calls"))
    rules.add("calls", _calls(rules, calling, checked_all=True))
    return Grammar("lark", rules.text())


def strict_calls(calling: Calling, reasoning: str, *, opened: bool) -> Grammar | None:
    """Any text, and calls whose arguments match the schemas of functions that are `strict`. None where nothing
    tells the beginning of a call from other text (one special token, or text without any), or no function is strict."""
    form = form_of(calling.family, calling.variant)
    if not any(function.strict for function in calling.functions):
        return None
    if not form.trigger or any(text in form.trigger != text for text in calling.specials):
        return None
    rules = Rules()
    before = _before_calls(rules, calling, reasoning, opened=opened)
    rules.add("start", joined(before, "(until_calls behind_trigger)* free"))
    attributes, body = up_to(form.trigger, calling.specials)
    rules.add("until_calls", body, attributes)
    rules.add("free", "FREE")
    rules.add("behind_trigger", _behind_trigger(rules, form, calling, checked_all=False))
    rules.add("FREE", without(form.trigger, calling.specials))
    return Grammar("lark", rules.text())


def calls_or(calling: Calling, answer: Grammar, reasoning: str, *, opened: bool) -> Grammar:
    """Calls, or what the client wants the answer to look like. Raises `InvalidParameter`."""
    rules = Rules()
    before = _before_calls(rules, calling, reasoning, opened=opened)
    begin = literal(REASONING[reasoning].before_answer, calling.specials) if reasoning else NOTHING
    rules.add("start", joined(before, f"(calls | {joined(begin, 'answer')})"))
    rules.add("calls", _calls(rules, calling, checked_all=False))
    rules.add("answer", _answer(answer))
    return Grammar("lark", rules.text())


def behind_reasoning(answer: Grammar, reasoning: str, specials: Specials, *, opened: bool = True) -> Grammar:
    """`answer` behind the reasoning, in which the prompt ends where it is `opened`. Raises `InvalidParameter`."""
    rules, marks = Rules(), REASONING[reasoning]
    before = _reasoning(rules, specials, reasoning, opened=opened, behind=marks.before_calls)
    rules.add("start", joined(before, literal(marks.before_answer, specials), "answer"))
    rules.add("answer", _answer(answer))
    return Grammar("lark", rules.text())


def _answer(answer: Grammar) -> str:
    if answer.kind == "json_schema":
        schema = msgspec.json.decode(answer.text)
        if isinstance(schema, dict):
            return embedded(schema)
    if answer.kind == "regex":
        return "/" + answer.text.replace("/", "\\/") + "/"
    raise InvalidParameter(
        "Unsupported parameter: a grammar of the answer is not supported together with tools or reasoning; send "
        "tool_choice 'none', turn the reasoning off, or give the answer's form as a JSON Schema.",
        param="structured_outputs",
        reason="unsupported_parameter",
    )


def _reasoning(rules: Rules, specials: Specials, name: str, *, opened: bool, behind: str = "") -> str:
    """Reasoning up to its end, and `behind` or white space; optional unless it has begun."""
    if not name:
        return NOTHING
    marks = REASONING[name]
    own = {without_suffix(token): token for token in specials} if marks.suffixed else {}
    attributes, body = up_to(own.get(marks.end, marks.end), specials)
    rules.add("thoughts", body, attributes)
    rules.add("SPACE", r"/\s*/")
    thoughts = joined("thoughts", literal(behind, specials) if behind else "SPACE")
    return thoughts if opened else f"({literal(own.get(marks.begin, marks.begin), specials)} {thoughts})?"


def _before_calls(rules: Rules, calling: Calling, name: str, *, opened: bool) -> str:
    behind = REASONING[name].before_calls if name else ""
    return _reasoning(rules, calling.specials, name, opened=opened, behind=behind)


def _calls(rules: Rules, calling: Calling, *, checked_all: bool) -> str:
    form = form_of(calling.family, calling.variant)
    body = _behind_trigger(rules, form, calling, checked_all=checked_all)
    return f"{literal(form.trigger, calling.specials)} {body}" if form.trigger else body


def _behind_trigger(rules: Rules, form: Form, calling: Calling, *, checked_all: bool) -> str:
    specials = calling.specials
    calls = []
    for number, function in enumerate(calling.functions):
        checked = checked_all or bool(function.strict)
        if checked and calling.closes and function.parameters:
            function = msgspec.structs.replace(function, parameters=closed(function.parameters))
        source = CallGrammarSource(function, number, rules, specials, checked)
        calls.append(rules.add(f"call_{number}", form.call(source)))
    rules.add("call", " | ".join(calls))
    more = "" if calling.single else f"({joined(literal(form.between, specials), 'call')})*"
    return joined(literal(form.opening, specials), "call", more, literal(form.closing, specials))
