"""Checks of input files, states, tallies, room: without any I/O."""

import json

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches import states
from services.gateway.batches.line_runner import LEAST, UNKNOWN, backoff, room
from services.gateway.batches.lines import MAX_ERRORS, Checker
from services.gateway.batches.results import CompletionBitmap, failed, not_run, succeeded
from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.core.pagination import page
from services.gateway.files.lines import FileLine, LineSplitter
from shared.errors import InternalError
from shared.messages.batches import OVER, BatchJob, Counts, LineResult, TokenCounts

URL = "/v1/completions"


def model_of(body: msgspec.Raw) -> str:
    return str(json.loads(bytes(body))["model"])


def request(number: int) -> bytes:
    body = {"model": "m", "prompt": f"line {number}"}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body}).encode()


@pytest.mark.slow
def test_a_hundred_thousand_lines_take_little_memory() -> None:
    """200 MB of input; what is kept of it is a hash of each custom_id."""
    checker, splitter = Checker(URL, model_of, 200_000), LineSplitter(1 << 20)
    process, padding = psutil.Process(), b" " * 2000
    before = process.memory_info().rss
    for begin in range(0, 100_000, 50):
        part = b"".join(request(number) + padding + b"\n" for number in range(begin, begin + 50))
        for line in splitter.feed(part):
            checker.check(line)
    grown = process.memory_info().rss - before
    assert (checker.requests, checker.errors, checker.model) == (100_000, [], "m")
    assert grown < 32 << 20, f"{grown:,} bytes"


def test_findings_are_bounded() -> None:
    checker = Checker(URL, model_of, 1000)
    for number in range(MAX_ERRORS):
        assert not checker.full
        checker.check(FileLine(number + 1, b"{", ""))
    assert checker.full
    assert len(checker.errors) == MAX_ERRORS


def test_too_many_requests() -> None:
    checker = Checker(URL, model_of, 2)
    for number in range(3):
        checker.check(FileLine(number + 1, request(number), ""))
    assert checker.full
    assert [(error.code, error.line) for error in checker.errors] == [("too_many_requests", 3)]


@given(st.binary(max_size=60))
def test_any_line_is_a_request_or_a_finding(data: bytes) -> None:
    checker = Checker(URL, model_of, 10)
    checker.check(FileLine(1, data, ""))
    assert len(checker.errors) == 1


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=60))
def test_a_tally_counts_each_line_once(results: list[tuple[int, bool]]) -> None:
    tally, first = CompletionBitmap(), dict[int, bool]()
    for line, good in results:
        assert tally.add(LineResult(line, good, b"", TokenCounts(1, 2, 3))) == (line not in first)
        first.setdefault(line, good)
        assert line in tally
    good = sum(first.values())
    assert tally.counts(400) == Counts(400, good, len(first) - good)
    assert tally.usage == TokenCounts(len(first), 2 * len(first), 3 * len(first))
    assert [line for line in range(310) if line in tally] == sorted(first)


@given(st.integers(0, 5000), st.integers(1, 1000), st.integers(1, 20))
def test_room_is_shared_and_bounded(places: int, parallelism: int, batches: int) -> None:
    found = room(places, parallelism, batches)
    assert 1 <= found <= parallelism
    assert found >= min(LEAST, parallelism)
    assert found * batches >= min(places or UNKNOWN, parallelism)
    assert room(places, parallelism, batches + 1) <= found


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [backoff(tries) for tries in range(100)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.25, 60.0)


# --- states --------------------------------------------------------------------------------------


def job() -> BatchJob:
    return BatchJob("batch_1", "t", 1.0, URL, "file-1", "file-1", "24h", 100.0)


CHANGES = (
    lambda one: states.begun(one, 2.0, 5, "m"),
    lambda one: states.failed(one, 3.0, []),
    lambda one: states.finalizing(one, 4.0, "completed"),
    lambda one: states.finalizing(one, 4.0, "expired"),
    lambda one: states.input_gone(one, 5.0),
    lambda one: states.cancelling(one, 6.0) if one.status not in OVER else one,
)


