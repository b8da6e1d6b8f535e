"""DeepSeek's calls. Pure; the bars and low lines of the markers are shown as the ASCII that they look like.

<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME
```json
{...}
```<|tool_call_end|>...<|tool_calls_end|>                                                 V3, R1

<|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>{...}<|tool_call_end|>...<|tool_calls_end|>    V3.1
"""

import re

from services.gateway.tool_calls.parsers.json_calls import arguments
from services.gateway.tool_calls.parsers.scanner import Scanner, Steps, Types


def _marker(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS_BEGIN, CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
CALL_BEGIN, CALL_END = _marker("tool call begin"), _marker("tool call end")
SEPARATOR = _marker("tool sep")

_NAME_END = re.compile(r"[\s<{`]")


def deepseek(scan: Scanner, types: Types) -> Steps[None]:
    while marker := (yield from scan.content(CALLS_BEGIN, CALL_BEGIN)):
        inside = marker == CALL_BEGIN or (yield from scan.optional(CALL_BEGIN))
        if not inside or not (yield from _call(scan)):
            scan.fall_back()
            continue
        yield from scan.optional(CALL_END)
        yield from scan.optional(CALLS_END)


def _call(scan: Scanner) -> Steps[bool]:
    yield from scan.spaces()
    name = yield from scan.name(_NAME_END)
    if not name or not (yield from scan.optional(SEPARATOR)):
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
