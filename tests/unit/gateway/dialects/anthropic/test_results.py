"""Message batches over batches of lines: their states, counts and results in Anthropic's shape."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.batches.results import EXPIRED, failed, not_run, succeeded
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.pagination import NeighbourQuery, neighbours
from services.gateway.dialects.anthropic import results
from shared.errors import QueueFull
from shared.messages.batches import BatchError, BatchJob, Counts

JOB = BatchJob("batch_ab", "", 1.75e9, "/v1/messages", "file-1", "file-1", "24h", 1.75e9 + 86400)


def over(status: Any, **changes: Any) -> BatchJob:
    return msgspec.structs.replace(JOB, status=status, clean=True, counts=Counts(5, 2, 1), **changes)


@pytest.mark.parametrize(
    ("job", "status", "counts"),
    [
        (msgspec.structs.replace(JOB, counts=Counts(5)), "in_progress", {"processing": 5}),
        (msgspec.structs.replace(over("completed"), clean=False), "in_progress", {"processing": 5}),
        (msgspec.structs.replace(over("cancelling"), clean=False), "canceling", {"processing": 5}),
        (over("cancelled"), "ended", {"succeeded": 2, "errored": 1, "canceled": 2}),
        (over("expired"), "ended", {"succeeded": 2, "expired": 1, "errored": 2}),
        (over("failed"), "ended", {"succeeded": 2, "errored": 3}),
    ],
)
def test_a_batch_is_shown(job: BatchJob, status: str, counts: dict[str, int]) -> None:
    shown = results.batch_object(job)
    assert (shown["id"], shown["type"]) == ("msgbatch_ab", "message_batch")
    assert shown["processing_status"] == status
    assert {name: count for name, count in shown["request_counts"].items() if count} == counts
    assert (shown["results_url"] is not None) == (status == "ended")
    assert shown["created_at"] == "2025-06-15T15:06:40Z"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (succeeded("b", 1, "a", b'{"id":"msg_1"}').text, {"type": "succeeded", "message": {"id": "msg_1"}}),
        (not_run("b", 1, "a", EXPIRED).text, {"type": "expired"}),
        (not_run("b", 1, "a", {"code": "x", "message": "Lost."}).text, ("api_error", "Lost.")),
        (failed("b", 1, "a", InvalidParameter("No.", param="x", reason="y")).text, ("invalid_request_error", "No.")),
        (failed("b", 1, "a", QueueFull("Full.")).text, ("rate_limit_error", "Full.")),
    ],
)
def test_a_line_is_told(line: bytes, expected: Any) -> None:
    assert results.custom_id_of(line) == "a"
    told = json.loads(results.result_of(line))
    assert told["custom_id"] == "a"
    if isinstance(expected, dict):
        assert told["result"] == expected
    else:
        assert told["result"]["type"] == "errored"
        error = told["result"]["error"]
        assert (error["type"], error["error"]["type"], error["error"]["message"]) == ("error", *expected)


def test_a_request_that_was_never_run_has_a_result_too() -> None:
    assert json.loads(results.missing_result(over("cancelled"), "a"))["result"] == {"type": "canceled"}
    for errors, said in (([BatchError("x", "Input gone.")], "Input gone."), ([], "has ended before")):
        told = json.loads(results.missing_result(over("failed", errors=errors), "a"))["result"]
        assert told["type"] == "errored"
        assert said in told["error"]["error"]["message"]


def test_ids() -> None:
    assert results.job_id("msgbatch_ab") == "batch_ab"
    assert results.job_id("batch_ab") == ""


class Named(msgspec.Struct, frozen=True):
    id: str


@pytest.mark.parametrize(
    ("query", "shown", "more"),
    [
        (NeighbourQuery(), "abcde", False),
        (NeighbourQuery(limit=2), "ab", True),
        (NeighbourQuery(limit=2, after_id="b"), "cd", True),
        (NeighbourQuery(limit=2, after_id="c"), "de", False),
        (NeighbourQuery(limit=2, before_id="d"), "bc", True),
        (NeighbourQuery(limit=3, before_id="d"), "abc", False),
        (NeighbourQuery(before_id="a"), "", False),
        (NeighbourQuery(after_id="a", before_id="e", limit=2), "bc", True),
        (NeighbourQuery(after_id="d", before_id="b"), "", False),
    ],
)
def test_a_page_of_neighbours(query: NeighbourQuery, shown: str, more: bool) -> None:
    found, has_more = neighbours([Named(name) for name in "abcde"], query)
    assert ("".join(item.id for item in found), has_more) == (shown, more)
