"""Whatever a grammar lets through, its family's parser reads as calls whose arguments match their schemas."""

import json
import random
from collections.abc import Sequence

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.gateway.core.errors import InvalidParameter
from services.gateway.tool_calls.families import FAMILIES
from services.gateway.tool_calls.grammar import (
    VARIANTS,
    Calling,
    behind_reasoning,
    calls_or,
    required_calls,
    strict_calls,
)
from services.gateway.tool_calls.parser import Parser
from services.gateway.tool_calls.parsers import gemma, harmony, tagged
from services.gateway.tool_calls.parsers.scanner import Event
from services.gateway.tool_calls.schemas import FunctionDefinition, types_of
from shared.grammars import source_of, verdict_on
from shared.messages import Grammar
from tests.unit.gateway.tool_calls.texts import calls_of, content_of, thoughts_of

WEATHER = FunctionDefinition(
    "get_weather",
    "Has ::= in its words",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
NOW = FunctionDefinition("now")
FUNCTIONS = (WEATHER, NOW)
KINDS = [*((family, "") for family in FAMILIES), *VARIANTS, ("hy_v3", ":opensource")]
END = 256
OPEN = tagged.hunyuan_tags(":opensource")
ENDINGS = (
    '"',
    "</think>",
    *(tags.end_of_parameter for tags in (tagged.CODER, tagged.DEEPSEEK_V32, tagged.STEP3)),
    *(tags.end_of_value for tags in (tagged.GLM, tagged.LONGCAT, OPEN)),
    *(marks.text for marks in (gemma.GEMMA4, gemma.FUNCTION_GEMMA)),
)
CLOSERS = b'"}])</\n'


class Vocabulary:
    """Bytes, an end, and special tokens."""

    bos_token_id = None
    eos_token_id = END

    def __init__(self, specials: Sequence[str]) -> None:
        self.specials = {text: END + 1 + index for index, text in enumerate(specials)}
        self.special_token_ids = [END, *self.specials.values()]
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(text.encode() for text in specials)]
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens if token != END).decode(errors="replace")

    def tokens_of(self, text: str) -> list[int]:
        for marker, token in self.specials.items():
            if marker in text:
                before, _, after = text.partition(marker)
                return [*self.tokens_of(before), token, *self.tokens_of(after)]
        return list(text.encode())


def calling(
    family: str,
    variant: str = "",
    *,
    special: bool = False,
    single: bool = False,
    functions: tuple[FunctionDefinition, ...] = FUNCTIONS,
) -> tuple[Calling, Vocabulary]:
    vocabulary = Vocabulary(FAMILIES[family].markers if special else ())
    return Calling(family, variant, functions, single, vocabulary.specials), vocabulary