@given(st.lists(st.sampled_from(CHANGES), max_size=8))
def test_no_change_leaves_the_states_way(changes: list) -> None:  # type: ignore[type-arg]
    after = {
        "validating": {"in_progress", "failed", "finalizing", "cancelling"},
        "in_progress": {"finalizing", "cancelling"},
        "finalizing": {"finalizing"},
        "cancelling": set(),
        "failed": set(),
    }
    one = job()
    for change in changes:
        changed = change(one)
        assert changed.status == one.status or changed.status in after[one.status]
        one = changed
    if one.status in ("finalizing", "cancelling"):
        done = states.ended(one, 9.0, counts=Counts(), usage=TokenCounts(), output="", errors="")
        assert done.status in OVER
        assert done.status == one.ending
        with pytest.raises(RouteError) if done.status != "cancelled" else pytest.MonkeyPatch.context():
            states.cancelling(done, 10.0)


def test_windows() -> None:
    for window, seconds in (("24h", 86_400), ("90m", 5_400), ("7d", 604_800), ("30s", 30)):
        assert states.window_seconds(window, 604_800) == seconds
    for wrong in ("", "24", "h", "-1h", "1.5h", "8d", "0s", "24H", "٢٤h"):
        with pytest.raises(InvalidParameter):
            states.window_seconds(wrong, 604_800)


# --- results and pages ---------------------------------------------------------------------------


def test_results_are_the_same_whoever_makes_them() -> None:
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}'
    one = succeeded("batch_1", 7, "c", body)
    assert one == succeeded("batch_1", 7, "c", body)
    assert one.usage == TokenCounts(3, 2, 4)
    assert json.loads(one.text)["response"]["body"] == json.loads(body)
    responses = b'{"usage":{"input_tokens":3,"output_tokens":4}}'
    assert succeeded("batch_1", 7, "c", responses).usage == TokenCounts(3, 0, 4)
    for odd in (b"{}", b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}', b'{"usage":[]}'):
        assert succeeded("b", 1, "c", odd).usage == TokenCounts()
    fault = json.loads(failed("b", 1, "c", InternalError("secret")).text)
    assert fault["response"]["status_code"] == 500
    assert "secret" not in json.dumps(fault)
    assert json.loads(not_run("b", 1, "c", {"code": "x"}).text)["response"] is None


@given(st.integers(0, 30), st.integers(1, 7), st.booleans())
def test_pages_show_everything_once(count: int, limit: int, ascending: bool) -> None:
    items = [
        msgspec.structs.replace(job(), id=f"b{number:02}", created_at=float(number % 5)) for number in range(count)
    ]
    found: list[str] = []
    after, more = None, True
    while more:
        some, more = page(items, after=after, limit=limit, ascending=ascending)
        assert len(some) <= limit
        found += [item.id for item in some]
        after = found[-1] if found else None
    assert sorted(found) == [item.id for item in items]
    times = [float(int(name[1:]) % 5) for name in found]
    assert times == sorted(times, reverse=not ascending)
    with pytest.raises(RouteError):
        page(items, after="unknown", limit=1)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (FileLine(1, b"", "too_long"), "line_too_long"),
        (FileLine(1, b"", "not_utf8"), "invalid_json_line"),
        (FileLine(1, b"{", ""), "invalid_json_line"),
        (FileLine(1, b"[]", ""), "invalid_json_line"),
        (FileLine(1, request(1).replace(b'"c1"', b'""'), ""), "invalid_custom_id"),
        (FileLine(1, request(1).replace(b"c1", b"c" * 513), ""), "invalid_custom_id"),
        (FileLine(1, request(1).replace(b"POST", b"GET"), ""), "invalid_method"),
        (FileLine(1, request(1).replace(b"completions", b"chats"), ""), "invalid_url"),
        (FileLine(1, request(1)[: request(1).index(b'{"model')] + b"1}", ""), "invalid_type"),
    ],
)
def test_a_line_that_is_no_request_is_a_finding(line: FileLine, code: str) -> None:
    checker = Checker(URL, model_of, 10)
    checker.check(line)
    assert [(error.line, error.code) for error in checker.errors] == [(1, code)]
