"""Calls of tools as grammars in Lark's notation (llguidance's): how each family writes them, which is what its parser
reads, and what an answer must look like where tools are demanded, or promised to be strict. Pure.

    calls:  trigger opening  call  (between call)*  closing

    required, named     reasoning?  calls
    strict, auto        reasoning?  text without the trigger, and calls behind each trigger
    a format, auto      reasoning?  calls, or the format

Arguments match the function's JSON Schema. Where a family writes values without quotation marks, a text is anything
up to the tag behind it, or one of the schema's `enum`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.tool_calls.closed_objects import closed
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.parsers import gemma, harmony, marked, tagged
from services.gateway.tool_calls.parsers.sections import DEEPSEEK, KIMI, PREFIX
from services.gateway.tool_calls.parsers.tagged import without_suffix
from services.gateway.tool_calls.schemas import FunctionDefinition, types_of
from shared.grammars import embedded
from shared.messages import Grammar

Specials = Mapping[str, int]  # token ids of the model's special tokens: in a grammar these are no text
NOTHING = '""'


def literal(text: str, specials: Specials) -> str:
    """`text` as an expression; special tokens in it stand for themselves."""
    found = [marker for marker in specials if marker in text]
    if not found:
        return _quoted(text)
    pattern = "|".join(re.escape(marker) for marker in sorted(found, key=len, reverse=True))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{specials[part]}]>" if part in specials else _quoted(part) for part in parts)


def regex_of(text: str) -> str:
    """`text` within a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def up_to(end: str, specials: Specials) -> tuple[str, str]:
    """(attributes, body) of a rule for any text up to the first `end`, and that."""
    if found := [marker for marker in specials if marker in end]:
        before, token, after = end.partition(min(found, key=end.index))
        return "", f"/(?s:.*){regex_of(before)}/ {literal(token + after, specials)}"
    return "[lazy]", f"/(?s:.*){regex_of(end)}/"


def without(text: str, specials: Specials) -> str:
    """An expression for any text that `text` does not stand in."""
    if text in specials:
        return "/(?s:.*)/"
    return f"/(?s:.*)/ & ~/(?s:.*){regex_of(text)}(?s:.*)/"


def joined(*parts: str) -> str:
    """One after the other, without those that are nothing; not for the alternatives of an expression."""
    return " ".join(part for part in parts if part and part != NOTHING) or NOTHING


class Rules:
    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str, attributes: str = "") -> str:
        """`name`, for other rules to use."""
        self._rules[name] = f"{name}{attributes}: {body}"
        return name

    def text(self) -> str:
        return "\n".join(self._rules.values()) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- how each family writes calls --------------------------------------------------------------------


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallGrammarSource(NamedTuple):
    """What a call's rules are made of."""

    function: FunctionDefinition
    number: int
    rules: Rules
    specials: Specials
    checked: bool  # whether its arguments must match the schema; otherwise any object will do

    @property
    def schema(self) -> Mapping[str, Any]:
        if not self.checked:
            return {"type": "object"}
        return {"type": "object", **(self.function.parameters or NO_PARAMETERS)}

    def text(self, text: str) -> str:
        return literal(text, self.specials)

    def arguments(self) -> str:
        return self.rules.add(f"arguments_{self.number}", embedded(self.schema))

    def around(self, before: str, after: str) -> str:
        """The arguments as JSON between two texts."""
        return joined(self.text(before), self.arguments(), self.text(after))


class Form(NamedTuple):
    """One family's calls."""

    trigger: str  # what calls begin with, and no other text has; "" where there is no such thing
    opening: str
    call: Callable[[CallGrammarSource], str]
    between: str
    closing: str = ""


def form_of(family: str, variant: str) -> Form:
    """`variant`: of the family, as its template shows (`families.variant_of`)."""
    if family == "hy_v3" and variant:
        return _pair_blocks(tagged.hunyuan_tags(variant))
    return VARIANTS.get((family, variant)) or _FORMS[family]


def _written(before: str, after: str = "") -> Callable[[CallGrammarSource], str]:
    """The arguments as JSON between two texts, the first of which has the function's name for NAME."""
    return lambda source: source.around(before.replace("NAME", source.function.name), after)


_ARGUMENTS = _written('{"name": "NAME", "arguments": ', "}")
_PARAMETERS = _written('{"name": "NAME", "parameters": ', "}")


