"""How each family writes calls, and what they are: for parsers, grammars and templates alike."""

from typing import NamedTuple

from services.gateway.tool_calls.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from services.gateway.tool_calls.parsers.scanner import Arguments, Begin, Event, Text, Thought

TYPES = {
    "get_weather": {"city": "string", "days": "integer"},
    "f": {"a": "integer|null", "b": "string|null", "c": "object"},
    "now": {},
}
WEATHER = ("get_weather", '{"city": "New \\"York\\"", "days": 3}')
NOW = ("now", "{}")


class Case(NamedTuple):
    """A text of a family with the content and the calls (name, arguments) in it."""

    family: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...]


_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER[1] + "}\n</tool_call>"
_CODER = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nNew "York"\n</parameter>\n<parameter=days>\n3\n'
    "</parameter>\n</function>\n</tool_call>"
)
_GLM = (
    '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>New "York"</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>"
)
_JSON = '{"name": "get_weather", "arguments": ' + WEATHER[1] + "}"
_LLAMA = '{"name": "get_weather", "parameters": ' + WEATHER[1] + "}"
_PYTHON = """get_weather(city='New "York"', days=3)"""

CASES = [
    Case("hermes", _HERMES, "", (WEATHER,)),
    Case("hermes", f"Let me see.\n\n{_HERMES}\n{_HERMES}\n", "Let me see.", (WEATHER, WEATHER)),
    Case("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call> Done.', " Done.", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "id": [1, "}"]}', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "", (("f", '{"a": ['),)),
    Case("hermes", '<tool_call>{"name": "f", "argu', "", (("f", ""),)),
    Case("hermes", "<tool_call>No call.</tool_call> ", "<tool_call>No call.</tool_call> ", ()),
    Case("hermes", f"<tool_call><tool_call>{_JSON}", "<tool_call>", (WEATHER,)),
    Case("hermes", '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', ()),
    Case("hermes", " a <b> </b> <tool", " a <b> </b> <tool", ()),
    Case("granite", f"<|tool_call|>[{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("granite", f"<tool_call>[{_JSON}]", "", (WEATHER,)),
    Case("granite", "<|tool_call|>[]", "<|tool_call|>[]", ()),
    Case("mistral", f"[TOOL_CALLS] [{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("mistral", "Yes.[TOOL_CALLS]now{}[TOOL_CALLS]get_weather" + WEATHER[1], "Yes.", (NOW, WEATHER)),
    Case("mistral", "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", "", (NOW,)),
    Case("mistral", "[TOOL_CALLS]what now?", "[TOOL_CALLS]what now?", ()),
    Case("llama3_json", _LLAMA, "", (WEATHER,)),
    Case("llama3_json", f"<|python_tag|>{_LLAMA}; {_LLAMA}", "", (WEATHER, WEATHER)),
    Case("llama3_json", '{"type": "function", "name": "now"}', "", (NOW,)),
    Case("llama3_json", '{"answer": 42}', '{"answer": 42}', ()),
    Case("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', ()),
    Case("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
    Case(
        "deepseek",
        f"Sure.{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n{WEATHER[1]}\n```{CALL_END}\n"
        f"{CALL_BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "Sure.",
        (WEATHER, NOW),
    ),
    Case(
        "deepseek",
        f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{WEATHER[1]}{CALL_END}"
        f"{CALL_BEGIN}now{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
        "",
        (WEATHER, NOW),
    ),
    Case("deepseek", f"{CALLS_BEGIN}{CALL_BEGIN}no call", f"{CALLS_BEGIN}{CALL_BEGIN}no call", ()),
    Case("qwen3_coder", _CODER, "", (WEATHER,)),
    Case(
        "qwen3_coder",
        f"Well:\n{_CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well:",
        (WEATHER, NOW),
    ),
    Case(
        "qwen3_coder",
        "<function=f><parameter=b>null</parameter><parameter=a>5</parameter></function>",
        "",
        (("f", '{"b": null, "a": 5}'),),
    ),
    Case(
        "qwen3_coder",
        "<function=f><parameter=b>\nnil\n\n</parameter><parameter=c>\n{'x': True}\n</parameter></function>",
        "",
        (("f", '{"b": "nil", "c": {"x": true}}'),),
    ),
    Case("qwen3_coder", "<function=f><parameter=a>\n1", "", (("f", '{"a": '),)),
    Case("qwen3_coder", "<tool_call>\nnone", "<tool_call>\nnone", ()),
    Case("glm4", f"Well. {_GLM}\n<tool_call>now\n</tool_call>", "Well.", (WEATHER, NOW)),
    Case("glm4", "<tool_call>what is that", "<tool_call>what is that", ()),
    Case("pythonic", f"[{_PYTHON}, now()]", "", (WEATHER, NOW)),
    Case("pythonic", f"<|python_start|>[{_PYTHON}]<|python_end|> Done.", " Done.", (WEATHER,)),
    Case("pythonic", f"<function_calls>\n{_PYTHON}\nnow()\n</function_calls>", "", (WEATHER, NOW)),
    Case(
        "pythonic",
        "[f(a=None, b=\"x\\u00e9\\'\", c={'k': (1, true)})]",
        "",
        (("f", '{"a": null, "b": "x\u00e9\'", "c": "{\'k\': (1, true)}"}'),),
    ),
    Case("pythonic", "[1, 2] is no call", "[1, 2] is no call", ()),
    Case("pythonic", "[f(a=1", "", (("f", ""),)),
]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def thoughts_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Thought))


def calls_of(events: list[Event]) -> tuple[tuple[str, str], ...]:
    """Name and arguments of every call."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Begin):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return tuple(calls)
