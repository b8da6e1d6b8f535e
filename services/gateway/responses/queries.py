"""Query parameters of /v1/responses/{id} and its input items. Pure."""

from collections.abc import Sequence
from urllib.parse import parse_qsl

import msgspec

from services.gateway.errors import InvalidParameter
from services.gateway.requests.validation import check_range
from services.gateway.responses.checks import check_include, unsupported
from services.gateway.responses.items import Item

PAGE = 20
"""Items of a page where no limit is given, as OpenAI has it."""
MAX_PAGE = 100
MAX_EVENT = 2**31 - 1
_BOOLEANS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}


class Retrieval(msgspec.Struct, frozen=True):
    stream: bool = False
    starting_after: int | None = None


class Page(msgspec.Struct, frozen=True):
    limit: int = PAGE
    order: str = "desc"
    after: str = ""


class ItemList(msgspec.Struct, frozen=True):
    """What GET /v1/responses/{id}/input_items answers."""

    object: str
    data: Sequence[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def retrieval(query: bytes) -> Retrieval:
    """Of GET /v1/responses/{id}. Raises `InvalidParameter`."""
    given = _read(query, ("include", "stream", "starting_after", "include_obfuscation"))
    check_include(given.get("include"))
    if _boolean(given, "include_obfuscation"):
        raise unsupported("include_obfuscation")
    stream = _boolean(given, "stream")
    after = _integer(given, "starting_after", 0, MAX_EVENT)
    if after is not None and not stream:
        raise InvalidParameter(
            "The 'starting_after' parameter is only allowed when 'stream' is true.",
            param="starting_after",
            reason="invalid_value",
        )
    return Retrieval(stream, after)


def page(query: bytes) -> Page:
    """Of GET /v1/responses/{id}/input_items. Raises `InvalidParameter`."""
    given = _read(query, ("include", "limit", "order", "after"))
    check_include(given.get("include"))
    order = given.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidParameter(
            f"Invalid value: '{order[:64]}'. Supported values are: 'asc', 'desc'.",
            param="order",
            reason="invalid_value",
        )
    limit = _integer(given, "limit", 1, MAX_PAGE)
    return Page(PAGE if limit is None else limit, order, given.get("after", [""])[-1])


def item_list(items: Sequence[Item], wanted: Page) -> ItemList:
    """A page of `items`. Raises `InvalidParameter` when `after` is none of them."""
    ordered = list(items) if wanted.order == "asc" else list(reversed(items))
    if wanted.after:
        ids = [item["id"] for item in ordered]
        if wanted.after not in ids:
            raise InvalidParameter(
                f"Invalid 'after': no item '{wanted.after[:64]}' is among the input items of this response.",
                param="after",
                reason="invalid_value",
            )
        ordered = ordered[ids.index(wanted.after) + 1 :]
    data = ordered[: wanted.limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return ItemList("list", data, first, last, len(ordered) > len(data))


def _read(query: bytes, known: Sequence[str]) -> dict[str, list[str]]:
    """Values by name; `include[]` and `include` are the same."""
    found: dict[str, list[str]] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        plain = name.removesuffix("[]")
        if plain not in known:
            raise InvalidParameter(
                f"Unknown parameter: '{name[:64]}'.", param=name[:64], reason="unknown_parameter"
            )
        found.setdefault(plain, []).append(value)
    return found


def _boolean(given: dict[str, list[str]], name: str) -> bool:
    value = given.get(name, ["false"])[-1]
    if value not in _BOOLEANS:
        raise InvalidParameter(
            f"Invalid type for '{name}': expected a boolean.", param=name, reason="invalid_type"
        )
    return _BOOLEANS[value]


def _integer(given: dict[str, list[str]], name: str, low: int, high: int) -> int | None:
    if name not in given:
        return None
    value = given[name][-1]
    if not value.removeprefix("-").isascii() or not value.removeprefix("-").isdigit() or len(value) > 18:
        raise InvalidParameter(
            f"Invalid type for '{name}': expected an integer.", param=name, reason="invalid_type"
        )
    check_range(name, int(value), low, high)
    return int(value)
