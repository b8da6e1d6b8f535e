"""Calls in a section, each a name, a separator and the arguments as JSON: DeepSeek's and Kimi's. Pure.

In DeepSeek's markers the bars and low lines are shown as the ASCII that they look like.

<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME
```json
{...}
```<|tool_call_end|>...<|tool_calls_end|>                                                 DeepSeek V3, R1

<|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>{...}<|tool_call_end|>...<|tool_calls_end|>    DeepSeek V3.1

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
<|tool_calls_section_end|>                                                                Kimi K2: an id that counts
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from services.gateway.tool_calls.parsers.json_calls import arguments
from services.gateway.tool_calls.parsers.scanner import Machine, Scanner, Steps, Types


class Section(NamedTuple):
    """The markers."""

    begin: str
    call: str
    separator: str  # between a name and its arguments
    end_of_call: str
    end: str


def _marker(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK = Section(
    *map(_marker, ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end"))
)
KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
PREFIX = "functions."  # before the name in Kimi's ids

_NAME_END = re.compile(r"[\s<{`]")


def in_section(marks: Section, read_call: Callable[[Scanner], Steps[bool]]) -> Machine:
    """Reads a section's calls, or one that stands without a section. `read_call` reads on behind `marks.call`; False:
    there is no call, with nothing found."""

    def machine(scan: Scanner, types: Types) -> Steps[None]:
        while marker := (yield from scan.content(marks.begin, marks.call)):
            inside = marker == marks.call or (yield from scan.optional(marks.call))
            if not inside or not (yield from read_call(scan)):
                scan.fall_back()
                continue
            yield from scan.optional(marks.end_of_call)
            yield from scan.optional(marks.end)

    return machine


def _deepseek_call(scan: Scanner) -> Steps[bool]:
    yield from scan.spaces()
    name = yield from scan.name(_NAME_END)
    if not name or not (yield from scan.optional(DEEPSEEK.separator)):
        return False
    fenced = False
    if name == "function" and (yield from scan.spaces()) != "{":
        name = yield from scan.name(_NAME_END)
        fenced = bool((yield from scan.optional("```json", "```")))
    if not name or (yield from scan.spaces()) != "{":
        return False
    scan.begin(name)
    if (yield from arguments(scan, scan.arguments)) and fenced:
        yield from scan.optional("```")
    return True


def _kimi_call(scan: Scanner) -> Steps[bool]:
    yield from scan.spaces()
    identity = yield from scan.name(_NAME_END)
    name = identity.removeprefix(PREFIX).rpartition(":")[0] or identity.removeprefix(PREFIX)
    if not name or not (yield from scan.optional(KIMI.separator)) or (yield from scan.spaces()) != "{":
        return False
    scan.begin(name)
    yield from arguments(scan, scan.arguments)
    return True


deepseek = in_section(DEEPSEEK, _deepseek_call)
kimi_k2 = in_section(KIMI, _kimi_call)
