"""How each family writes calls, as rules of a grammar in Lark's notation (llguidance's): what its parser reads. Pure.

    calls:  trigger opening  call  (between call)*  closing

Arguments match the function's JSON Schema. Where a family writes values without quotation marks, a text is anything
up to the tag behind it, or one of the schema's `enum`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from services.gateway.tool_calls.parsers import deepseek, marked, tagged
from services.gateway.tool_calls.schemas import FunctionDefinition, types_of
from shared.grammars import embedded

Specials = Mapping[str, int]
"""Token ids of the model's special tokens: in a grammar these are no text."""

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
    if end in specials:
        return "", f"/(?s:.*)/ {literal(end, specials)}"
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


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Source(NamedTuple):
    """What a call's rules are made of."""

    function: FunctionDefinition
    number: int
    rules: Rules
    specials: Specials
    checked: bool
    """Whether its arguments must match the schema; otherwise any object will do."""

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

    trigger: str
    """What calls begin with, and no other text has; "" where there is no such thing."""
    opening: str
    call: Callable[[Source], str]
    between: str
    closing: str = ""


def form_of(family: str, variant: str) -> Form:
    """`variant`: of the family, as its template shows (`families.variant_of`)."""
    return _VARIANTS.get((family, variant)) or _FORMS[family]


def _json(arguments: str, before: str = "", after: str = "") -> Callable[[Source], str]:
    def call(source: Source) -> str:
        name = source.function.name
        return source.around(f'{before}{{"name": "{name}", "{arguments}": ', "}" + after)

    return call


def _fenced(source: Source) -> str:
    begin = f"function{deepseek.SEPARATOR}{source.function.name}\n```json\n"
    return source.around(begin, f"\n```{deepseek.CALL_END}")


def _separated(source: Source) -> str:
    return source.around(source.function.name + deepseek.SEPARATOR, deepseek.CALL_END)


def _named(source: Source) -> str:
    return source.around(source.function.name + marked.ARGS, "")


# --- values without quotation marks ---------------------------------------------------------------


class _Parameter(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    types: str
    required: bool


def _parameters(source: Source) -> Iterator[_Parameter]:
    """In the schema's order. Each has the definitions that it may refer to."""
    schema = source.function.parameters or NO_PARAMETERS
    types, required = types_of(schema), schema.get("required")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = schema.get("properties")
    for name, value in (properties if isinstance(properties, dict) else {}).items():
        own = value if isinstance(value, dict) else {}
        yield _Parameter(
            name, {**shared, **own}, types[name], isinstance(required, list) and name in required
        )


def _tagged_value(source: Source, number: int, parameter: _Parameter, before: str, end: str) -> str:
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


def _coder(source: Source) -> str:
    parts = [source.text(f"\n<function={source.function.name}>\n")]
    for number, parameter in enumerate(_parameters(source)):
        value = _tagged_value(source, number, parameter, "\n", tagged.END_OF_PARAMETER)
        part = f'{source.text(f"<parameter={parameter.name}>" + chr(10))} {value} "\\n"'
        parts.append(part if parameter.required else f"({part})?")
    parts.append(source.text(f"{tagged.END_OF_FUNCTION}\n{marked.END_OF_TOOL_CALL}"))
    return " ".join(parts)


def _glm(source: Source) -> str:
    parts = [source.text(source.function.name + "\n")]
    for number, parameter in enumerate(_parameters(source)):
        value = _tagged_value(source, number, parameter, "", tagged.END_OF_ARG_VALUE)
        key = f"{tagged.ARG_KEY}{parameter.name}{tagged.END_OF_ARG_KEY}\n{tagged.ARG_VALUE}"
        part = f'{source.text(key)} {value} "\\n"'
        parts.append(part if parameter.required else f"({part})?")
    parts.append(source.text(marked.END_OF_TOOL_CALL))
    return " ".join(parts)


def _pythonic(source: Source) -> str:
    """`f(a=1, b="x")`: a comma stands before every argument but the first, whichever that is."""
    first, rest = NOTHING, NOTHING
    for number, parameter in reversed(list(enumerate(_parameters(source)))):
        place = f"{source.number}_{number}"
        value = source.rules.add(f"value_{place}", embedded(parameter.schema))
        key = source.text(parameter.name + "=")
        comma = f'", " {key} {value}'
        alone = f"{key} {value} {rest}"
        first = alone if parameter.required else f"({alone} | {first})"
        rest = f"{comma} {rest}" if parameter.required else f"({comma})? {rest}"
        first = source.rules.add(f"first_{place}", first)
        rest = source.rules.add(f"rest_{place}", rest)
    return f'{source.text(source.function.name + "(")} {first} ")"'


_FORMS: Mapping[str, Form] = {
    "hermes": Form(
        marked.TOOL_CALL,
        "",
        _json("arguments", "\n", f"\n{marked.END_OF_TOOL_CALL}"),
        f"\n{marked.TOOL_CALL}",
    ),
    "granite": Form(marked.GRANITE_CALL, "[", _json("arguments"), ", ", "]"),
    "mistral": Form(marked.TOOL_CALLS, "[", _json("arguments"), ", ", "]"),
    "llama3_json": Form("", "", _json("parameters"), "; "),
    "deepseek": Form(
        deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN, _separated, deepseek.CALL_BEGIN, deepseek.CALLS_END
    ),
    "qwen3_coder": Form(marked.TOOL_CALL, "", _coder, f"\n{marked.TOOL_CALL}"),
    "glm4": Form(marked.TOOL_CALL, "", _glm, f"\n{marked.TOOL_CALL}"),
    "pythonic": Form("", "[", _pythonic, ", ", "]"),
}
_VARIANTS: Mapping[tuple[str, str], Form] = {
    ("mistral", "named"): Form(marked.TOOL_CALLS, "", _named, marked.TOOL_CALLS),
    ("deepseek", "fenced"): Form(
        deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN, _fenced, "\n" + deepseek.CALL_BEGIN, deepseek.CALLS_END
    ),
}