def matcher_of(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
    assert verdict_on(grammar).problem == ""
    matcher = LLMatcher(vocabulary.tokenizer, source_of(grammar), log_level=0)
    assert not matcher.get_error()
    return matcher


def walk(grammar: Grammar, vocabulary: Vocabulary, seed: int, limit: int = 600) -> str:
    """A text that the grammar lets through, letters and ends drawn more often than other bytes."""
    draw = random.Random(seed)
    matcher = matcher_of(grammar, vocabulary)
    mask = allocate_token_bitmask(1, len(vocabulary.tokens))
    tokens: list[int] = []
    while not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = [token for token in range(len(vocabulary.tokens)) if mask[0][token // 32] >> (token % 32) & 1]
        assert allowed, vocabulary.text_of(tokens)
        plain = [
            token for token in allowed if token >= END or (token < 128 and chr(token).isalnum()) or token in CLOSERS
        ]
        ends = [token for token in allowed if token >= END]
        token = draw.choice(ends if ends and len(tokens) > limit else plain or allowed)
        if token == END:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
        if len(tokens) > limit and not ends:
            for text in draw.sample(ENDINGS, len(ENDINGS)):
                ending = vocabulary.tokens_of(text)
                if matcher.validate_tokens(ending) == len(ending):
                    assert matcher.consume_tokens(ending)
                    tokens += ending
                    break
        assert len(tokens) < 5 * limit
    assert matcher.is_accepting()
    return vocabulary.text_of(tokens)


def parsed(
    family: str, text: str, functions: Sequence[FunctionDefinition] = FUNCTIONS, **thinking: object
) -> list[Event]:
    types = {function.name: types_of(function.parameters or {}) for function in functions}
    parser = Parser(FAMILIES[family].machine, types, **thinking)  # type: ignore[arg-type]
    return [*parser.feed(text), *parser.finish()]


def check_arguments(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "now":
        assert found == {}
        return
    assert name == "get_weather"
    assert set(found) - {"unit", "where"} == {"city", "days"}
    assert isinstance(found["city"], str)
    assert found["days"] in range(1, 8)
    assert found.get("unit", "C") in ("C", "F")
    assert isinstance(found.get("where", {"x": True})["x"], bool)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("family", "variant"), KINDS)
def test_what_is_demanded_is_called(family: str, variant: str, special: bool) -> None:
    found = 0
    for seed in range(4):
        how, vocabulary = calling(family, variant, special=special)
        text = walk(required_calls(how, "", opened=False), vocabulary, seed)
        events = parsed(family, text)
        assert content_of(events) == "", text
        calls = calls_of(events)
        assert calls, text
        for name, arguments in calls:
            check_arguments(name, arguments)
        found += len(calls)
    assert found >= 4


@pytest.mark.parametrize(("family", "variant"), KINDS)
def test_one_call_where_one_is_wanted(family: str, variant: str) -> None:
    how, vocabulary = calling(family, variant, single=True, functions=(NOW,))
    events = parsed(family, walk(required_calls(how, "", opened=False), vocabulary, 1), (NOW,))
    ((name, arguments),) = calls_of(events)
    assert (name, json.loads(arguments)) == ("now", {})


def lets_through(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    matcher = matcher_of(grammar, vocabulary)
    tokens = vocabulary.tokens_of(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_goes_before_calls(special: bool) -> None:
    how, vocabulary = calling("hermes", functions=(NOW,), special=special)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    opened = required_calls(how, "think", opened=True)
    assert lets_through(opened, vocabulary, f"Hm.\n</think>\n\n{call}")
    assert not lets_through(opened, vocabulary, call)
    closed = required_calls(how, "think", opened=False)
    assert lets_through(closed, vocabulary, f"<think>Hm.\n</think>\n\n{call}")
    assert lets_through(closed, vocabulary, call)
    assert not lets_through(closed, vocabulary, f"Hm.\n</think>{call}")
    text = walk(opened, vocabulary, 3)
    assert calls_of(parsed("hermes", text, (NOW,), thinking="think", opened=True))
    assert thoughts_of(parsed("hermes", text, (NOW,), thinking="think", opened=True)) != ""


@pytest.mark.parametrize(
    ("family", "call", "wrong"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', '<tool_call>\n{"name": "then"'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', '[TOOL_CALLS][{"name": "then"'),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_strict_functions_are_held_behind_the_trigger(family: str, call: str, wrong: str, special: bool) -> None:
    how, vocabulary = calling(family, special=special)
    grammar = strict_calls(how, "", opened=False)
    assert grammar is not None
    for text in ("", "Just <words> [and] </words>.", call, f"Well.\n{call}", f"{call}\n{call} So."):
        assert lets_through(grammar, vocabulary, text), text
    assert not lets_through(grammar, vocabulary, wrong)
    loose = msgspec.structs.replace(WEATHER, strict=False)
    assert strict_calls(how._replace(functions=(loose,)), "", opened=False) is None


def test_without_a_trigger_nothing_is_held() -> None:
    how, _ = calling("llama3_json")
    assert strict_calls(how, "", opened=False) is None


def test_arguments_have_no_names_of_the_models_making() -> None:
    loose = FunctionDefinition("f", None, {"type": "object", "properties": {"a": {"type": "string"}}})
    how, vocabulary = calling("hermes", functions=(loose,))
    named, more = (
        f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        for arguments in ('{"a": "x"}', '{"a": "x", "b": 1}')
    )
    for closes, expected in ((True, [True, False]), (False, [True, True])):
        grammar = required_calls(how._replace(closes=closes), "", opened=False)
        assert [lets_through(grammar, vocabulary, text) for text in (named, more)] == expected


def test_calls_or_a_format() -> None:
    how, vocabulary = calling("hermes")
    schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"const":"/"}},"required":["a"]}')
    for answer, text in ((schema, '{"a": "/"}'), (Grammar("regex", "a/b+"), "a/bb")):
        grammar = calls_or(how, answer, "", opened=False)
        assert lets_through(grammar, vocabulary, text)
        assert lets_through(grammar, vocabulary, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        assert not lets_through(grammar, vocabulary, "words")
        behind = behind_reasoning(answer, "think", {})
        assert lets_through(behind, vocabulary, f"Hm.</think>\n{text}")
        assert not lets_through(behind, vocabulary, text)
    with pytest.raises(InvalidParameter):
        calls_or(how, Grammar("lark", 'start: "a"'), "", opened=False)


@pytest.mark.parametrize("family", ["qwen3_coder", "glm4"])
def test_texts_without_quotation_marks(family: str) -> None:
    """A long text with line breaks and marks of its own comes back as it was."""
    write = FunctionDefinition(
        "write", None, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    )
    how, vocabulary = calling(family, functions=(write,))
    value = 'def f():\n    return "<a>" < 5\n'
    text = {
        "qwen3_coder": f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm4": f"<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    }[family]
    assert lets_through(required_calls(how, "", opened=False), vocabulary, text)
    ((_, arguments),) = calls_of(parsed(family, text, (write,)))
    assert json.loads(arguments) == {"text": value}


@pytest.mark.parametrize(("family", "variant"), KINDS)
def test_a_hundred_tools_compile(family: str, variant: str) -> None:
    functions = tuple(msgspec.structs.replace(WEATHER, name=f"tool_{index}") for index in range(128))
    how, _ = calling(family, variant, functions=functions)
    assert verdict_on(required_calls(how, "", opened=False)).problem == ""


def test_special_tokens_with_a_checkpoints_suffix() -> None:
    vocabulary = Vocabulary((*OPEN, "<think:opensource>", "</think:opensource>"))
    how = Calling("hy_v3", ":opensource", (NOW,), False, vocabulary.specials)
    call = "<tool_calls:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>"
    text = f"{call}\n</tool_calls:opensource>"
    assert lets_through(required_calls(how, "hy_v3", opened=True), vocabulary, f"Hm.</think:opensource>{text}")
    closed = required_calls(how, "hy_v3", opened=False)
    assert lets_through(closed, vocabulary, f"<think:opensource>Hm.</think:opensource>\n{text}")
    assert lets_through(closed, vocabulary, text)


@pytest.mark.parametrize("special", [False, True])
def test_messages_of_harmony(special: bool) -> None:
    """Reasoning, then the header of a call or of the answer."""
    how, vocabulary = calling("openai", functions=(NOW,))
    if special:
        vocabulary = Vocabulary(harmony.TOKENS)
        how = how._replace(specials=vocabulary.specials)
        assert strict_calls(how._replace(functions=(WEATHER,)), "openai_gptoss", opened=False) is None
    thoughts = f"{harmony.ANALYSIS}Hm.{harmony.END}{harmony.START}assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    grammar = required_calls(how, "openai_gptoss", opened=False)
    assert lets_through(grammar, vocabulary, thoughts + call)
    assert lets_through(grammar, vocabulary, call)
    assert not lets_through(grammar, vocabulary, f"{harmony.FINAL}No.")
    schema = Grammar("json_schema", '{"type":"object","properties":{},"additionalProperties":false}')
    for grammar in (
        behind_reasoning(schema, "openai_gptoss", how.specials, opened=False),
        calls_or(how, schema, "openai_gptoss", opened=False),
    ):
        assert lets_through(grammar, vocabulary, f"{thoughts}{harmony.FINAL}{{}}")
        assert lets_through(grammar, vocabulary, f"{harmony.FINAL}{{}}")
        assert not lets_through(grammar, vocabulary, f"{harmony.FINAL}No.")
