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


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


class Listed(_HasId, Protocol):
    @property
    def created_at(self) -> float: ...


T = TypeVar("T", bound=Listed)
IdT = TypeVar("IdT", bound=_HasId)


def page(items: Sequence[T], *, after: str | None, limit: int, ascending: bool = False) -> tuple[list[T], bool]:
    """`limit` of `items` behind the id `after`, and whether there are more. Raises `RouteError` for an
    `after` that is not among them."""
    ordered = sorted(items, key=lambda item: (item.created_at, item.id), reverse=not ascending)
    begin = 0 if after is None else _place(ordered, "after", after) + 1
    return ordered[begin : begin + limit], len(ordered) > begin + limit


class NeighbourQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The query of a list of Anthropic's."""

    after_id: Annotated[str, Meta(description="The id of the last entry that you have.")] | None = None
    before_id: Annotated[str, Meta(description="The id of the first entry that you have.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Entries of a page.")] = USUAL


def neighbours(items: Sequence[IdT], wanted: NeighbourQuery) -> tuple[Sequence[IdT], bool]:
    """Those of `items`, which are in order, behind `after_id` or right before `before_id`, and whether there are more
    in that direction. Raises `RouteError` where the id is none of theirs."""
    begin, end = 0, len(items)
    if wanted.after_id is not None:
        begin = _place(items, "after_id", wanted.after_id) + 1
    if wanted.before_id is not None:
        end = _place(items, "before_id", wanted.before_id)
    if wanted.before_id is not None and wanted.after_id is None:
        return items[max(0, end - wanted.limit) : end], end > wanted.limit
    return items[begin:end][: wanted.limit], end - begin > wanted.limit


def _place(items: Sequence[_HasId], param: str, given: str) -> int:
    """Of the item with the id `given`. Raises `RouteError`."""
    for index, item in enumerate(items):
        if item.id == given:
            return index
    raise RouteError(f"No object with the id '{given[:64]}' (parameter '{param}') is in the list.", param=param)


def list_object(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return shown_raw([(entry["id"], entry) for entry in data], has_more)


def shown_raw(entries: Sequence[tuple[str, msgspec.Raw | dict[str, Any]]], has_more: bool) -> dict[str, Any]:
    """The same of entries with their ids, which may be JSON already."""
    return {
        "object": "list",
        "data": [entry for _, entry in entries],
        "first_id": entries[0][0] if entries else None,
        "last_id": entries[-1][0] if entries else None,
        "has_more": has_more,
    }
