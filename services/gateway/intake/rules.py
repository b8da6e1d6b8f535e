"""What fields of a request demand of each other, and which do nothing here. Pure.

    rules      of a struct, beside its fields: a row each, from which the check, the JSON Schema of the OpenAPI document
               and the table of docs/api.md are made
    neutral    a field that is refused, unless its value asks for nothing
    ignored    a field that is named in a header of the answer, or refused where the settings say so

What a field may be by itself is in its type; what the model, the tokenizer or the tenant decides is a check in code,
by feature. What says more or less than the server does would be found by `make fuzz`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidParameter

Schema = dict[str, Any]


class Condition(msgspec.Struct, frozen=True):
    """What a field may be; one that is left out is null."""

    words: str
    schema: Schema
    holds: Callable[[Any], bool]


NULL = Condition("left out", {"type": "null"}, lambda value: value is None)
GIVEN = Condition("given", {"not": NULL.schema}, lambda value: value is not None)
TRUE = Condition("true", {"const": True}, lambda value: value is True)
NOT_TRUE = Condition("not true", {"enum": [None, False]}, lambda value: value is None or value is False)
NOT_FALSE = Condition("not false", {"enum": [None, True]}, lambda value: value is None or value is True)
ENTRIES = Condition("not empty", {"type": "array", "minItems": 1}, bool)
TEXT = Condition("not empty", {"type": "string", "minLength": 1}, bool)


def equal(wanted: str | int) -> Condition:
    return Condition(f"`{wanted}`", {"const": wanted}, lambda value: value == wanted)


def at_least(bound: int) -> Condition:
    schema = {"type": "integer", "minimum": bound}
    return Condition(f"{bound} or more", schema, lambda value: value >= bound)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Where `field` is as `when` says, so must others be: all that `needs` names, and one of `needs_one`."""

    field: str = ""  # empty: the rule holds always
    when: Condition = GIVEN
    needs: Mapping[str, Condition] = {}
    needs_one: Mapping[str, Condition] = {}
    # The client's sentence. `{at}`: where the object stands in the request; `{field}`: which of `needs` is wrong.
    error: str
    reason: str = "invalid_value"  # OpenAI's code
    param: str = ""  # the field at fault, as `error` has it; left out: `field`

    def check(self, request: Any, at: str = "", **words: str) -> None:
        """`words`: more that `error` names. Raises `InvalidParameter`."""
        if self.field and ((value := getattr(request, self.field)) is None or not self.when.holds(value)):
            return
        for name, condition in self.needs.items():
            if not condition.holds(getattr(request, name)):
                raise self._refusal(name, at, words)
        ways = self.needs_one.items()
        if ways and not any(condition.holds(getattr(request, name)) for name, condition in ways):
            raise self._refusal(next(iter(self.needs_one)), at, words)

    def _refusal(self, field: str, at: str, words: Mapping[str, str]) -> InvalidParameter:
        error, param = self.error.format(at=at, field=field, **words), self.param or self.field
        return InvalidParameter(error, param=at + param.format(field=field), reason=self.reason)

    @property
    def schema(self) -> Schema:
        then = _all_of(self.needs) if self.needs else {}
        if self.needs_one:
            then["anyOf"] = [_all_of({name: condition}) for name, condition in self.needs_one.items()]
        if not self.field:
            return then
        return {"if": {"required": [self.field], "properties": {self.field: self.when.schema}}, "then": then}


def only_with(field: str, other: str) -> Rule:
    """`field` means something beside `other` alone."""
    error = f"The '{field}' parameter is only allowed when '{other}' is enabled."
    return Rule(field=field, needs={other: TRUE}, error=error)


def some_of(fields: Mapping[str, Condition], send: str) -> Rule:
    """At least one of `fields`, the first of which is named as missing. `send`: what to send."""
    name = next(iter(fields))
    error = f"Missing required parameter: '{{at}}{name}'; send {send}."
    return Rule(needs_one=fields, error=error, reason="missing_required_parameter", param=name)


class OneOf(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one way, and none of another's."""

    field: ClassVar[str] = ""
    ways: tuple[tuple[str, ...], ...]
    kinds: Mapping[str, Schema] = {}  # what a field is where it is given; left out: anything but null
    tag: str = ""  # the field that names the way, by its only field
    lacks: str  # the sentence where a field of the way is missing: `{at}`, `{field}`
    repeats: str = ""  # and where one of another way is given; left out: the same
    repeats_reason: str = "invalid_value"
    param: str = ""  # as a rule's; left out: the field that is missing, or given beside others

    def check(self, request: Any, at: str = "") -> None:
        """Raises `InvalidParameter`."""
        given = {name for way in self.ways for name in way if getattr(request, name) is not None}
        begun = next((way for way in self.ways if given.intersection(way)), self.ways[-1])
        way = (getattr(request, self.tag),) if self.tag else begun
        missing = [name for name in way if name not in given]
        others = [name for other in self.ways for name in other if name in given and name not in way]
        if others and not (self.tag and missing):
            raise self._refusal(others[0], at, repeated=bool(self.repeats))
        if missing:
            raise self._refusal(missing[0], at, repeated=False)

    def _refusal(self, field: str, at: str, *, repeated: bool) -> InvalidParameter:
        error = (self.repeats if repeated else self.lacks).format(at=at, field=field)
        reason = self.repeats_reason if repeated else "missing_required_parameter"
        return InvalidParameter(error, param=at + (self.param or field), reason=reason)

    @property
    def schema(self) -> Schema:
        return {"oneOf": [self._way(way) for way in self.ways]}

    def _way(self, way: tuple[str, ...]) -> Schema:
        fields = {name: NULL.schema for other in self.ways if other != way for name in other}
        fields |= {name: self.kinds.get(name, GIVEN.schema) for name in way}
        tag = {self.tag: {"const": way[0]}} if self.tag else {}
        return {"required": list(way), "properties": tag | fields}


Rules = tuple[Rule | OneOf, ...]


class Ruled(msgspec.Struct, frozen=True):
    """A struct whose fields demand something of each other."""

    rules: ClassVar[Rules] = ()


def neutral(*values: Any, why: str = "leave it out") -> Meta:
    """Of a field that is not supported: `values` and null ask for nothing, any other is refused. `why`: and what to do
    instead."""
    return Meta(
        description="Not supported: refused, unless its value asks for nothing.",
        extra={"neutral": values, "why": why},
        extra_json_schema={"enum": [None, *values]},
    )


def ignored(*values: Any) -> Meta:
    """Of a field that changes nothing here: any value but `values` and null is named to the client, or refused where
    the settings say so."""
    return Meta(description="Has no effect here; named in x-ryzanstein-ignored-fields.", extra={"ignored": values})


def table(kind: type[Ruled] = Ruled) -> Iterator[tuple[str, Rules]]:
    """All rules, by the structs' names."""
    for ruled in kind.__subclasses__():
        if ruled.rules:
            yield ruled.__name__, ruled.rules
        yield from table(ruled)


def schema_of(rules: Rules) -> Schema:
    """The keywords of JSON Schema that say the same."""
    schemas = [rule.schema for rule in rules]
    conditions = [schema for schema in schemas if "if" in schema]
    always = [schema for schema in schemas if "if" not in schema]
    merged: Schema = {"allOf": conditions} if conditions else {}
    for schema in always:
        merged |= schema
    return merged


def _all_of(fields: Mapping[str, Condition]) -> Schema:
    properties: Schema = {"properties": {name: condition.schema for name, condition in fields.items()}}
    needed = [name for name, condition in fields.items() if not condition.holds(None)]
    return {"required": needed} | properties if needed else properties
