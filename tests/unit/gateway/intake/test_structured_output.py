"""What of a request becomes its grammar, and what is refused in OpenAI's words."""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.decoding import decode
from services.gateway.intake.sampling import grammars as compiling
from services.gateway.intake.sampling import structured_output
from services.gateway.intake.sampling.grammars import GrammarChecker
from services.gateway.intake.sampling.structured_output import grammar_of_choices, grammar_of_schema, wanted_by
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import check_chat
from shared import limits
from shared.errors import QueueFull
from shared.grammars import ANY_OBJECT
from shared.limits import GRAMMAR_BYTES
from shared.messages import Grammar
from tests.integration.gateway.fake_ring import until

OPEN = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
SCHEMA = OPEN | {"additionalProperties": False}
_chat = msgspec.json.Decoder(ChatCompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    request = decode(json.dumps(body).encode(), _chat)
    check_chat(request)
    return request


def named(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True} | changes}


def grammar(**fields: Any) -> Grammar | None:
    wanted = wanted_by(chat(**fields))
    return None if wanted is None else wanted.grammar


def test_without_a_form_any_text_will_do() -> None:
    assert grammar() is None
    assert grammar(response_format={"type": "text"}) is None
    assert grammar(response_format=None, guided_json=None) is None


def test_openais_formats() -> None:
    assert grammar(response_format={"type": "json_object"}) == ANY_OBJECT
    found = grammar(response_format=named(description="An answer."))
    assert found == grammar_of_schema(SCHEMA)
    assert list(json.loads(found.text)["properties"]) == ["b", "a"], "the order of the schema's"


def test_objects_are_closed_unless_the_request_or_the_server_says_otherwise() -> None:
    given = {"response_format": named(schema=OPEN)}
    assert grammar(**given) == grammar_of_schema(SCHEMA)
    assert grammar(**given, close_objects=False) == grammar_of_schema(OPEN)
    for choice, expected in ((None, OPEN), (True, SCHEMA)):
        wanted = wanted_by(chat(**given, close_objects=choice), closes=False)
        assert wanted.grammar == grammar_of_schema(expected)


def test_a_schema_is_as_large_as_it_is_closed() -> None:
    many = {f"{index}": {"properties": {}} for index in range(GRAMMAR_BYTES.value // 40)}
    assert len(json.dumps({"properties": many})) < GRAMMAR_BYTES.value
    with pytest.raises(InvalidParameter, match="grammar_bytes"):
        grammar(guided_json={"properties": many})


@pytest.mark.parametrize(
    "wrap", [lambda **f: {"structured_outputs": f}, lambda **f: {f"guided_{n}": v for n, v in f.items()}]
)
def test_vllms_newer_and_older_fields(wrap: Any) -> None:
    assert grammar(**wrap(json=SCHEMA)) == grammar_of_schema(SCHEMA)
    assert grammar(**wrap(json='{"type": "null"}')) == Grammar("json_schema", '{"type": "null"}')
    assert grammar(**wrap(regex=" +")) == Grammar("regex", " +")
    assert grammar(**wrap(grammar='start: "a"')) == Grammar("lark", 'start: "a"')
    assert grammar(**wrap(choice=["a", "b"])) == Grammar("regex", "a|b")


def test_a_large_structural_tag_is_refused_before_its_grammar_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(structured_output, "grammar_of_tags")
    tags = {"format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {}}] * 10_000}}
    for given in (tags, json.dumps(tags)):
        with pytest.raises(InvalidParameter, match="grammar_bytes") as caught:
            grammar(structured_outputs={"structural_tag": given})
        assert caught.value.param == "structured_outputs.structural_tag"
    with pytest.raises(InvalidParameter, match="grammar_bytes"):
        grammar(response_format={"type": "structural_tag"} | tags)


def test_structural_tags_in_vllms_forms() -> None:
    schema = {"type": "json_schema", "json_schema": OPEN}
    tag = {"type": "tag", "begin": "<f=a>", "content": schema, "end": "</f>"}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}}
    older = {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": OPEN, "end": "</f>"}]}
    found = grammar(response_format={"type": "structural_tag"} | newer)
    assert '"additionalProperties":false' in found.text
    for given in (newer, older, {"type": "structural_tag"} | older):
        assert grammar(structured_outputs={"structural_tag": given}) == found
        assert grammar(structured_outputs={"structural_tag": json.dumps(given)}) == found
    assert grammar(response_format={"type": "structural_tag"} | older) == found
    opened = grammar(response_format={"type": "structural_tag"} | newer, close_objects=False)
    assert "additionalProperties" not in opened.text


def test_any_object_under_vllms_name() -> None:
    assert grammar(structured_outputs={"json_object": True}) == ANY_OBJECT
    assert grammar(structured_outputs={"json_object": False, "regex": "a"}) == Grammar("regex", "a")


@pytest.mark.parametrize("choice", ["yes", "a|b", "(", "\\", 'say "x"', "é😀\n\t\x01\x7f", " ", "^$", "{}"])
def test_choices_are_taken_literally(choice: str) -> None:
    pattern = grammar_of_choices([choice]).text
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), pattern)
    assert re.fullmatch(python, choice)


