"""The load client as a user runs it, against a scripted server on a real socket."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.errors import BenchError
from benchmarks.harness import program
from benchmarks.serve.__main__ import _command_line, choose_workloads, main
from benchmarks.serve.runner import Target, run_round
from benchmarks.serve.sse import Client
from benchmarks.serve.stats import Sample
from benchmarks.serve.workloads import Session, Workload
from tests.unit.benchmarks.fake_server import FakeServer, serving

SMALL = ["--concurrency", "3", "--requests", "9", "--prompt-tokens", "30", "--output-tokens", "5"]


async def bench(url: str, *options: str) -> Result:
    """Runs the command beside the fake server's loop."""
    return await asyncio.to_thread(CliRunner().invoke, program(main), ["--url", url, *options])


def prompts(fake: FakeServer) -> list[str]:
    return [request.body["messages"][0]["content"] for request in fake.streamed]


async def load(fake: FakeServer, workload: Workload, sessions: Sequence[Session]) -> list[Sample]:
    samples: list[Sample] = []
    client = Client(fake.url)
    target = Target(client, "small", {})
    await run_round(target, workload, sessions, on_request=samples.append)
    client.close()
    return samples


async def test_a_closed_loop_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    async with serving() as fake:
        result = await bench(fake.url, *SMALL, "--rounds", "2", "--seed", "5", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "9 x 2" in result.output
    report = json.loads(file.read_bytes())
    [summary] = report["summaries"]
    assert (summary["requests"], summary["rounds"], summary["errors"]) == (9, 2, 0)
    assert summary["output_tokens"] == 45
    # The test's own server shares the process, so that the client may well look busy.
    assert [warning for warning in summary["warnings"] if "load client" not in warning] == []
    assert report["setting"]["model"] == "small"
    assert report["setting"]["seed"] == 5
    assert [len(rounds) for rounds in report["rounds"]] == [2]
    warm_up, *measured = fake.streamed
    assert len(measured) == 18
    assert {request.prompt_tokens for request in (warm_up, *measured)} == {30}
    assert len(set(prompts(fake))) == 19


async def test_requests_ask_for_greedy_streams_of_a_fixed_length() -> None:
    async with serving() as fake:
        extra = ["--extra", '{"top_k": 1, "min_tokens": null}']
        result = await bench(fake.url, *SMALL, *extra, "--model", "large", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    request = fake.streamed[-1]
    body = {name: value for name, value in request.body.items() if name != "messages"}
    assert body == {
        "model": "large",
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 1,
    }
    assert request.headers["authorization"] == "Bearer secret"
    assert "x-session-id" not in request.headers


async def test_no_measured_prompt_was_sent_before() -> None:
    async with serving() as fake:
        await bench(fake.url, *SMALL)
    asked = [request.body["messages"][0]["content"] for request in fake.requests if "messages" in request.body]
    for prompt in prompts(fake):
        assert sum(other.startswith(prompt[:12]) for other in asked) == 1


async def test_sessions_keep_their_answers_and_their_id() -> None:
    async with serving() as fake:
        result = await bench(fake.url, "--workload", "w4", "--markdown")
    assert result.exit_code == 0, result.output
    assert "| W4 | 32 |" in result.output
    by_session: dict[str, list[Any]] = {}
    for request in fake.streamed[1:]:
        by_session.setdefault(request.headers["x-session-id"], []).append(request)
    assert len(by_session) == 8
    for turns in by_session.values():
        assert [len(request.body["messages"]) for request in turns] == [1, 3, 5, 7]
        assert turns[1].body["messages"][1]["content"] == " tok" * 64
        assert [request.prompt_tokens for request in turns] == [100, 264, 428, 592]


async def test_conversations_are_computed_ahead_between_their_turns() -> None:
    async with serving() as fake:
        options = ["--workload", "w4", "--requests", "8", "--think", "0.01", "--prefill-ahead"]
        result = await bench(fake.url, *options)
    assert result.exit_code == 0, result.output
    ahead = [request for request in fake.requests if "/prefill" in request.path]
    asked = {request.headers["x-session-id"] for request in fake.streamed[1:]}
    assert {request.path.split("/")[3] for request in ahead} == asked
    assert sorted(len(request.body["messages"]) for request in ahead) == [2, 2, 4, 4, 6, 6]
    assert all("stream" not in request.body for request in ahead)


async def test_figures_are_shown_where_their_file_cannot_be_written() -> None:
    async with serving() as fake:
        result = await bench(fake.url, *SMALL, "--json", "/nowhere/report.json")
    assert result.exit_code == 2
    assert "9" in result.output.partition("error: ")[0]
    assert "The report cannot be written to /nowhere/report.json" in result.output


AHEAD = ["--workload", "w4", "--requests", "4", "--prefill-ahead"]
FULL = {"fail_after": 4, "error_body": b'{"error": {"message": "queue full"}}'}


@pytest.mark.parametrize(
    ("behaviour", "options", "code", "words"),
    [
        ({"lacks": "/prefill"}, AHEAD, 1, "--prefill-ahead was refused with HTTP 404"),
        (FULL, SMALL, 1, "6 x error: HTTP 503: queue full"),
        ({"tokens": 3}, SMALL, 0, "9 of 9 answers had 3 output tokens instead of 5"),
        ({"per_event": 5, "tokens": 5}, SMALL, 0, "events held 5.0 tokens on average"),
    ],
    ids=["nothing is computed ahead", "requests fail", "the server stops early", "bundled tokens"],
)
async def test_what_is_odd_is_in_the_report_and_what_failed_in_the_exit_status(
    behaviour: dict[str, Any], options: list[str], code: int, words: str
) -> None:
    async with serving(**behaviour) as fake:
        result = await bench(fake.url, *options)
    assert (result.exit_code, words in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("behaviour", "options", "message"),
    [
        ({"models": []}, [], "serves no model yet"),
        ({}, ["--model", "huge"], "does not serve 'huge'; it serves small, large."),
        ({"status": 400, "error_body": b'{"error": {"message": "min_tokens?"}}'}, [], "HTTP 400: min_tokens?."),
        ({}, ["--workload", "W1", *SMALL], "leave them out, or --concurrency"),
        ({}, ["--prompt-tokens", "5"], "too small: the model's chat template alone takes 10"),
        ({}, ["--extra", "[]"], "--extra is no JSON object"),
    ],
)
async def test_what_stops_a_run_is_one_sentence(behaviour: dict[str, Any], options: list[str], message: str) -> None:
    async with serving(**behaviour) as fake:
        result = await bench(fake.url, *SMALL, *options)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1


async def test_a_server_that_is_not_there_stops_the_run() -> None:
    async with serving() as fake:
        pass
    result = await bench(fake.url)
    assert result.exit_code == 2
    assert f"The server at {fake.url} cannot be reached" in result.output


async def test_a_failed_turn_fails_the_turns_after_it() -> None:
    workload = Workload("s", clients=1, requests=3, prompt_tokens=10, output_tokens=2, turns=3)
    async with serving(fail_after=1) as fake:
        samples = await load(fake, workload, [Session("s", ("one", "two", "three"))])
    assert [sample.turn for sample in samples] == [0, 1, 2]
    assert samples[0].error is None
    assert samples[1].error is not None
    assert samples[2].error == "not sent: an earlier turn failed"
    assert len(fake.requests) == 2


async def test_a_closed_loop_has_no_more_than_its_clients_at_once() -> None:
    workload = Workload("c", clients=3, requests=20, prompt_tokens=10, output_tokens=2)
    async with serving() as fake:
        samples = await load(fake, workload, [Session(None, (f"prompt {i}",)) for i in range(20)])
    assert fake.connections == 3
    edges = sorted([(s.started, 1) for s in samples] + [(s.finished, -1) for s in samples])
    running = [sum(step for _, step in edges[: at + 1]) for at in range(len(edges))]
    assert max(running) <= 3


def test_an_unknown_workload_is_told_with_those_there_are() -> None:
    with pytest.raises(BenchError, match="There is no workload 'W9': choose from W1, W2, W3, W4, W4s, all"):
        choose_workloads(["W9"])


@pytest.mark.parametrize("options", [["--api-key", "k"], ["--api-key=k"]])
def test_the_key_is_not_in_the_report(options: list[str]) -> None:
    shown = _command_line(["--rounds", "3", *options], "k")
    assert shown == f"python -m benchmarks.serve --rounds 3 {' '.join(options).removesuffix('k')}KEY"


def test_without_options_all_workloads_are_run() -> None:
    names = ["W1", "W2", "W3", "W4", "W4s"]
    assert [workload.name for workload in choose_workloads([])] == names
    assert [workload.name for workload in choose_workloads(["ALL"])] == names
    assert [workload.name for workload in choose_workloads(["w4S", "W1"])] == ["W4s", "W1"]


def test_named_workloads_take_other_numbers() -> None:
    found = choose_workloads(["W2", "W4"], requests=5, clients=2)
    assert [(each.requests, each.clients, each.output_tokens) for each in found] == [(5, 2, 128), (8, 2, 64)]
    [own] = choose_workloads(["W4"])
    assert (own.requests, own.clients) == (32, 8)
    with pytest.raises(BenchError, match="are for named workloads"):
        choose_workloads([], own, clients=2)


async def test_a_small_run_of_a_named_workload() -> None:
    async with serving() as fake:
        result = await bench(fake.url, "--workload", "W1", "--requests", "2", "--clients", "2", "--markdown")
    assert result.exit_code == 0, result.output
    assert "| W1 | 2 |" in result.output
    assert len(fake.streamed) == 3


def test_help_explains_every_option() -> None:
    result = CliRunner().invoke(program(main), ["--help"])
    assert result.exit_code == 0
    for option in ("--url", "--workload", "--concurrency", "--rounds", "--json", "--markdown"):
        assert option in result.output
