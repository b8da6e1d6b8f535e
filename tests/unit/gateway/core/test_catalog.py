"""Which models a gateway makes ready for: those that are served, not all that ever were."""

from typing import Any, cast

from services.gateway.core.catalog import Catalog
from shared.messages import GroupLoad, GroupRecord, GroupStatus, ModelCard


def catalog(told: list[str]) -> Catalog:
    return Catalog(
        cast(Any, None),
        on_card=lambda card: told.append(f"{card.model} {card.created}"),
    )


class Nobody:
    def on_group_lost(self, group: str, epoch: int, model: str, at: float = 0.0) -> None:
        """Is told for nothing."""

    def on_group_alive(self, group: str, epoch: int, at: float = 0.0) -> None:
        """The same."""


def card(model: str, created: int = 1) -> ModelCard:
    return ModelCard(model, 100, 256, [0], tokenizer="t", created=created)


def group(model: str, state: GroupStatus) -> GroupRecord:
    return GroupRecord("g", model, state, 1, [], cast(Any, GroupLoad()))


def test_a_card_is_told_once_it_has_a_group_and_again_when_it_changes() -> None:
    told: list[str] = []
    known = catalog(told)
    known._card_changed("old", card("old"))
    known._card_changed("new", card("new"))
    known._group_changed("g", group("new", "gone"), Nobody())
    assert told == []
    for state in ("starting", "ready", "busy"):
        known._group_changed("g", group("new", cast(GroupStatus, state)), Nobody())
    assert told == ["new 1"]
    known._card_changed("new", card("new", 2))
    assert told == ["new 1", "new 2"]


def test_the_group_may_be_known_first() -> None:
    told: list[str] = []
    known = catalog(told)
    known._group_changed("g", group("m", "starting"), Nobody())
    known._card_changed("m", card("m"))
    assert told == ["m 1"]
    known._card_changed("m", None)
    known._card_changed("m", card("m", 2))
    assert told == ["m 1", "m 2"]


def test_a_change_of_what_is_listed_is_told_and_news_of_the_load_is_not() -> None:
    known = catalog([])

    def told() -> bool:
        before = known.changed.is_set()
        known.changed.clear()
        return before

    known._card_changed("m", card("m"))
    assert told()
    for state, changes in (("starting", True), ("ready", True), ("ready", False), ("gone", True)):
        known._group_changed("g", group("m", state), Nobody())  # type: ignore[arg-type]
        assert told() is changes
    known._group_changed("g", None, Nobody())
    assert told()


def test_what_is_listed_has_been_up_since_this_gateway_started() -> None:
    known = catalog([])
    known._card_changed("old", card("old"))
    assert [one.model for one in known.listed()] == ["old"]  # nothing is known of groups
    known._group_changed("ring-1", group("old", "gone"), Nobody())
    assert known.listed() == []
    known._group_changed("ring-1", group("new", "starting"), Nobody())
    known._card_changed("new", card("new"))
    assert known.listed() == []
    known._group_changed("ring-1", group("new", "ready"), Nobody())
    for state in ("starting", "hung", "gone"):
        known._group_changed("ring-1", group("new", state), Nobody())  # type: ignore[arg-type]
        assert [one.model for one in known.listed()] == ["new"]
