"""`structural_tag` of xgrammar and vLLM: tags in a text and what stands in them, as a grammar in Lark's notation. Pure.

    {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"begin": "<f=now>", "content": ..., "end": "</f>"}]}

      ( text up to <f=   now> content </f> )*   text without <f=

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidParameter
from services.gateway.core.field_errors import convert, too_deep
from services.gateway.tool_calls.closed_objects import closed
from services.gateway.tool_calls.grammar_rules import Rules, joined, literal, regex_of, up_to
from shared import limits
from shared.grammars import embedded, inexact
from shared.messages import Grammar

Text = Annotated[str, Meta(min_length=1)]
_ANY = "/(?s:.*)/"


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any]


class Regex(_Format, frozen=True, tag="regex"):
    pattern: Text


class AnyText(_Format, frozen=True, tag="any_text"):
    """Up to the end of the tag that it stands in, or of the answer."""


class InOrder(_Format, frozen=True, tag="sequence"):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Or(_Format, frozen=True, tag="or"):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Tag(_Format, frozen=True, tag="tag"):
    begin: str
    content: "Format"
    end: str


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Any text; behind each trigger one of the tags that begin so."""

    triggers: Annotated[list[Text], limits.STRUCTURAL_TRIGGERS.length(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags, and nothing else."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | Regex | AnyText | InOrder | Or | Tag | TriggeredTags | TagsWithSeparator


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older form of a tag."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class _Older(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    triggers: Annotated[list[Text], limits.STRUCTURAL_TRIGGERS.length(min_length=1)]
    structures: Annotated[list[Structure], Meta(min_length=1)]


def grammar_of_tags(given: Mapping[str, Any], param: str, *, closes: bool) -> Grammar:
    """Of what stands at `param` in a request: a `format`, or the older `structures` and `triggers`. `closes`: whether
    the objects of schemas are closed. Raises `InvalidParameter`."""
    if too_deep(given):
        raise _wrong(param, f"it is nested too deeply ({limits.NESTING.cited()})")
    fields = {name: value for name, value in given.items() if name != "type" and value is not None}
    tags = _older(fields, param) if "structures" in fields else _read(fields, Tags, param).format
    maker = _Maker(param, closes=closes)
    maker.rules.add("start", maker.of(tags))
    text = maker.rules.text().replace("::=", "\\u003a:=")  # else it would look like GBNF (`shared.grammars`)
    return Grammar("lark", text)


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format


def _older(fields: Mapping[str, Any], param: str) -> Format:
    older = _read(fields, _Older, param)
    tags = [Tag(one.begin, JsonSchema(one.schema), one.end) for one in older.structures]
    return TriggeredTags(older.triggers, tags)


def _read(fields: Mapping[str, Any], kind: Any, param: str) -> Any:
    """`fields` as `kind`; what is wrong is told by its place in the request."""
    names = param.split(".")
    for name in reversed(names):
        fields = {name: fields}
    found = convert(fields, _at(param, kind))
    for name in names:
        found = getattr(found, name)
    return found


@cache
def _at(param: str, kind: Any) -> Any:
    for name in reversed(param.split(".")):
        kind = msgspec.defstruct("At", [(name, kind)])
    return kind


def _wrong(param: str, what: str) -> InvalidParameter:
    return InvalidParameter(f"Invalid '{param}': {what}.", param=param)


class _Maker:
    """Expressions of formats, each with the text that stands behind it: any text goes up to that."""

    def __init__(self, param: str, *, closes: bool) -> None:
        self.rules = Rules()
        self._param, self._closes = param, closes
        self._numbers = count()

    def of(self, given: Format, end: str = "") -> str:
        """Raises `InvalidParameter`."""
        behind = literal(end, {})
        match given:
            case ConstString():
                return literal(given.value + end, {})
            case JsonSchema():
                return joined(self._schema(given.json_schema), behind)
            case Regex():
                return joined(f"/{given.pattern.replace('/', chr(92) + '/')}/", behind)
            case AnyText():
                return self._any_text(end)
            case InOrder():
                return self._sequence(given.elements, end)
            case Or():
                return self._one_of([self.of(element, end) for element in given.elements])
            case Tag():
                return joined(self._tag(given, ""), behind)
            case TriggeredTags():
                return self._triggered(given, end)
        return joined(self._separated(given), behind)

    def _add(self, word: str, body: str, attributes: str = "") -> str:
        return self.rules.add(f"{word}_{next(self._numbers)}", body, attributes)

    def _one_of(self, bodies: Sequence[str]) -> str:
        return f"({' | '.join(bodies)})"

    def _schema(self, schema: dict[str, Any]) -> str:
        if (number := inexact(schema)) is not None:
            raise _wrong(
                self._param, f"{number} in it is a whole number beyond 2^53, which cannot be held exactly"
            )
        return self._add("schema", embedded(closed(schema) if self._closes else schema))

    def _any_text(self, end: str) -> str:
        if not end:
            return _ANY
        attributes, body = up_to(end, {})
        return self._add("text", body, attributes)

    def _sequence(self, elements: Sequence[Format], end: str) -> str:
        *before, last = elements
        if any(map(_is_open, before)):
            raise _wrong(
                self._param,
                "any text that more follows in a sequence has no end; put it last, or in a tag",
            )
        return joined(*(self.of(element) for element in before), self.of(last, end))

    def _tag(self, tag: Tag, said: str) -> str:
        """The tag behind `said`, with which it begins."""
        return joined(literal(tag.begin.removeprefix(said), {}), self.of(tag.content, tag.end))

    def _triggered(self, given: TriggeredTags, end: str) -> str:
        tags: dict[str, list[str]] = {}
        for tag in given.tags:
            triggers = [trigger for trigger in given.triggers if tag.begin.startswith(trigger)]
            if len(triggers) != 1:
                raise _wrong(
                    self._param,
                    f"{len(triggers)} of the triggers begin the tag {tag.begin[:64]!r}; give it one alone",
                )
            tags.setdefault(triggers[0], []).append(self._tag(tag, triggers[0]))
        up_to_one_of = self._up_to_one_of([*given.triggers, end] if end else given.triggers)
        one = self._one_of(
            [joined(up_to_one_of(trigger), self._one_of(bodies)) for trigger, bodies in tags.items()]
        )
        rest = up_to_one_of(end)
        if given.stop_after_first:
            last = joined(one, literal(end, {}))
            return last if given.at_least_one else self._one_of([last, rest])
        return f"{one}{'+' if given.at_least_one else '*'} {rest}"

    def _up_to_one_of(self, ends: Sequence[str]) -> Callable[[str], str]:
        """Makes expressions for any text up to the first of `ends`, where that is the one given; "": for any text
        without them."""
        number = next(self._numbers)
        some = f"(?s:.*)({'|'.join(map(regex_of, ends))})"
        self.rules.add(f"SOME_{number}", f"/{some}(?s:.*)/")
        self.rules.add(f"BEFORE_{number}", f"/{some}(?s:.+)/")

        def make(end: str) -> str:
            if not end:
                return self._add("FREE", f"{_ANY} & ~SOME_{number}")
            return self._add("UPTO", f"/(?s:.*){regex_of(end)}/ & ~BEFORE_{number}")

        return make

    def _separated(self, given: TagsWithSeparator) -> str:
        tag = self._add("tag", self._one_of([self._tag(one, "") for one in given.tags]))
        more = "" if given.stop_after_first else f"({joined(literal(given.separator, {}), tag)})*"
        tags = joined(tag, more)
        return tags if given.at_least_one else f"({tags})?"


def _is_open(given: Format) -> bool:
    """Whether it ends with any text."""
    match given:
        case AnyText():
            return True
        case TriggeredTags():
            return not (given.stop_after_first and given.at_least_one)
        case InOrder():
            return _is_open(given.elements[-1])
        case Or():
            return any(map(_is_open, given.elements))
    return False
