"""The journal's messages to figures: one request after the other, and against a count made another way."""

from itertools import accumulate
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.journal import LATE, PATIENCE, Ledger
from services.cli.sla.periods import Interval
from services.cli.sla.report import ReportScope
from services.gateway.lifecycle.records import outline_of
from shared.messages import FinishReason, GenerationRequest, TokenEntry, TokenFrame
from shared.messages.records import GenerationRecord

PERIOD = Interval(1000.0, 2000.0)
SILENCE = 10.0


def record(name: str, at: float, **changes: object) -> GenerationRecord:
    lane = changes.pop("lane", "interactive")
    model = changes.pop("model", "m")
    request = GenerationRequest(f"{name}-0", "r", model, "c", [1, 2, 3], 16, lane=lane)  # type: ignore[arg-type]
    return GenerationRecord(name, "chat.completions", at, [request], **changes)  # type: ignore[arg-type]


def entry(
    name: str,
    position: int,
    count: int,
    finish: FinishReason = "",
    *,
    attempt: int = 0,
    code: str = "",
    retryable: bool = False,
    vector: bytes = b"",
) -> TokenEntry:
    number = name if "-" in name else f"{name}-0"
    return TokenEntry(
        number, attempt, position, [7] * count, finish, error_code=code, retryable=retryable, vector=vector
    )


class Journal:
    """A ledger, written shortly."""

    def __init__(self, silence: float = SILENCE) -> None:
        self.ledger = Ledger(PERIOD, silence=silence)

    def begins(self, name: str, at: float, **changes: object) -> "Journal":
        self.ledger.on_records(at, [record(name, at, **changes)])
        return self

    def says(self, at: float, *entries: TokenEntry, group: str = "g") -> "Journal":
        self.ledger.on_frame(at, TokenFrame(group, 1, 1, list(entries)))
        return self

    def all(self, until: float = PERIOD.end) -> ReportScope:
        return self.ledger.scopes(Interval(PERIOD.begin, until))[0]


def test_a_request_is_counted_with_its_times() -> None:
    whole = (
        Journal()
        .begins("a", 1100)
        .says(1100.5, entry("a", 0, 2))
        .says(1100.7, entry("a", 2, 1))
        .says(1101.0, entry("a", 3, 0, "stop"))
        .all()
    )
    assert (whole.requests.completed, whole.error_rate, whole.availability) == (1, 0.0, 1.0)
    assert (whole.first_token.count, whole.between_tokens.count, whole.end_to_end.count) == (1, 1, 1)
    for found, exact in ((whole.first_token, 0.5), (whole.between_tokens, 0.2), (whole.end_to_end, 1.0)):
        assert abs(found.p50.value / exact - 1) < 0.01
    assert (whole.tokens.prompt, whole.tokens.output) == (3, 3)


def test_a_request_that_lies_beside_the_journal_is_counted_by_its_outline() -> None:
    journal = Journal().says(1100.5, entry("a", 0, 2, "stop"))
    journal.ledger.on_records(1100.6, [outline_of(record("a", 1100.0), 1)])
    whole = journal.all()
    assert (whole.requests.completed, whole.tokens.prompt, whole.tokens.output) == (1, 3, 2)


def test_entries_may_come_before_their_record() -> None:
    journal = Journal().says(1100.5, entry("a", 0, 2))
    journal.ledger.on_records(1100.6, [record("a", 1100.0)])
    whole = journal.says(1100.7, entry("a", 2, 1, "length")).all()
    assert whole.requests.completed == 1
    assert abs(whole.first_token.p50.value / 0.5 - 1) < 0.01


def test_what_failed_is_told_from_what_clients_did() -> None:
    journal = Journal()
    ends = {
        "a": entry("a", 0, 0, "error", code="deadline_exceeded"),
        "b": entry("b", 0, 0, "error", code="no_group_available"),
        "c": entry("c", 0, 0, "error", code="invalid_grammar"),
        "d": entry("d", 0, 0, "error", code="queue_full"),
        "e": entry("e", 0, 2, "cancelled"),
        "f": entry("f", 0, 2, "stop"),
        "g": entry("g", 0, 0, "error", code="rate_limit_exceeded"),
        "h": entry("h", 0, 1, "error", code="of another version"),
    }
    for name, end in ends.items():
        journal.begins(name, 1100).says(1101, end)
    requests = journal.all().requests
    assert (requests.completed, requests.failed, requests.refused, requests.cancelled) == (1, 3, 3, 1)
    assert requests.error_rate == 3 / 4


