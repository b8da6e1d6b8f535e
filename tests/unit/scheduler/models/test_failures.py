"""Loads that failed: where they are tried again and when, and what is forgotten."""

import msgspec

from services.scheduler.models.failures import (
    FIRST_PAUSE,
    FORGOTTEN_AFTER,
    FORGOTTEN_SOON,
    MOST_TRIES,
    NO_ROOM_PAUSE,
    NO_ROOM_TRIES,
    Failures,
)
from tests.unit.scheduler.models.hosts import spec

SPECS = {"a": spec("a"), "b": spec("b")}
HOSTS = {"h1", "h2"}


def test_a_failure_is_news_once_and_its_pause_doubles_until_it_is_not_tried_any_more() -> None:
    failures = Failures()
    now = 1000.0
    pauses = []
    for times in range(MOST_TRIES):
        assert failures.on_failure("a", "h1", 10.0 + times, "It is broken.", now)
        assert not failures.on_failure("a", "h1", 10.0 + times, "It is broken.", now)
        (failure,) = failures.of("a")
        pauses.append(failure.until - now)
        assert failures.blocked("a", now) == {"h1"}
        now = failure.until
        assert failures.blocked("a", now) == set()
    assert pauses == [FIRST_PAUSE * 2**times for times in range(MOST_TRIES - 1)] + [FORGOTTEN_AFTER]
    failures.succeeded("a", "h1")
    assert not list(failures.of("a"))


def test_a_refusal_for_want_of_memory_is_short_and_a_failure_only_after_several() -> None:
    failures = Failures()
    assert failures.told_no_room("a", "h1", 5.0, "There is no room.", 100.0)
    assert not failures.told_no_room("a", "h1", 5.0, "There is no room.", 100.0), "it is known"
    assert failures.blocked("a", 100.0) == {"h1"}
    assert failures.blocked("a", 100.0 + NO_ROOM_PAUSE) == set()
    assert failures.blocked("b", 100.0) == set()
    for _ in range(NO_ROOM_TRIES - 1):
        assert not list(failures.of("a"))
        failures.no_room("a", "h1", "There is no room.", 100.0)
    assert [failure.host for failure in failures.of("a")] == ["h1"]


def test_models_and_hosts_that_are_gone_are_forgotten() -> None:
    failures = Failures()
    for model in ("a", "b"):
        failures.failed(model, "h1", "It is broken.", 100.0)
        failures.failed(model, "h2", "It is broken.", 100.0)
        failures.told_no_room(model, "h1", 5.0, "There is no room.", 100.0)
    failures.keep(SPECS, HOSTS, 100.0)
    assert failures.blocked("a", 100.0) == HOSTS
    failures.keep(SPECS, {"h2"}, 100.0)
    assert [failure.host for failure in failures.of("a")] == ["h2"]
    assert failures.told_no_room("a", "h1", 5.0, "There is no room.", 100.0), "that of another host by its name"
    failures.keep({"b": SPECS["b"]}, {"h2"}, 101.0)
    assert not list(failures.of("a"))
    failures.keep({}, {"h2"}, 100.0 + NO_ROOM_PAUSE + FORGOTTEN_SOON)
    assert failures.blocked("a", 0.0) == set(), "nothing is left of it"


def test_a_model_that_was_changed_or_asked_for_by_name_is_tried_again_at_once() -> None:
    failures = Failures()
    failures.failed("a", "h1", "It is broken.", 100.0)
    failures.keep(SPECS, HOSTS, 100.0)
    assert failures.blocked("a", 101.0) == {"h1"}
    failures.keep({"a": msgspec.structs.replace(SPECS["a"], pinned=True)}, HOSTS, 101.0)
    assert failures.blocked("a", 101.0) == {"h1"}, "it is no other model"
    failures.keep({"a": msgspec.structs.replace(SPECS["a"], revision="v2")}, HOSTS, 101.0)
    assert failures.blocked("a", 101.0) == set()
