"""Which models a gateway makes ready for: those that are served, not all that ever were."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.catalog import STALE, Catalog, ModelNotLoaded
from services.gateway.core.registry import ModelRegistry
from shared.config import CommonSettings
from shared.errors import UnknownModel
from shared.messages import (
    EngineTraits,
    GroupLoad,
    GroupRecord,
    GroupStatus,
    GroupTraits,
    ModelCard,
    ModelPlacement,
    ModelSpec,
)

NOW = 1_800_000_000.0


def catalog(told: list[str]) -> Catalog:
    bus = cast(Any, SimpleNamespace(settings=CommonSettings()))
    return Catalog(
        bus,
        ModelRegistry(bus),
        AdapterRegistry(bus, 1.0),
        on_card=lambda card: told.append(f"{card.model} {card.created}"),
        clock=lambda: NOW,
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


def test_kinds_of_sparse_attention_are_those_of_its_groups() -> None:
    known = catalog([])
    known._card_changed("m", msgspec.structs.replace(card("m"), sparse=["window"]))
    assert known.sparse_kinds("m") == (["window"], ["window"]), "as the card has it"
    assert known.sparse_kinds("other") == ([], [])

    def tell(name: str, state: GroupStatus, kinds: list[Any] | None, model: str = "m") -> None:
        traits = None if kinds is None else GroupTraits(kinds)
        record = msgspec.structs.replace(group(model, state), group=name, traits=traits)
        known._group_changed(name, record, Nobody())

    tell("a", "ready", ["pages", "window"])
    assert known.sparse_kinds("m") == (["pages", "window"], ["pages", "window"])
    tell("b", "ready", ["window"])
    assert known.sparse_kinds("m") == (["pages", "window"], ["window"])
    tell("c", "busy", None)
    assert known.sparse_kinds("m") == (["pages", "window"], []), "an earlier version computes none"
    known._group_changed("c", None, Nobody())
    tell("a", "starting", None)
    assert known.sparse_kinds("m") == (["pages", "window"], ["window"]), "it is what it was until it has said more"
    tell("a", "ready", None)
    assert known.sparse_kinds("m") == (["window"], [])
    tell("a", "ready", ["pages"], model="other")
    assert (known.sparse_kinds("m").some, known.sparse_kinds("other").some) == (["window"], ["pages"])
    known._group_changed("b", None, Nobody())
    assert known.sparse_kinds("m") == (["window"], ["window"]), "as the card has it"


def test_kinds_of_a_group_that_is_heard_again() -> None:
    known = catalog([])
    record = msgspec.structs.replace(group("m", "ready"), traits=GroupTraits(["window"]), heard_at=NOW - 60)
    known._group_changed("g", record, Nobody())
    assert known.sparse_kinds("m") == ([], []), "it is of an earlier start"
    known._group_changed("g", msgspec.structs.replace(record, heard_at=NOW), Nobody())
    assert known.sparse_kinds("m") == (["window"], ["window"])


def test_what_an_engine_cannot_is_what_its_card_says_and_all_of_its_groups() -> None:
    """Where groups differ the leaders refuse: the gateway does not know which group will take a request."""
    known = catalog([])
    engine = EngineTraits("vllm", "vLLM 1", ["adapter", "grammar"])
    of_engine, of_ring = msgspec.structs.replace(card("m"), engine=engine), card("m")

    def tell(name: str, state: GroupStatus, traits: GroupTraits | None) -> list[str]:
        record = msgspec.structs.replace(group("m", state), group=name, traits=traits)
        known._group_changed(name, record, Nobody())
        return cannot()

    def cannot() -> list[str]:
        return known.of_request("m", known.cards["m"], "")[0].engine.unsupported

    known._card_changed("m", of_engine)
    assert cannot() == ["adapter", "grammar"], "requests may wait for its groups"
    assert tell("a", "ready", None) == ["adapter", "grammar"], "an earlier monitor tells nothing"
    assert tell("a", "ready", GroupTraits(engine=engine)) == ["adapter", "grammar"]
    assert tell("b", "ready", GroupTraits(engine=EngineTraits("vllm", "vLLM 2", ["adapter"]))) == ["adapter"]
    assert tell("c", "busy", GroupTraits(engine=EngineTraits("ring"))) == []
    assert tell("c", "gone", GroupTraits(engine=EngineTraits("ring"))) == ["adapter"]
    known._card_changed("m", of_ring)
    assert cannot() == []


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


def registered(known: Catalog, *specs: ModelSpec) -> None:
    for spec in specs:
        known.registry.spec_changed(spec.name, spec, 1)


def refused(known: Catalog, name: str) -> str:
    with pytest.raises(UnknownModel) as error:
        known.resolve(name)
    return error.value.message


def test_a_model_of_the_last_start_is_neither_listed_nor_accepted() -> None:
    """Another model was served over the same data directory, and its stack was killed: its card is there, and the
    record of its group says that it is ready."""
    known = catalog([])
    known._card_changed("old", card("old"))
    dead = msgspec.structs.replace(group("old", "ready"), heard_at=NOW - STALE - 1)
    known._group_changed("g", dead, Nobody())
    known._caught_up[1].set()
    registered(known, ModelSpec("new", "hub/new"))
    assert "the models are: new." in refused(known, "old")
    assert (known.names(), known.listed()) == (["new"], [])
    known._card_changed("new", card("new"))
    known._group_changed("g", msgspec.structs.replace(group("new", "ready"), heard_at=NOW), Nobody())
    assert [one.model for one in known.listed()] == ["new"]
    refused(known, "old")


def test_without_a_registry_a_card_alone_is_accepted_while_no_group_is_there() -> None:
    known = catalog([])
    known._card_changed("old", card("old"))
    assert known.resolve("old").model == "old"
    known._group_changed("g", group("new", "starting"), Nobody())
    refused(known, "old")
    known._group_changed("h", group("old", "gone"), Nobody())  # it may come back
    assert known.resolve("old").model == "old"


def test_a_registered_model_is_there_before_it_is_loaded_and_by_its_aliases() -> None:
    known = catalog([])
    registered(known, ModelSpec("m", "hub/m", aliases=["gpt-4", "a/b"]))
    assert [known.resolve(name).model for name in ("m", "gpt-4", "a/b")] == ["m"] * 3
    assert (known.names(), known.listed()) == (["m"], [])
    with pytest.raises(ModelNotLoaded):
        known.card("gpt-4")
    known._card_changed("m", card("m"))
    assert known.card("gpt-4").model == "m"
    known.registry.spec_changed("m", None, 0)
    refused(known, "gpt-4")
    refused(catalog([]), "nothing")


def test_a_card_of_another_model_of_that_name_counts_only_while_a_group_serves_it() -> None:
    known = catalog([])
    known._card_changed("m", card("m", created=5))
    registered(known, ModelSpec("m", "hub/other", created=6))
    assert known.known_card("m") is None
    known._group_changed("g", group("m", "ready"), Nobody())
    assert known.known_card("m") == card("m", created=5)


def test_a_removed_model_is_served_until_its_groups_are_gone() -> None:
    known = catalog([])
    registered(known, ModelSpec("m", "hub/m"), ModelSpec("n", "hub/n"))
    known._card_changed("m", card("m"))
    known._group_changed("g", group("m", "ready"), Nobody())
    known.registry.spec_changed("m", None, 0)
    known._group_changed("g", group("m", "draining"), Nobody())
    assert known.resolve("m").model == "m"
    known._group_changed("g", group("m", "gone"), Nobody())
    refused(known, "m")
    assert known.names() == ["n"]
    known.registry.spec_changed("n", None, 0)  # the last one, and a record of the other's group is still there
    refused(known, "m")
    known._group_changed("g", group("m", "ready"), Nobody())  # an executor was started with it
    assert known.resolve("m").model == "m"


def test_what_a_host_had_been_told_to_load_does_not_come_back_by_itself() -> None:
    known = catalog([])
    known._card_changed("m", card("m"))
    gone = msgspec.structs.replace(group("m", "gone"), group="h1/m", instance="h1")
    known._group_changed("h1/m", gone, Nobody())
    known._group_changed("h", group("other", "ready"), Nobody())
    refused(known, "m")


def test_a_refusal_names_the_nearest_of_many_models() -> None:
    known = catalog([])
    registered(known, *(ModelSpec(f"model-{index:03}", "hub/m") for index in range(100)))
    said = refused(known, "model-042b")
    assert "model-042" in said
    assert "more (GET /v1/models)" in said
    assert "16 more" not in refused(known, "zzz")


def test_the_expected_time_is_that_of_the_scheduler_that_decides() -> None:
    known = catalog([])
    registered(known, ModelSpec("m", "hub/m"))
    assert known.expected_seconds("m") == 0
    known.registry.placements["m"] = ModelPlacement("m", expected_at=NOW + 7, reason="Because.")
    assert (known.expected_seconds("m"), known.status("m").reason) == (7, "Because.")
    assert known.statuses()["m"] == known.status("m")
    known._group_changed("g", group("m", "ready"), Nobody())
    assert (known.expected_seconds("m"), known.status("m").state) == (0, "loaded")
