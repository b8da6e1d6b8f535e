"""Items as they are stored: an array in JSON, of which each is read, measured and sent as it lies there. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

Item = dict[str, Any]


class StoredItem(NamedTuple):
    """Reading a page of items needs no more of each than its id."""

    id: str
    type: str
    json: msgspec.Raw  # it keeps the array that it was split from in memory


class _Head(msgspec.Struct):
    id: str
    type: str


_array = msgspec.json.Decoder(list[msgspec.Raw])
_head = msgspec.json.Decoder(_Head)


def split(array: bytes) -> list[StoredItem]:
    """The items of a JSON array."""
    return to_stored(_array.decode(array))


def to_stored(items: Iterable[msgspec.Raw]) -> list[StoredItem]:
    return [StoredItem(head.id, head.type, raw) for raw in items for head in (_head.decode(raw),)]


def encoded(items: Sequence[Item]) -> list[StoredItem]:
    return [StoredItem(item["id"], item["type"], msgspec.Raw(msgspec.json.encode(item))) for item in items]


def encoded_array(items: Sequence[Item]) -> bytes:
    """As `decoded`."""
    return b"[" + b",".join([msgspec.json.encode(item) for item in items]) + b"]"


def decoded(items: Sequence[StoredItem]) -> list[Item]:
    """One at a time, so that a thread which does it lets others run."""
    return [msgspec.json.decode(item.json) for item in items]


def joined(items: Sequence[StoredItem]) -> bytes:
    """Their JSON array."""
    return b"[" + b",".join(item.json for item in items) + b"]"


def size_of(items: Iterable[StoredItem]) -> int:
    """Bytes, as JSON."""
    return sum(len(item.json) for item in items)


# --- what a response brings ----------------------------------------------------------------------


class ResponseTurn(NamedTuple):
    """A response, as conversations look at it."""

    id: str
    status: str
    items: list[StoredItem]  # its own input, and its output behind it

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def added(self) -> list[StoredItem]:
        """What it adds to a conversation: none where it has failed."""
        return self.items if self.status in ("completed", "incomplete") else []


class _Shown(msgspec.Struct):
    """Of a response object; its tools and texts are left as they are."""

    id: str
    status: str
    output: list[msgspec.Raw]


_shown = msgspec.json.Decoder(_Shown)


def turn_of(own: bytes, response: bytes) -> ResponseTurn:
    """`own`: the array of its input's items; `response`: its object as JSON."""
    shown = _shown.decode(response)
    return ResponseTurn(shown.id, shown.status, split(own) + to_stored(shown.output))
