"""JSON calls behind a marker, `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, or without one. Pure."""

import re
from collections.abc import Mapping

from services.gateway.tool_calls.parsers.json_calls import arguments, call_list, string
from services.gateway.tool_calls.parsers.scanner import Machine, Scanner, Steps, Types

TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
GRANITE_CALL, END_OF_GRANITE_CALL = "<|tool_call|>", "<|/tool_call|>"
CALLS, END_OF_CALLS = "<tool_calls>", "</tool_calls>"
NEMOTRON_CALL, END_OF_NEMOTRON_CALL = "<TOOLCALL>", "</TOOLCALL>"
ACTION, PLUGIN, END_OF_ACTION = "<|action_start|>", "<|plugin|>", "<|action_end|>"
FUNCTOOLS = "functools"
FUNCTION_CALL = "<function_call>"
COHERE_CALLS, END_OF_COHERE_CALLS = "<|START_ACTION|>", "<|END_ACTION|>"
APERTUS_CALLS, END_OF_APERTUS_CALLS = "<|tools_prefix|>", "<|tools_suffix|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

_NAME_END = re.compile(r"[\s\[\]{}()<>\"',:]")
_ID_END = re.compile(r"[\s\[\]{}]")


def with_markers(ends: Mapping[str, tuple[str, ...]]) -> Machine:
    """Reads calls, or lists of them, behind any of the markers, which the texts that belong to it may end."""

    def machine(scan: Scanner, types: Types) -> Steps[None]:
        while marker := (yield from scan.content(*ends)):
            if not (yield from call_list(scan)):
                scan.fall_back()
                continue
            scan.mark()
            while (yield from call_list(scan)):
                scan.mark()
            scan.back()
            for end in ends[marker]:
                yield from scan.optional(end)

    return machine


def without_marker(*markers: str, ends: tuple[str, ...] = ()) -> Machine:
    """Reads calls that are the whole answer, several with `;` between them, or stand behind one of `markers`. Without
    one only the name of a tool tells a call from another object."""

    def machine(scan: Scanner, types: Types) -> Steps[None]:
        scan.mark()
        yield from scan.optional(*markers)
        while True:
            while (yield from call_list(scan, types)):
                yield from scan.optional(*ends)
                scan.mark()
                yield from scan.optional(";", ",", *markers)
            scan.fall_back()
            if not (yield from scan.content(*markers)):
                return

    return machine


hermes = with_markers({TOOL_CALL: (END_OF_TOOL_CALL,)})
granite = with_markers(
    {GRANITE_CALL: (END_OF_GRANITE_CALL, END_OF_TOOL_CALL), TOOL_CALL: (END_OF_GRANITE_CALL, END_OF_TOOL_CALL)}
)
jamba = with_markers({CALLS: (END_OF_CALLS,)})
internlm = with_markers({f"{ACTION}{PLUGIN}": (END_OF_ACTION,)})
nemotron_json = with_markers({NEMOTRON_CALL: (END_OF_NEMOTRON_CALL,)})
granite_20b_fc = with_markers({FUNCTION_CALL: ()})
phi4_mini_json = with_markers({FUNCTOOLS: (), GRANITE_CALL: (END_OF_GRANITE_CALL,)})
cohere = with_markers({COHERE_CALLS: (END_OF_COHERE_CALLS,)})
llama3_json = without_marker(PYTHON_TAG)
xlam = without_marker("```json", "```", TOOL_CALLS, TOOL_CALL, ends=("```", END_OF_TOOL_CALL))


def apertus(scan: Scanner, types: Types) -> Steps[None]:
    """`<|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>`: the name is the key."""
    while (yield from scan.content(APERTUS_CALLS)):
        yield from scan.optional("[")
        if not (yield from _keyed(scan)):
            scan.fall_back()
            continue
        scan.mark()
        while (yield from scan.optional(",")) and (yield from _keyed(scan)):
            scan.mark()
        scan.back()
        yield from scan.optional("]")
        yield from scan.optional(END_OF_APERTUS_CALLS)


def _keyed(scan: Scanner) -> Steps[bool]:
    if not (yield from scan.optional("{")):
        return False
    yield from scan.spaces()
    name = yield from string(scan)
    if not name or not (yield from scan.optional(":")):
        return False
    yield from scan.spaces()
    scan.begin(name)
    yield from arguments(scan, scan.arguments)
    yield from scan.optional("}")
    return True


def mistral(scan: Scanner, types: Types) -> Steps[None]:
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or since 2025 `[TOOL_CALLS]f{...}` and
    `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, once per call."""
    while (yield from scan.content(TOOL_CALLS)):
        begin = yield from scan.spaces()
        call = call_list(scan) if begin in ("[", "{") else _named(scan)
        if not (yield from call):
            scan.fall_back()


def _named(scan: Scanner) -> Steps[bool]:
    """A name and an object."""
    name = yield from scan.name(_NAME_END)
    if not name:
        return False
    if (yield from scan.optional(CALL_ID)):
        yield from scan.name(_ID_END)
    yield from scan.optional(ARGS)
    if (yield from scan.spaces()) != "{":
        return False
    scan.begin(name)
    yield from arguments(scan, scan.arguments)
    return True
