"""gpt-oss' messages (the harmony format): each names its channel, and a call whom it is for. Pure.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer

<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The thoughts and the answer are found by `channels`, which leaves calls as they stand to `harmony`.
"""

import re

from services.gateway.tool_calls.parsers.json_calls import arguments
from services.gateway.tool_calls.parsers.scanner import Scanner, Steps, Types

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
PREFIX = "functions."

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_TOKEN_BEGIN = re.compile("<")
_ENDS = (END, CALL, RETURN)
_MOST_OF_HEADER = 512  # characters; what is longer is none


def channels(scan: Scanner, *, opened: bool) -> Steps[None]:
    """Analysis as thoughts, other messages as text, and calls as they stand. `opened`: it begins within analysis."""
    between = ""
    if opened:
        yield from scan.until(_ENDS, scan.thought)
        between = "\n"
    while marker := (yield from scan.content(START, CHANNEL)):
        header = yield from _header(scan)
        if header is None:
            scan.fall_back()
        elif _RECIPIENT.search(header):
            scan.text(f"{marker}{header}{MESSAGE}")
            scan.text((yield from scan.until(_ENDS, scan.text)))
        elif "analysis" in header:
            scan.thought(between)
            yield from scan.until(_ENDS, scan.thought)
            between = "\n"
        else:
            yield from scan.until(_ENDS, scan.text)


def harmony(scan: Scanner, types: Types) -> Steps[None]:
    while (yield from scan.content(START, CHANNEL)):
        header = yield from _header(scan)
        recipient = _RECIPIENT.search(header or "")
        if recipient is None or (yield from scan.spaces()) != "{":
            scan.fall_back()
            continue
        scan.begin(recipient[1])
        yield from arguments(scan, scan.arguments)
        yield from scan.optional(*_ENDS)


def _header(scan: Scanner) -> Steps[str | None]:
    """What stands before a message; None where none begins."""
    header = ""
    while len(header) <= _MOST_OF_HEADER:
        if part := (yield from scan.run(_TOKEN_BEGIN)):
            header += part
        elif not (yield from scan.peek()):
            return None
        elif (yield from scan.optional(MESSAGE)):
            return header
        else:
            scan.skip()
            header += "<"
    return None
