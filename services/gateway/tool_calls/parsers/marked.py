"""JSON calls behind a marker: Hermes and Qwen, Granite, Mistral, Llama. Pure."""

import re

from services.gateway.tool_calls.parsers.json_calls import arguments, call_list
from services.gateway.tool_calls.parsers.scanner import Scanner, Steps, Types

TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
GRANITE_CALL = "<|tool_call|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

_NAME_END = re.compile(r"[\s\[\]{}()<>\"',:]")
_ID_END = re.compile(r"[\s\[\]{}]")


def hermes(scan: Scanner, types: Types) -> Steps[None]:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one after the other."""
    while (yield from scan.content(TOOL_CALL)):
        if (yield from call_list(scan)):
            yield from scan.optional(END_OF_TOOL_CALL)
        else:
            scan.fall_back()


def granite(scan: Scanner, types: Types) -> Steps[None]:
    """`<|tool_call|>[{"name": "f", "arguments": {...}}, ...]`; some versions write `<tool_call>`."""
    while (yield from scan.content(GRANITE_CALL, TOOL_CALL)):
        if (yield from call_list(scan)):
            yield from scan.optional("<|/tool_call|>", END_OF_TOOL_CALL)
        else:
            scan.fall_back()


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


def llama3_json(scan: Scanner, types: Types) -> Steps[None]:
    """`{"name": "f", "parameters": {...}}` as the whole answer, several with `;` between them, or behind
    `<|python_tag|>`. Without the marker only the name of a tool tells a call from another object."""
    scan.mark()
    yield from scan.optional(PYTHON_TAG)
    while True:
        while (yield from call_list(scan, types)):
            scan.mark()
            yield from scan.optional(";", ",", PYTHON_TAG)
        scan.fall_back()
        if not (yield from scan.content(PYTHON_TAG)):
            return
