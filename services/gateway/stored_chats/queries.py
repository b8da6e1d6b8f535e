"""Query parameters of lists of stored chat completions and of their messages, and the pages. Pure."""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from services.gateway.errors import InvalidParameter
from services.gateway.files.listing import limit_of
from services.gateway.requests.extra_fields import check_metadata
from shared.messages.records import StoredChat

PAGE = 20
"""Entries of a page where no limit is given, as OpenAI has it."""
MAX_PAGE = 100
_METADATA = re.compile(r"metadata\[([^\[\]]+)\]")


class Wanted(msgspec.Struct, frozen=True):
    """A page of a list."""

    after: str | None = None
    limit: int = PAGE
    ascending: bool = True
    model: str | None = None
    metadata: dict[str, str] = {}

    def takes(self, chat: StoredChat) -> bool:
        """Whether `chat` is in the list."""
        return self.model in (None, chat.model) and self.metadata.items() <= chat.metadata.items()


def chats_wanted(query: bytes) -> Wanted:
    """Of GET /v1/chat/completions; `metadata[key]=value` as often as one likes. Raises `InvalidParameter`."""
    params, metadata = _read(query, ("after", "limit", "order", "model"))
    check_metadata(metadata)
    return _wanted(params, metadata)


def messages_wanted(query: bytes) -> Wanted:
    """Of GET /v1/chat/completions/{id}/messages. Raises `InvalidParameter`."""
    params, metadata = _read(query, ("after", "limit", "order"))
    for key in metadata:
        raise _unknown(f"metadata[{key}]")
    return _wanted(params, {})


def _wanted(params: dict[str, str], metadata: dict[str, str]) -> Wanted:
    order = params.get("order", "asc")
    if order not in ("asc", "desc"):
        raise InvalidParameter(
            f"Invalid value: '{order[:64]}'. Supported values are: 'asc', 'desc'.",
            param="order",
            reason="invalid_value",
        )
    return Wanted(
        params.get("after"), limit_of(params, PAGE, MAX_PAGE), order == "asc", params.get("model"), metadata
    )


def _read(query: bytes, known: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    params: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if (entry := _METADATA.fullmatch(name)) is not None:
            metadata[entry[1]] = value
        elif name in known:
            params[name] = value
        else:
            raise _unknown(name)
    return params, metadata


def _unknown(name: str) -> InvalidParameter:
    return InvalidParameter(f"Unknown parameter: '{name[:64]}'.", param=name[:64], reason="unknown_parameter")


class ShownMessage(msgspec.Struct, frozen=True):
    """A message of a stored conversation."""

    id: str
    created_at: float
    """Its place: messages have no times of their own."""
    shown: dict[str, Any]


def shown_messages(chat_id: str, messages: bytes) -> list[ShownMessage]:
    """What the request brought, each with an id."""
    given: list[dict[str, Any]] = msgspec.json.decode(messages) if messages else []
    found = []
    for place, message in enumerate(given):
        parts = message.get("content") if isinstance(message.get("content"), list) else None
        said = {key: value for key, value in message.items() if value is not None and key != "content"}
        text = "".join(part.get("text") or "" for part in parts) if parts is not None else message["content"]
        identity = f"{chat_id}-{place}"
        shown = {"id": identity, "content": text, "refusal": None, **said}
        shown["content_parts"] = None if parts is None else [_part(part) for part in parts]
        found.append(ShownMessage(identity, float(place), shown))
    return found


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if value is not None}
