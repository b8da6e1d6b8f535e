"""NATS's messages in what a process wrote, in words: the verb, the subject, and of a payload its type and fields.

Only for stories: what is not understood is shown as it is, cut off.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

MOST = 160  # characters of a payload
_HEAD = re.compile(rb"(H?PUB|H?MSG) ([^\r\n]*)\r\n")
_VERBS = {"PUB": "publish", "HPUB": "publish", "MSG": "deliver", "HMSG": "deliver"}


def told(data: bytes) -> Iterator[str]:
    """Of each message in `data`, whole or not."""
    if int.from_bytes(data[:4]) <= len(data) - 4:
        yield from _asgi(data)
        return
    at = 0
    while at < len(data):
        head = _HEAD.search(data, at)
        if head is None:
            rest = data[at:].strip()
            if rest and at == 0:
                yield shown(rest)
            return
        verb, words = head.group(1).decode(), head.group(2).decode(errors="replace").split()
        sizes = [int(word) for word in words[-2 if verb.startswith("H") else -1 :] if word.isdigit()]
        if not words or not sizes:
            return
        body = data[head.end() : head.end() + sizes[-1]]
        if verb.startswith("H"):
            body = body[sizes[0] :]
        yield f"{_VERBS[verb]} {words[0]}  {shown(body)}"
        at = head.end() + sizes[-1]


def _asgi(data: bytes) -> Iterator[str]:
    """Frames of `core/asgi.py`: a length and an event each."""
    while len(data) >= 4:
        end = 4 + int.from_bytes(data[:4])
        try:
            event = msgspec.msgpack.decode(data[4:end])
        except msgspec.MsgspecError:
            return
        words = [str(event.get(name, "")) for name in ("type", "method", "path", "status", "code", "text")]
        body = event.get("body") or event.get("bytes") or b""
        yield " ".join([word for word in words if word] + ([shown(body)] if body else []))
        data = data[end:]


def shown(payload: bytes) -> str:
    """JSON and MessagePack as Python shows them; else bytes."""
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            found: Any = decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if isinstance(found, (dict, list)):
            return _cut(str(found))
    return _cut(payload.decode(errors="backslashreplace").replace("\r\n", " | "))


def _cut(text: str) -> str:
    return text if len(text) <= MOST else text[:MOST] + " ..."