def test_completions_take_them_too() -> None:
    body = {"model": "m", "prompt": "x", "response_format": named()}
    request = msgspec.json.decode(json.dumps(body), type=CompletionRequest)
    wanted = wanted_by(request)
    assert wanted.grammar == grammar_of_schema(SCHEMA)


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "'structural_tag', 'text'"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter", "Missing"),
    ({"response_format": "json"}, "response_format", "invalid_type", "an object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter", ""),
    ({"response_format": named(schema=None)}, "response_format.json_schema.schema", "missing_required_parameter", ""),
    ({"response_format": named(schema=[1])}, "response_format.json_schema.schema", "invalid_type", "an object"),
    ({"response_format": named(schema=True)}, "response_format.json_schema.schema", "invalid_type", "an object"),
    ({"response_format": named(name="a b")}, "response_format.json_schema.name", "invalid_value", "^[a-zA-Z0-9_-]+$"),
    ({"response_format": named(name="")}, "response_format.json_schema.name", "invalid_value", "pattern"),
    ({"response_format": named(name="a" * 65)}, "response_format.json_schema.name", "string_above_max_length", "64"),
    ({"response_format": named(extra=1)}, "response_format.json_schema.extra", "unknown_parameter", "extra"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "exactly one"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value", "but got 2"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "invalid_json", "JSON"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format", "missing_required_parameter", ""),
    ({"guided_regex": ""}, "guided_regex", "empty_string", "empty"),
    ({"guided_grammar": " \n"}, "guided_grammar", "empty_string", "empty"),
    ({"guided_choice": []}, "guided_choice", "empty_array", "empty array"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "array_above_max_length", "limit grammar_choices"),
    ({"guided_choice": ["." * GRAMMAR_BYTES.value, "b"]}, "guided_choice", "string_above_max_length", "262145 char"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty_string", "empty"),
    ({"guided_regex": "a" * (GRAMMAR_BYTES.value + 1)}, "guided_regex", "string_above_max_length", "grammar_bytes"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value", "one of the two"),
    ({"response_format": named(), "guided_regex": "a"}, "guided_regex", "invalid_value", "'response_format' already"),
    ({"guided_regex": "a", "min_tokens": 2, "ignore_eos": True}, "min_tokens", "unsupported_parameter", "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "reason", "words"), REFUSED)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str, reason: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        wanted_by(chat(**fields))
    assert (caught.value.param, caught.value.reason) == (param, reason)
    assert words in caught.value.message


@pytest.mark.parametrize("schema", [{"const": 2**53 + 1}, {"properties": {"a": {"enum": ["b", [-(2**60)]]}}}])
async def test_a_number_that_would_be_rounded_is_refused(schema: dict[str, Any]) -> None:
    grammars = GrammarChecker()
    try:
        with pytest.raises(InvalidParameter, match="beyond 2\\^53"):
            await grammars.of(chat(response_format=named(schema=schema)))
        bound = {"type": "integer", "maximum": 2**63 - 1, "enum": [1, 2**53]}
        assert await grammars.of(chat(response_format=named(schema=bound))) is not None
    finally:
        await grammars.stop()


async def test_a_grammar_is_compiled_once_and_its_reason_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarChecker()
    asked: list[Grammar] = []
    check = grammars._check.check
    monkeypatch.setattr(grammars._check, "check", lambda grammar: (asked.append(grammar), check(grammar))[1])
    try:
        for _ in range(2):
            assert await grammars.of(chat(guided_regex="a+")) == Grammar("regex", "a+")
            with pytest.raises(InvalidParameter) as caught:
                await grammars.of(chat(response_format=named(schema={"not": {}})))
            assert caught.value.message == (
                "Invalid schema for response_format 'answer': Unimplemented keys: [\"not\"]."
            )
            assert (caught.value.param, caught.value.reason) == ("response_format", "invalid_grammar")
        assert len(asked) == 2
        assert await grammars.of(chat(response_format={"type": "json_object"})) is ANY_OBJECT
        assert await grammars.of(chat()) is None
        assert len(asked) == 2
    finally:
        await grammars.stop()


async def test_gbnf_goes_to_the_ring_as_lark() -> None:
    grammars = GrammarChecker()
    try:
        found = await grammars.of(chat(guided_grammar='root ::= "a" | "b"'))
        assert found.kind == "lark"
        assert "::=" not in found.text
    finally:
        await grammars.stop()


async def test_no_more_wait_to_be_compiled_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    none = msgspec.structs.replace(limits.GRAMMARS_WAITING, value=0)
    monkeypatch.setattr(compiling, "GRAMMARS_WAITING", none)
    grammars = GrammarChecker()
    try:
        with pytest.raises(QueueFull, match="wait to be compiled"):
            await grammars.of(chat(guided_regex="a"))
    finally:
        await grammars.stop()


async def test_a_gateway_that_stops_does_not_wait_for_a_compiler() -> None:
    grammars = GrammarChecker()
    patterns = [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n}}}x"} for n in range(18)]
    asking = asyncio.create_task(grammars.of(chat(guided_json={"allOf": patterns})))
    await until(lambda: grammars._check._process is not None)
    await grammars.stop()
    with pytest.raises(InvalidParameter, match="too complex"):
        await asking
