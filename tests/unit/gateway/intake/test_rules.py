"""A rule is one row: what is refused by it is what its JSON Schema refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import services.gateway.dialects.registry  # noqa: F401  theirs are rules too
from services.gateway.core.errors import InvalidParameter
from services.gateway.intake import rules
from services.gateway.intake.schemas import ChatCompletionRequest, Message
from services.gateway.intake.validation import check_fields

ROWS = {f"{name}-{index}": rule for name, own in rules.table() for index, rule in enumerate(own)}
VALUES: dict[str, list[Any]] = {
    "integer": [0, 1, 2, 3],
    "string": ["", "a"],
    "array": [[], ["a"]],
    "boolean": [True, False],
}


def conditions(rule: rules.Rule | rules.OneOf) -> dict[str, rules.Schema]:
    """What is said of each field that the rule looks at."""
    if isinstance(rule, rules.OneOf):
        fields = {name: rule.kinds.get(name, {}) for way in rule.ways for name in way}
        return fields | ({rule.tag: {"enum": [way[0] for way in rule.ways]}} if rule.tag else {})
    fields = {name: one.schema for name, one in {**rule.needs, **rule.needs_one}.items()}
    return fields | ({rule.field: rule.when.schema} if rule.field else {})


def values(schema: rules.Schema, *, tag: bool) -> st.SearchStrategy[Any]:
    """Values of the type that the condition is about, and null."""
    if tag:
        return st.sampled_from(schema["enum"])
    known = schema.get("enum", [schema["const"]] if "const" in schema else [])
    kinds = {type(value) for value in known if value is not None}
    named = [kind for kind, some in VALUES.items() if schema.get("type") == kind or type(some[0]) in kinds]
    pool = [value for kind in named or VALUES for value in VALUES[kind]]
    return st.sampled_from([None, *known, *pool])


@pytest.mark.parametrize("row", ROWS)
@given(data=st.data())
def test_the_check_and_the_schema_say_the_same(row: str, data: st.DataObject) -> None:
    rule = ROWS[row]
    tag = rule.tag if isinstance(rule, rules.OneOf) else ""
    fields = {name: data.draw(values(schema, tag=name == tag), name) for name, schema in conditions(rule).items()}
    left_out = data.draw(st.sets(st.sampled_from([name for name in fields if fields[name] is None] or [""])))
    body = {name: value for name, value in fields.items() if name not in left_out}
    fits = Draft202012Validator(rules.schema_of((rule,))).is_valid(body)
    words = {"model": "m"} if isinstance(rule, rules.Rule) and "{model}" in rule.error else {}
    if fits:
        rule.check(SimpleNamespace(**fields), **words)
        return
    with pytest.raises(InvalidParameter) as caught:
        rule.check(SimpleNamespace(**fields), **words)
    assert caught.value.param in fields
    assert "{" not in caught.value.message


def test_a_rule_says_where_the_object_stands() -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_fields(Message("user"), "messages[3].")
    assert caught.value.param == "messages[3].content"
    assert "'messages[3].content'" in caught.value.message


def test_rules_of_a_struct_hold_for_what_it_becomes() -> None:
    assert set(map(id, ChatCompletionRequest.__base__.rules)) <= set(map(id, ChatCompletionRequest.rules))


def test_rules_that_always_hold_do_not_take_each_others_place() -> None:
    for name, own in rules.table():
        always = [key for rule in own for key in rule.schema if key in ("anyOf", "oneOf", "required", "properties")]
        assert len(always) == len(set(always)), name
