"""Pages of a list: the newest first, and behind an id, as OpenAI has them; or before one, as Anthropic. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.core.errors import RouteError

USUAL, MOST = 20, 100  # entries of a page, where nothing else is said, as OpenAI has it
Order = Annotated[Literal["asc", "desc"], Meta(description="By time.")]


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The query of a list; some lists take more."""

    after: Annotated[str, Meta(description="The id of the last entry that you have.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST, description="Entries of a page.")] = USUAL


class ListPage(msgspec.Struct, kw_only=True):
    """OpenAI's list object, but for its `data`."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Listed(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> float: ...


T = TypeVar("T", bound=Listed)


def page(items: Sequence[T], *, after: str | None, limit: int, ascending: bool = False) -> tuple[list[T], bool]:
    """`limit` of `items` behind the id `after`, and whether there are more. Raises `RouteError` for an
    `after` that is not among them."""
    ordered = sorted(items, key=lambda item: (item.created_at, item.id), reverse=not ascending)
    begin = 0
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise RouteError(f"No object with the id '{after[:64]}' (parameter 'after') is in the list.", param="after")
        begin = place + 1
    return ordered[begin : begin + limit], len(ordered) > begin + limit


class NeighbourQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The query of a list of Anthropic's."""

    after_id: Annotated[str, Meta(description="The id of the last entry that you have.")] | None = None
    before_id: Annotated[str, Meta(description="The id of the first entry that you have.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Entries of a page.")] = USUAL


IdT = TypeVar("IdT", bound="_HasId")


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


def neighbours(items: Sequence[IdT], wanted: NeighbourQuery) -> tuple[Sequence[IdT], bool]:
    """Those of `items`, which are in order, behind `after_id` or right before `before_id`, and whether there are more
    in that direction. Raises `RouteError` where the id is none of theirs."""
    begin, end = 0, len(items)
    for name, given in (("after_id", wanted.after_id), ("before_id", wanted.before_id)):
        if given is None:
            continue
        place = next((index for index, item in enumerate(items) if item.id == given), None)
        if place is None:
            raise RouteError(f"No object with the id '{given[:64]}' (parameter '{name}') is in the list.", param=name)
        begin, end = (place + 1, end) if name == "after_id" else (begin, place)
    if wanted.before_id is not None and wanted.after_id is None:
        return items[max(0, end - wanted.limit) : end], end > wanted.limit
    return items[begin:end][: wanted.limit], end - begin > wanted.limit


def list_object(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def shown_raw(entries: Sequence[tuple[str, msgspec.Raw]], has_more: bool) -> dict[str, Any]:
    """The same of entries that are JSON already, with their ids."""
    return {
        "object": "list",
        "data": [entry for _, entry in entries],
        "first_id": entries[0][0] if entries else None,
        "last_id": entries[-1][0] if entries else None,
        "has_more": has_more,
    }
