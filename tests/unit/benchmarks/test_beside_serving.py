"""What a job costs those beside it: phases, the job's states, and verdicts."""

from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.errors import BenchError
from benchmarks.serve.stats import Sample
from benchmarks.training import beside_serving
from benchmarks.training.beside_serving import (
    ALONE,
    BESIDE,
    JOBS,
    Job,
    Kind,
    conversations,
    sheet,
    verdicts,
)


def kind(first: float, gap: float) -> Kind:
    arrivals = [first + gap * at for at in range(3)]
    return Kind([Sample(0, 1, arrivals=arrivals, deltas=[1, 1, 1], output_tokens=3)] * 4, 2, 10)


def test_verdicts_compare_the_figures_of_both_kinds() -> None:
    kinds = {BESIDE: kind(0.104, 0.0112), ALONE: kind(0.1, 0.01)}
    assert verdicts(kinds) == [
        "met: first token at p50 +4.0% beside a job; 5% or less",
        "met: first token at p99 +4.0% beside a job; 15% or less",
        "not met: gap at p50 +12.0% beside a job; 5% or less",
        "met: gap at p99 +12.0% beside a job; 15% or less",
    ]
    table = sheet(kinds)
    assert list(table.head) == [
        "streams",
        "job",
        "first token p50",
        "first token p99",
        "gap p50",
        "gap p99",
    ]
    assert [row[2] for row in table.rows] == ["104.00 ms", "100.00 ms"]


def test_lines_are_chats_with_an_answer() -> None:
    lines = conversations(3)
    assert [[one["role"] for one in line["messages"]] for line in lines] == [["user", "assistant"]] * 3
    assert lines == conversations(3)


class Jobs:
    """A gateway with one job, which is at the next step each time that it is looked at."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {
            "id": "ftjob-1",
            "status": "queued",
            "wanted": "run",
            "waiting_for": "there is no room",
            "error": None,
            "progress": None,
        }
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        if request.url.path == "/v1/files":
            return httpx.Response(200, json={"id": "file-1"})
        if request.method == "POST" and request.url.path == JOBS:
            assert msgspec.json.decode(request.content)["training_file"] == "file-1"
        elif request.url.path.endswith(("pause", "resume", "cancel")):
            self.content["status"] = {"pause": "paused", "resume": "running", "cancel": "cancelled"}[
                request.url.path.rpartition("/")[2]
            ]
        elif self.content["status"] in ("queued", "running"):
            step = (self.content["progress"] or {"step": 0})["step"] + 1
            self.content |= {"status": "running", "progress": {"step": step}}
        return httpx.Response(200, json=self.content)


async def test_a_job_is_paused_and_goes_on_between_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_serving, "LOOK", 0.0)
    jobs = Jobs()
    async with httpx.AsyncClient(transport=httpx.MockTransport(jobs), base_url="http://gateway") as http:
        job = await Job.created(http, "model", 2)
        await job.run()
        first = job.step
        await job.rest()
        assert jobs.content["status"] == "paused"
        await job.rest()
        await job.run()
        assert job.step > first
        await job.cancel()
    changes = [asked.rpartition("/")[2] for asked in jobs.asked if asked.startswith("POST")]
    assert changes == ["files", "jobs", "pause", "resume", "cancel"]


async def test_a_job_that_fails_or_waits_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_serving, "LOOK", 0.0)
    jobs = Jobs()
    async with httpx.AsyncClient(transport=httpx.MockTransport(jobs), base_url="http://gateway") as http:
        job = await Job.created(http, "model", 2)
        monkeypatch.setattr(beside_serving, "PATIENCE", -1.0)
        with pytest.raises(BenchError, match="is not paused after -1 s: there is no room"):
            await job.until(lambda now: now["status"] == "paused", "paused")
        jobs.content |= {"status": "failed", "error": {"message": "the loss is nan"}}
        with pytest.raises(BenchError, match=r"ftjob-1 is failed: the loss is nan\."):
            await job.look()


def test_a_refusal_is_told_with_its_path() -> None:
    answer = httpx.Response(409, text="no", request=httpx.Request("POST", f"http://gateway{JOBS}"))
    with pytest.raises(BenchError, match="/v1/fine_tuning/jobs answered HTTP 409: no"):
        beside_serving._check(answer)