def test_a_text_that_a_stop_string_ended_is_complete() -> None:
    journal = (
        Journal()
        .begins("a", 1100, stop=["\n"])
        .says(1101, entry("a", 0, 4))
        .says(1101.1, entry("a", 4, 0, "cancelled"))
    )
    assert journal.all().requests.completed == 1


def test_an_error_that_another_ring_makes_good_is_none() -> None:
    journal = Journal().begins("a", 1100).says(1101, entry("a", 0, 2))
    journal.says(1102, entry("a", 2, 0, "error", code="ring_lost", retryable=True))
    journal.says(1101.5, entry("a", 2, 9))  # late, of the same attempt: positions decide
    journal.says(1104, entry("a", 2, 1, attempt=1))
    journal.says(1104.5, entry("a", 2, 5))  # the older attempt is fenced
    whole = journal.says(1105, entry("a", 11, 1, "stop", attempt=1)).all()
    assert (whole.requests.completed, whole.requests.failed) == (1, 0)
    assert whole.tokens.output == 12


def test_a_failover_is_counted_with_its_interruption() -> None:
    journal = Journal().begins("a", 1100).says(1101, entry("a", 0, 2))
    whole = journal.says(1104, entry("a", 2, 2, "stop", attempt=1)).all()
    assert whole.failovers.count == 1
    assert abs(whole.failovers.interruption.p50.value / 3 - 1) < 0.01


def test_the_same_error_without_a_group_is_the_end() -> None:
    end = entry("a", 0, 0, "error", code="unavailable", retryable=True)
    assert Journal().begins("a", 1100).says(1101, end, group="").all().requests.failed == 1


def test_all_choices_must_have_ended() -> None:
    journal = Journal().begins("a", 1100, choices=2).says(1101, entry("a-0", 0, 2, "stop"))
    assert journal.all(1102).requests.completed == 0
    assert journal.ledger.under_way == 1
    failed = journal.says(1103, entry("a-1", 0, 0, "error", code="internal_error")).all()
    assert (failed.requests.completed, failed.requests.failed) == (0, 1)


def test_a_vector_is_a_first_token() -> None:
    whole = Journal().begins("a", 1100).says(1100.5, entry("a", 0, 0, "stop", vector=b"1234")).all()
    assert (whole.requests.completed, whole.first_token.count) == (1, 1)


def test_only_what_happened_in_the_period_counts() -> None:
    journal = Journal().begins("a", 990).says(999, entry("a", 0, 1)).says(1001, entry("a", 1, 1, "stop"))
    journal.begins("b", 991).says(995, entry("b", 0, 1, "stop"))
    whole = journal.all()
    assert (whole.requests.completed, whole.first_token.count, whole.between_tokens.count) == (1, 0, 1)


def test_a_model_that_is_waited_for_and_says_nothing_is_down() -> None:
    journal = Journal().begins("a", 1100).says(1101, entry("a", 0, 1)).begins("b", 1105)
    whole = journal.says(1131, entry("a", 1, 1, "stop")).says(1131.5, entry("b", 0, 1, "stop")).all()
    assert [(one.begin, one.end, one.reasons) for one in whole.outages] == [(1101, 1131, ["silent"])]
    assert (whole.downtime, whole.repaired, whole.mttr) == (30, 1, 30)
    assert whole.availability == 1 - 30 / 1000


def test_idle_time_is_none_of_it() -> None:
    journal = Journal().begins("a", 1100).says(1101, entry("a", 0, 1, "stop"))
    journal.begins("b", 1500).says(1509, entry("b", 0, 1, "stop"))
    assert journal.all().outages == []


def test_one_model_does_not_speak_for_another() -> None:
    journal = Journal().begins("a", 1100)
    for at in range(1100, 1150):
        journal.begins(f"b{at}", at, model="n").says(at + 0.5, entry(f"b{at}", 0, 1, "stop"))
    journal.says(1150, entry("a", 0, 1, "stop"))
    scopes = {scope.model: scope for scope in journal.ledger.scopes(PERIOD)}
    assert scopes["m"].downtime == scopes[""].downtime == 50
    assert scopes["n"].downtime == 0
    assert scopes[""].requests.completed == 51


def test_an_outage_that_goes_on_is_not_repaired() -> None:
    whole = Journal().begins("a", 1100).all(1150)
    assert [(one.begin, one.end, one.ongoing) for one in whole.outages] == [(1100, 1150, True)]
    assert (whole.repaired, whole.mttr) == (0, None)