class _Parameter(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    types: str
    required: bool


def _parameters(source: CallGrammarSource) -> Iterator[_Parameter]:
    """In the schema's order. Each has the definitions that it may refer to."""
    schema = source.function.parameters or NO_PARAMETERS
    types, required = types_of(schema), schema.get("required")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = schema.get("properties")
    for name, value in (properties if isinstance(properties, dict) else {}).items():
        own = value if isinstance(value, dict) else {}
        yield _Parameter(name, {**shared, **own}, types[name], isinstance(required, list) and name in required)


def _tagged_value(source: CallGrammarSource, number: int, parameter: _Parameter, before: str, end: str) -> str:
    """A value and the tag that ends it."""
    name = f"value_{source.number}_{number}"
    if parameter.types not in ("string", ""):
        source.rules.add(name, embedded(parameter.schema))
        return f"{name} {source.text(before + end)}"
    choices = parameter.schema.get("enum")
    if isinstance(choices, list) and choices and source.checked:
        words = " | ".join(source.text(str(choice)) for choice in choices)
        return f"({words}) {source.text(before + end)}"
    attributes, body = up_to(end, source.specials)
    return source.rules.add(name, body, attributes)


def _with_tags(tags: tagged.CallTags) -> Callable[[CallGrammarSource], str]:
    line = "\n" if tags.lines else ""

    def call(source: CallGrammarSource) -> str:
        parts = [source.text(f"{tags.call}{source.function.name}{tags.named}\n")]
        for number, parameter in enumerate(_parameters(source)):
            value = _tagged_value(source, number, parameter, line, tags.end_of_parameter)
            said = f' string="{str(parameter.types in ("string", "")).lower()}"' if tags.says_type else ""
            end = f'"{said}>' if tags.parameter.endswith('"') else ">"
            part = f'{source.text(f"{tags.parameter}{parameter.name}{end}{line}")} {value} "\\n"'
            parts.append(part if parameter.required else f"({part})?")
        return " ".join((*parts, source.text(tags.end_of_call)))

    return call


def _with_pairs(tags: tagged.PairTags, line: str = "\n") -> Callable[[CallGrammarSource], str]:
    def call(source: CallGrammarSource) -> str:
        parts = [source.text(source.function.name + tags.separator + line)]
        for number, parameter in enumerate(_parameters(source)):
            value = _tagged_value(source, number, parameter, "", tags.end_of_value)
            key = f"{tags.key}{parameter.name}{tags.end_of_key}{line}{tags.value}"
            part = joined(source.text(key), value, source.text(line))
            parts.append(part if parameter.required else f"({part})?")
        return " ".join((*parts, source.text(tags.end_of_call)))

    return call


def _blocks(tags: tagged.CallTags, before: str = "", behind: str = "") -> Form:
    """All calls within one pair of tags, each with something before and behind it."""
    between = f"{behind}\n{before}"
    return Form(tags.outer, f"\n{before}", _with_tags(tags), between, f"{behind}\n{tags.end_of_outer}")


def _alone(tags: tagged.CallTags) -> Form:
    """Each call within a pair of tags of its own."""
    between = f"\n{tags.end_of_outer}\n{tags.outer}\n"
    return Form(tags.outer, "\n", _with_tags(tags), between, f"\n{tags.end_of_outer}")


def _pair_blocks(tags: tagged.PairTags) -> Form:
    begin = f"\n{tags.call}"
    return Form(tags.outer, begin, _with_pairs(tags), begin, f"\n{tags.end_of_outer}")


def _listed(
    source: CallGrammarSource, assign: str, comma: str, value_of: Callable[[CallGrammarSource, int, _Parameter], str]
) -> str:
    """Arguments by name: a comma stands before every one but the first, whichever that is."""
    first, rest = NOTHING, NOTHING
    for number, parameter in reversed(list(enumerate(_parameters(source)))):
        place = f"{source.number}_{number}"
        value = value_of(source, number, parameter)
        key = source.text(parameter.name + assign)
        behind = f"{source.text(comma)} {key} {value}"
        alone = f"{key} {value} {rest}"
        first = alone if parameter.required else f"({alone} | {first})"
        rest = f"{behind} {rest}" if parameter.required else f"({behind})? {rest}"
        first = source.rules.add(f"first_{place}", first)
        rest = source.rules.add(f"rest_{place}", rest)
    return first


def _pythonic(source: CallGrammarSource) -> str:
    """`f(a=1, b="x")`"""

    def value_of(source: CallGrammarSource, number: int, parameter: _Parameter) -> str:
        return source.rules.add(f"value_{source.number}_{number}", embedded(parameter.schema))

    return f'{source.text(source.function.name + "(")} {_listed(source, "=", ", ", value_of)} ")"'


def _gemma(marks: gemma.GemmaMarks) -> Callable[[CallGrammarSource], str]:
    """`call:f{a:1,b:<|"|>x<|"|>}`"""

    def value_of(source: CallGrammarSource, number: int, parameter: _Parameter) -> str:
        mark = marks.text if parameter.types in ("string", "") else ""
        return f"({joined(source.text(mark), _tagged_value(source, number, parameter, '', mark))})"

    def call(source: CallGrammarSource) -> str:
        begin = source.text(f"call:{source.function.name}{{")
        return joined(begin, _listed(source, ":", ",", value_of), source.text("}" + marks.end))

    return call


def _kimi(source: CallGrammarSource) -> str:
    begin = source.text(f"{KIMI.call}{PREFIX}{source.function.name}:")
    return f"{begin} /[0-9]{{1,2}}/ {source.around(KIMI.separator, KIMI.end_of_call)}"


def _around(begin: str, end: str, call: Callable[[CallGrammarSource], str]) -> Form:
    """Each call on lines between two markers."""
    return Form(begin, "\n", call, f"\n{end}\n{begin}\n", f"\n{end}")


_ACTION = f"{marked.ACTION}{marked.PLUGIN}"
_TO = f"{harmony.CHANNEL}commentary to="
_COHERE = _written('{"tool_call_id": "0", "tool_name": "NAME", "parameters": ', "}")
_FENCED = _written(f"function{DEEPSEEK.separator}NAME\n```json\n", f"\n```{DEEPSEEK.end_of_call}")
_SEPARATED = _written(f"NAME{DEEPSEEK.separator}", DEEPSEEK.end_of_call)
_HARMONY = _written(f"{harmony.PREFIX}NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}")
_FORMS: Mapping[str, Form] = {
    "hermes": _around(marked.TOOL_CALL, marked.END_OF_TOOL_CALL, _ARGUMENTS),
    "granite": Form(marked.GRANITE_CALL, "[", _ARGUMENTS, ", ", "]"),
    "granite-20b-fc": Form(marked.FUNCTION_CALL, " ", _ARGUMENTS, f" {marked.FUNCTION_CALL} "),
    "mistral": Form(marked.TOOL_CALLS, "[", _ARGUMENTS, ", ", "]"),
    "llama3_json": Form("", "", _PARAMETERS, "; "),
    "deepseek": Form(DEEPSEEK.begin, DEEPSEEK.call, _SEPARATED, DEEPSEEK.call, DEEPSEEK.end),
    "deepseek_v32": _blocks(tagged.DEEPSEEK_V32),
    "step3": _blocks(tagged.STEP3, "".join(tagged.STEP3.before), "".join(tagged.STEP3.behind)),
    "minimax_m2": _blocks(tagged.MINIMAX),
    "seed_oss": _alone(tagged.SEED),
    "qwen3_coder": _alone(tagged.CODER),
    "glm4": Form(marked.TOOL_CALL, "", _with_pairs(tagged.GLM), f"\n{marked.TOOL_CALL}"),
    "hy_v3": _pair_blocks(tagged.HUNYUAN),
    "longcat": _around(tagged.LONGCAT.call, tagged.LONGCAT.end_of_call, _ARGUMENTS),
    "kimi_k2": Form(KIMI.begin, "", _kimi, "", KIMI.end),
    "openai": Form(_TO, "", _HARMONY, f"{harmony.CALL}{harmony.START}assistant{_TO}"),
    "gemma4": Form(gemma.GEMMA4.begin, "", _gemma(gemma.GEMMA4), gemma.GEMMA4.begin),
    "functiongemma": Form(gemma.FUNCTION_GEMMA.begin, "", _gemma(gemma.FUNCTION_GEMMA), gemma.FUNCTION_GEMMA.begin),
    "jamba": Form(marked.CALLS, "[", _ARGUMENTS, ", ", f"]{marked.END_OF_CALLS}"),
    "internlm": Form(_ACTION, "\n", _PARAMETERS, f"{marked.END_OF_ACTION}\n{_ACTION}\n", marked.END_OF_ACTION),
    "nemotron_json": Form(marked.NEMOTRON_CALL, "[", _ARGUMENTS, ", ", f"]{marked.END_OF_NEMOTRON_CALL}"),
    "cohere_command3": Form(marked.COHERE_CALLS, "[", _COHERE, ", ", f"]{marked.END_OF_COHERE_CALLS}"),
    "apertus": Form(marked.APERTUS_CALLS, "[", _written('{"NAME": ', "}"), ", ", f"]{marked.END_OF_APERTUS_CALLS}"),
    "phi4_mini_json": Form(marked.FUNCTOOLS, "[", _ARGUMENTS, ", ", "]"),
    "pythonic": Form("", "[", _pythonic, ", ", "]"),
    "xlam": Form("", "[", _ARGUMENTS, ", ", "]"),
}
VARIANTS: Mapping[tuple[str, str], Form] = {
    ("deepseek_v32", "v4"): _blocks(tagged.DEEPSEEK_V4),
    ("glm4", "inline"): Form(marked.TOOL_CALL, "", _with_pairs(tagged.GLM, ""), marked.TOOL_CALL),
    ("jamba", "lines"): Form(marked.CALLS, "\n", _ARGUMENTS, "\n", f"\n{marked.END_OF_CALLS}"),
    ("longcat", "pairs"): Form(tagged.LONGCAT.call, "", _with_pairs(tagged.LONGCAT), f"\n{tagged.LONGCAT.call}"),
    ("mistral", "named"): Form(marked.TOOL_CALLS, "", _written(f"NAME{marked.ARGS}"), marked.TOOL_CALLS),
    ("deepseek", "fenced"): Form(DEEPSEEK.begin, DEEPSEEK.call, _FENCED, "\n" + DEEPSEEK.call, DEEPSEEK.end),
}


# --- what an answer must look like ------------------------------------------------------------------


class Calling(NamedTuple):
    """How calls are written, and which there may be."""

    family: str
    variant: str
    functions: Sequence[FunctionDefinition]
    single: bool
    specials: Specials
    # Whether objects among arguments have no properties but those that their schemas name.
    closes: bool = True


def required_calls(calling: Calling, reasoning: str, *, opened: bool) -> Grammar:
    """One call or more, and nothing else but the reasoning before them."""
    rules = Rules()
    before = _reasoning(rules, calling.specials, reasoning, opened=opened)
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
    before = _reasoning(rules, calling.specials, reasoning, opened=opened)
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
    before = _reasoning(rules, calling.specials, reasoning, opened=opened)
    begin = literal(REASONING[reasoning].before_answer, calling.specials) if reasoning else NOTHING
    rules.add("start", joined(before, f"(calls | {joined(begin, 'answer')})"))
    rules.add("calls", _calls(rules, calling, checked_all=False))
    rules.add("answer", _answer(answer))
    return Grammar("lark", rules.text())


def behind_reasoning(answer: Grammar, reasoning: str, specials: Specials, *, opened: bool = True) -> Grammar:
    """`answer` behind the reasoning, in which the prompt ends where it is `opened`. Raises `InvalidParameter`."""
    rules = Rules()
    before = _reasoning(rules, specials, reasoning, opened=opened)
    rules.add("start", joined(before, literal(REASONING[reasoning].before_answer, specials), "answer"))
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


def _reasoning(rules: Rules, specials: Specials, name: str, *, opened: bool) -> str:
    """Reasoning up to its end, and what stands between it and calls, or white space; optional unless it has begun."""
    if not name:
        return NOTHING
    marks = REASONING[name]
    own = {without_suffix(token): token for token in specials} if marks.suffixed else {}
    attributes, body = up_to(own.get(marks.end, marks.end), specials)
    rules.add("thoughts", body, attributes)
    rules.add("SPACE", r"/\s*/")
    thoughts = joined("thoughts", literal(marks.before_calls, specials) if marks.before_calls else "SPACE")
    return thoughts if opened else f"({literal(own.get(marks.begin, marks.begin), specials)} {thoughts})?"


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
