"""Rights on NATS as a table: who owns something is the only one to write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.nats import subjects
from shared.nats.permissions import USERS, User, inbox_of, matches, rights

OWNERS: dict[str, set[User]] = {
    subjects.GROUPS_BUCKET: {"health-monitor"},
    subjects.SERVICES_BUCKET: {"health-monitor"},
    subjects.MODELS_BUCKET: {"executor"},
    subjects.SESSIONS_BUCKET: {"scheduler", "executor"},
    subjects.KEYS_BUCKET: {"operator"},
    subjects.OLD_KEYS_BUCKET: set(),
    subjects.GENERATIONS_BUCKET: {"gateway"},
    subjects.UNFINISHED_BUCKET: {"gateway"},
    subjects.INHERITANCES_BUCKET: {"gateway"},
    subjects.IDEMPOTENCY_BUCKET: {"gateway"},
    subjects.LIMITS_BUCKET: {"gateway"},
    subjects.RECORDS_BUCKET: {"gateway"},
    subjects.RESPONSES_BUCKET: {"gateway"},
    subjects.CHATS_BUCKET: {"gateway"},
    subjects.CONVERSATIONS_BUCKET: {"gateway"},
    subjects.BATCHES_BUCKET: {"gateway"},
    subjects.FILES_BUCKET: {"gateway"},
    subjects.REGISTRY_BUCKET: {"gateway", "operator"},
    subjects.ADAPTERS_BUCKET: {"gateway", "operator", "scheduler"},
    subjects.ADAPTER_FILES_BUCKET: {"gateway", "executor"},
    subjects.HOSTS_BUCKET: {"health-monitor"},
    subjects.LEASES_BUCKET: {"scheduler"},
    subjects.PLACEMENTS_BUCKET: {"scheduler"},
    subjects.TRAINING_BUCKET: {"gateway", "scheduler", "executor"},
    subjects.TRAINING_EVENTS_BUCKET: {"gateway", "scheduler", "executor"},
}
token = st.text("ab", min_size=1, max_size=2)
subject = st.lists(token, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize("bucket", sorted(OWNERS))
def test_a_bucket_is_written_by_its_owner_alone(bucket: str) -> None:
    writers = {user for user in USERS if rights(user).may("publish", f"$KV.{bucket}.key")}
    assert writers == OWNERS[bucket]


def test_every_bucket_has_an_owner_here() -> None:
    named = {value for name, value in vars(subjects).items() if name.endswith("_BUCKET")}
    assert named == set(OWNERS)


@pytest.mark.parametrize("user", USERS)
def test_nobody_hears_anothers_answers_or_destroys_a_stream(user: User) -> None:
    given = rights(user)
    for other in (*USERS, "someone"):
        assert given.may("subscribe", f"{inbox_of(other)}.x.y") == (other == user)
    for stream in (subjects.INTAKE_STREAM, subjects.JOURNAL_STREAM, "KV_api_keys", "KV_groups"):
        for act in ("DELETE", "PURGE", "RESTORE", "SNAPSHOT", "LEADER.STEPDOWN"):
            assert not given.may("publish", f"$JS.API.STREAM.{act}.{stream}")
    assert not any(given.may("publish", f"$KV.{bucket}.>") for bucket in OWNERS if user not in OWNERS[bucket])
    for everything in (">", "$JS.>", "$JS.API.>", "$KV.>", "_INBOX.>", "$SYS.>"):
        assert not given.may("publish", everything)
        assert not given.may("subscribe", everything)


def test_executors_alone_speak_of_hand_overs_and_command_nobody() -> None:
    for action in ("publish", "subscribe"):
        may = {user for user in USERS if rights(user).may(action, subjects.handover("g"))}
        assert may == {"executor"}
    assert not rights("executor").may("publish", subjects.control("g"))
    assert rights("executor").may("publish", f"{inbox_of('executor')}.x.y"), "they answer each other"


@given(subject)
def test_subjects_match_themselves_and_everything(one: str) -> None:
    assert matches(one, one)
    assert matches(">", one)
    assert matches(".".join("*" for _ in one.split(".")), one)
    assert not matches(one + ".>", one)
    assert matches(one + ".>", one + ".x.y")
    assert not matches(one + ".*", one + ".x.y")
    assert not matches(one, one + ".x")


@given(subject, subject)
def test_different_subjects_do_not_match(one: str, other: str) -> None:
    assert matches(one, other) == (one == other)


def test_a_pattern_is_matched_by_narrower_ones_alone() -> None:
    assert matches("a.>", "a.*")
    assert matches("a.*", "a.*")
    assert not matches("a.*", "a.>")
    assert not matches("a.b", "a.*")