def test_failures_in_a_row_are_an_outage_until_a_success() -> None:
    journal = Journal()
    for at in (1100, 1102, 1104):
        journal.begins(f"a{at}", at).says(at + 1, entry(f"a{at}", 0, 0, "error", code="unavailable"))
    journal.begins("b", 1110).says(1111, entry("b", 0, 1, "stop"))
    for at in (1200, 1202):  # two are not enough
        journal.begins(f"c{at}", at).says(at + 1, entry(f"c{at}", 0, 0, "error", code="unavailable"))
    journal.begins("d", 1210).says(1211, entry("d", 0, 1, "stop"))
    assert [(one.begin, one.end, one.reasons) for one in journal.all().outages] == [(1101, 1111, ["failing"])]


def test_a_request_without_an_end_has_failed() -> None:
    journal = Journal(silence=1e9).begins("a", 1100).says(1101, entry("a", 0, 1))
    assert journal.all(1101 + PATIENCE).requests.failed == 1
    assert journal.ledger.under_way == 0


def test_lines_of_batches_wait_without_harm() -> None:
    journal = Journal().begins("a", 1000, lane="batch").begins("b", 1700).says(1700.5, entry("b", 0, 1, "stop"))
    whole = journal.says(1900, entry("a", 0, 3, "stop")).all()
    assert (whole.requests.completed, whole.requests.failed, whole.requests.batch_lines) == (1, 0, 1)
    assert (whole.first_token.count, whole.outages) == (1, [])
    assert whole.tokens.output == 4


def test_what_is_said_behind_the_end_is_nothing_new() -> None:
    journal = Journal().begins("a", 1100).says(1101, entry("a", 0, 1, "stop"))
    journal.says(1101 + LATE / 2, entry("a", 1, 1, "stop", attempt=1), group="other").begins("a", 1102)
    assert (journal.all().requests.completed, journal.all().requests.failed) == (1, 0)
    assert journal.ledger.without_record == 0


def test_tokens_whose_record_is_lost_are_told_apart() -> None:
    journal = Journal().says(1001, entry("a", 5, 1)).says(1002, entry("a", 6, 0, "stop"))
    assert journal.all().requests.completed == 0
    assert journal.ledger.without_record == 1


# --- against another count -----------------------------------------------------------------------


class Life(NamedTuple):
    """A request that begins then, says a token after each of these gaps, and ends with the last."""

    begin: int
    gaps: list[int]
    end: FinishReason

    @property
    def words(self) -> list[int]:
        return list(accumulate(self.gaps, initial=self.begin))[1:]


gaps = st.lists(st.integers(1, 30), min_size=1, max_size=4)
ends = st.sampled_from(("stop", "error", "cancelled"))
lives = st.lists(st.builds(Life, st.integers(1000, 1100), gaps, ends), min_size=1, max_size=6)


def told(given: list[Life]) -> ReportScope:
    """By the journal's messages, in the order of their time."""
    journal = Journal()
    events = [(life.begin, number, -1) for number, life in enumerate(given)]
    events += [(at, number, index) for number, life in enumerate(given) for index, at in enumerate(life.words)]
    for at, number, index in sorted(events):
        life, name = given[number], f"r{number}"
        if index < 0:
            journal.begins(name, at)
            continue
        finish: FinishReason = life.end if index == len(life.gaps) - 1 else ""
        code = "unavailable" if finish == "error" else ""
        journal.says(at, entry(name, index, 1, finish, code=code))
    return journal.all(1999)


def silent_seconds(given: list[Life]) -> set[int]:
    """Second by second: waited in vain, in a stretch of at least SILENCE seconds."""
    news = {at for life in given for at in life.words}
    found: set[int] = set()
    stretch: list[int] = []
    for second in range(1000, 1300):
        waited = any(life.begin <= second < life.words[-1] for life in given)
        if second in news or not waited:
            found |= set(stretch if len(stretch) >= SILENCE else [])
            stretch = []
        if waited:
            stretch.append(second)
    return found


@given(lives)
def test_downtime_is_every_second_of_a_long_wait_in_vain(given: list[Life]) -> None:
    whole = told(given)
    silent = {
        second
        for outage in whole.outages
        if "silent" in outage.reasons
        for second in range(int(outage.begin), int(outage.end))
    }
    if any("failing" in outage.reasons for outage in whole.outages):
        assert silent_seconds(given) <= silent
    else:
        assert silent_seconds(given) == silent
    requests, how = whole.requests, [life.end for life in given]
    assert requests.completed == how.count("stop")
    assert requests.failed == how.count("error")
    assert requests.cancelled == how.count("cancelled")
    assert whole.tokens.output == sum(len(life.gaps) for life in given)
