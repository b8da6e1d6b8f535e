"""Whatever is drawn, a text matches its grammar: judged by `jsonschema` and `re`, which had no part in it."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.executor.structured_output import GrammarCompiler
from shared.errors import InvalidGrammar
from shared.messages import Grammar
from tests.unit.executor.structured_output.guided_ring import GuidedRing, ask

quick = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.text("abcdefg_ é", min_size=1, max_size=5)


def bounded(low: str, high: str, least: int, most: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(least, most), st.integers(least, most)).map(sorted)
    return pairs.map(lambda pair: {low: pair[0], high: pair[1]})


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(["null", "boolean", "integer", "number", "string"]).map(lambda kind: {"type": kind}),
    bounded("minimum", "maximum", -500, 500).map(lambda bounds: {"type": "integer"} | bounds),
    bounded("minLength", "maxLength", 0, 6).map(lambda bounds: {"type": "string"} | bounds),
    st.lists(NAMES, min_size=1, max_size=3, unique=True).map(lambda names: {"enum": names}),
    st.sampled_from(["^[a-c]+-[0-9]{2}$", "^(x|yz)*$", "^[A-Z][a-z]{0,3}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
    st.one_of(st.integers(-(2**53), 2**53), st.booleans(), st.none(), NAMES).map(lambda value: {"const": value}),
)


def composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def of_object(properties: dict[str, Any], required: int, closed: bool) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": list(properties)[:required]}
        return schema | ({"additionalProperties": False} if closed else {})

    def of_array(items: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
        return {"type": "array", "items": items} | counts

    return st.one_of(
        st.builds(of_object, st.dictionaries(NAMES, inner, max_size=4), st.integers(0, 4), st.booleans()),
        st.builds(of_array, inner, bounded("minItems", "maxItems", 0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda definition: {"$defs": {"it": definition}, "$ref": "#/$defs/it"}),
    )


SCHEMAS = st.recursive(LEAVES, composed, max_leaves=6)


def inlined(schema: Any) -> Any:
    """References are to the document's root: a definition within a schema goes in its place."""
    if isinstance(schema, list):
        return [inlined(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$defs" in schema:
        return inlined(schema["$defs"]["it"])
    return {name: inlined(item) for name, item in schema.items()}


@quick
@given(schema=SCHEMAS, seeds=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4))
def test_json_validates(compiler: GrammarCompiler, schema: dict[str, Any], seeds: list[int]) -> None:
    schema = schema if schema.keys() == {"$defs", "$ref"} and "$defs" not in str(schema["$defs"]) else inlined(schema)
    grammar = Grammar("json_schema", json.dumps(schema))
    ring = GuidedRing(compiler)
    try:
        ring.add(*(ask(grammar, str(seed), seed=seed, max_tokens=2000) for seed in set(seeds)))
    except InvalidGrammar as error:
        assume("nsatisfiable" not in error.message and "empty" not in error.message)
        raise
    ring.run()
    for seed in set(seeds):
        entry = ring.last(str(seed))
        assert entry.finish in ("stop", "length"), entry.error
        if entry.finish == "stop":
            jsonschema.validate(json.loads(ring.text(str(seed))), schema)


LETTERS = st.sampled_from(["a", "b", "[a-f]", "[0-9]", r"\d", "x?", "é", r"\.", " "])
REGEXES = st.recursive(
    LETTERS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@quick
@given(pattern=REGEXES, seed=st.integers(0, 2**64 - 1))
def test_regular_expressions_match(compiler: GrammarCompiler, pattern: str, seed: int) -> None:
    ring = GuidedRing(compiler)
    ring.add(ask(Grammar("regex", pattern), seed=seed, max_tokens=500))
    ring.run()
    entry = ring.last()
    assert entry.finish in ("stop", "length"), entry.error
    if entry.finish == "stop":
        assert re.fullmatch(pattern, ring.text())


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_that_holds_itself(compiler: GrammarCompiler, seed: int) -> None:
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    }
    ring = GuidedRing(compiler)
    ring.add(ask(Grammar("json_schema", json.dumps(schema)), seed=seed, max_tokens=4000))
    ring.run()
    assert ring.last().finish == "stop"
    jsonschema.validate(json.loads(ring.text()), schema)


@pytest.mark.slow
def test_a_large_schema(compiler: GrammarCompiler) -> None:
    leaf = {"type": "string", "pattern": "^[a-z]{1,6}$"}
    inner = {
        "type": "object",
        "properties": {f"q{index}": leaf for index in range(20)},
        "required": [f"q{index}" for index in range(20)],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {f"p{index}": inner for index in range(4)},
        "required": [f"p{index}" for index in range(4)],
    }
    ring = GuidedRing(compiler)
    ring.add(ask(Grammar("json_schema", json.dumps(schema)), max_tokens=8000))
    ring.run()
    assert ring.last().finish == "stop"
    jsonschema.validate(json.loads(ring.text()), schema)


def test_a_grammar_in_larks_notation(compiler: GrammarCompiler) -> None:
    grammar = Grammar("lark", 'start: "SELECT " NAME ("," NAME)* " FROM " NAME\nNAME: /[a-z]{1,6}/')
    ring = GuidedRing(compiler)
    ring.add(*(ask(grammar, str(seed), seed=seed) for seed in range(8)))
    ring.run()
    for seed in range(8):
        assert re.fullmatch(r"SELECT [a-z]{1,6}(,[a-z]{1,6})* FROM [a-z]{1,6}", ring.text(str(seed)))
