"""Pages of a list, as OpenAI has them: the newest first, and behind an id. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from starlette.datastructures import QueryParams

from services.gateway.core.errors import InvalidParameter, RouteError, check_range


class Listed(Protocol):
    """What can stand in a list."""

    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> float: ...


T = TypeVar("T", bound=Listed)


def page(
    items: Sequence[T], *, after: str | None, limit: int, ascending: bool = False
) -> tuple[list[T], bool]:
    """`limit` of `items` behind the id `after`, and whether there are more. Raises `RouteError` for an
    `after` that is not among them."""
    ordered = sorted(items, key=lambda item: (item.created_at, item.id), reverse=not ascending)
    begin = 0
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise RouteError(
                f"No object with the id '{after[:64]}' (parameter 'after') is in the list.",
                status=404,
                reason="not_found",
                param="after",
            )
        begin = place + 1
    return ordered[begin : begin + limit], len(ordered) > begin + limit


def shown(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def query(scope_query: bytes, known: Sequence[str]) -> dict[str, str]:
    """The query's parameters. Raises `InvalidParameter` for one that is unknown."""
    params = QueryParams(scope_query)
    for name in params:
        if name not in known:
            raise InvalidParameter(
                f"Unknown parameter: '{name[:64]}'.", param=name[:64], reason="unknown_parameter"
            )
    return dict(params)


def limit_of(params: dict[str, str], default: int, most: int) -> int:
    """The parameter `limit`. Raises `InvalidParameter`."""
    given = params.get("limit")
    if given is None:
        return default
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise InvalidParameter(
            "Invalid type for 'limit': expected an integer.", param="limit", reason="invalid_type"
        )
    check_range("limit", int(given), 1, most)
    return int(given)
