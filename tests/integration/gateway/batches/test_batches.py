"""Batches by OpenAI's client: run, refused, cancelled, expired, retried."""

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types import Batch

from services.gateway.batches.results import Results
from services.gateway.batches.service import batch_jobs
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.objects import Objects
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.helpers import (
    CHAT,
    COMPLETIONS,
    custom_ids,
    jsonl,
    line,
    lines_of,
    ready,
    requests,
    submit,
    text_of,
    until_status,
)
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, silence, until


async def results_left(bus: Bus) -> int:
    info = await bus.jetstream().stream_info(subjects.BATCHES_STREAM)
    return info.state.messages


async def let_expire(bus: Bus, batch: str, results: int) -> None:
    """Ends the batch's completion window, once so many lines have their result."""
    store, found = Results(bus, Objects(bus, subjects.FILES_STORE), 0.0), 0
    while found < results:
        found = len([result async for result in store.read(batch)])
    jobs = batch_jobs(bus, 1)
    await jobs.bucket.ensure()
    await jobs.change(batch, "", lambda job: msgspec.structs.replace(job, expires_at=time.time()))


async def echo(fake: FakeRing, request: GenerationRequest) -> None:
    """The stub's tokens are bytes: says the prompt's last word."""
    await say(fake, request, bytes(request.prompt).decode().split()[-1])


async def test_each_line_has_its_answer(served: openai.AsyncOpenAI, ring: FakeRing, bus: Bus) -> None:
    ring.behave = echo
    batch = await submit(served, requests(60), metadata={"a": "b"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
    done = await until_status(served, batch.id)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
    assert (done.model, done.error_file_id, done.errors) == (MODEL, None, None)
    answers = await lines_of(served, done.output_file_id)
    assert custom_ids(answers) == sorted(f"c{number}" for number in range(60))
    for answer in answers:
        assert text_of(answer) == answer["custom_id"]
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        assert answer["response"]["request_id"].startswith(done.id)
    assert len({answer["id"] for answer in answers}) == 60
    assert done.usage.output_tokens == sum(len(answer["custom_id"]) for answer in answers)
    assert {request.lane for request in ring.requests} == {"batch"}
    assert len(ring.requests) == 60
    async with asyncio.timeout(10):
        while await results_left(bus):
            await bus.flush()
    output = await served.files.retrieve(done.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{done.id}_output.jsonl")


async def test_completions_with_bom_and_windows_line_ends(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    asked = [
        {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"model": MODEL, "prompt": name}}
        for name in ("ä", "b")
    ]
    data = b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(each).encode() for each in asked)
    batch = await submit(served, data, endpoint=COMPLETIONS)
    done = await until_status(served, batch.id)
    answers = await lines_of(served, done.output_file_id)
    assert custom_ids(answers) == ["b", "ä"]
    assert {answer["response"]["body"]["object"] for answer in answers} == {"text_completion"}


async def test_lines_that_fail_are_in_the_error_file(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    asked = [line("long", messages=[{"role": "user", "content": "x" * 4000}]), line("fine")]
    options = {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
    batch = await submit(served, jsonl(asked), **options)
    done = await until_status(served, batch.id)
    assert done.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    (failed,) = await lines_of(served, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("long", 400)
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert custom_ids(await lines_of(served, done.output_file_id)) == ["fine"]
    for name in (done.error_file_id, done.output_file_id):
        file = await served.files.retrieve(name or "")
        assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)


async def test_an_answer_too_large_for_a_message(
    nats_settings: CommonSettings, ring: FakeRing, monkeypatch: pytest.MonkeyPatch, bus: Bus
) -> None:
    monkeypatch.setattr("services.gateway.batches.results.ROOM", bus.max_payload - 400)
    await ready(ring)
    async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
        done = await until_status(client, (await submit(client, requests(5))).id)
        answers = await lines_of(client, done.output_file_id)
        assert custom_ids(answers) == [f"c{number}" for number in range(5)]
        async with asyncio.timeout(10):
            while await results_left(bus):
                await bus.flush()
        info = await bus.jetstream().stream_info(f"OBJ_{subjects.FILES_STORE}")
        assert info.state.messages == 4  # chunk and meta of input and output alone


def errors_of(batch: Batch) -> list[tuple[int | None, str | None, str | None]]:
    assert batch.errors.data is not None
    return [(error.line, error.code, error.param) for error in batch.errors.data]


async def test_a_file_that_is_wrong_fails_the_batch_with_line_numbers(
    served: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    wrong: list[Any] = [
        line("a"),
        line("a"),
        {"method": "POST", "url": CHAT, "body": {}},
        line("g") | {"method": "GET"},
        line("u") | {"url": COMPLETIONS},
        line("m", model="other"),
        line("t", temperature=9),
        line("s", stream=True),
        line("b") | {"body": "text"},
        line("x") | {"priority": 1},
    ]
    done = await until_status(served, (await submit(served, b"\n" + jsonl(wrong) + b"{not json\n[]\n\xff\n")).id)
    assert done.status == "failed"
    assert done.failed_at is not None
    assert errors_of(done) == [
        (3, "duplicate_custom_id", "custom_id"),
        (4, "missing_required_parameter", "custom_id"),
        (5, "invalid_method", "method"),
        (6, "invalid_url", "url"),
        (7, "model_not_found", "body.model"),
        (8, "decimal_above_max_value", "body.temperature"),
        (9, "unsupported_parameter", "body.stream"),
        (10, "invalid_type", "body"),
        (11, "unknown_parameter", "priority"),
        (12, "invalid_json_line", None),
        (13, "invalid_json_line", None),
        (14, "invalid_json_line", None),
    ]
    assert (done.output_file_id, done.error_file_id) == (None, None)
    empty = await until_status(served, (await submit(served, b"\n \r\n")).id)
    assert errors_of(empty) == [(None, "empty_file", None)]
    assert not ring.requests


async def test_two_models_are_two_batches(
    served: openai.AsyncOpenAI, gateway: RunningGateway, hosts: FakeHosts
) -> None:
    await hosts.register("second")
    await until(lambda: "second" in gateway.service.work.catalog.registry.specs)
    done = await until_status(served, (await submit(served, jsonl([line("a"), line("b", model="second")]))).id)
    assert errors_of(done) == [(2, "mismatched_model", "body.model")]


async def test_batches_that_are_refused_at_once(served: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    file = await served.files.create(file=("a", b"x"), purpose="user_data")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for changes, status, code in (
        ({}, 400, "invalid_value"),  # its purpose is another
        ({"input_file_id": "file-none"}, 404, "not_found"),
        ({"endpoint": "/v1/images"}, 400, "invalid_value"),
        ({"completion_window": "soon"}, 400, "invalid_value"),
        ({"completion_window": "30d"}, 400, "decimal_above_max_value"),
        ({"completion_window": "0h"}, 400, "decimal_below_min_value"),
        ({"metadata": {"k": "v" * 513}}, 400, "string_above_max_length"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "object_above_max_properties"),
        ({"output_expires_after": {"seconds": 1}}, 400, "integer_below_min_value"),
        ({"colour": "red"}, 400, "unknown_parameter"),
    ):
        answer = await http.post("/v1/batches", json=good | changes, headers={"authorization": "Bearer none"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), changes
    assert (await http.get("/v1/batches?limit=101")).status_code == 400


async def test_batches_are_listed(served: openai.AsyncOpenAI) -> None:
    made = [await submit(served, requests(1)) for _ in range(3)]
    newest_first = [batch.id for batch in reversed(made)]
    assert [batch.id async for batch in served.batches.list(limit=2)] == newest_first
    for batch in made:  # what is under way as the gateway stops is the subject of other tests
        await until_status(served, batch.id)


async def test_a_batch_is_its_tenants_and_runs_on_when_its_key_is_revoked(
    served: openai.AsyncOpenAI, gateway: RunningGateway, http: httpx.AsyncClient, keys: Keys, ring: FakeRing
) -> None:
    key, colleague, others = await keys.make("acme"), await keys.make("acme"), await keys.make("other")
    for each in (key, colleague, others):
        await changes_to(gateway, bearer(each), 200)
    go = asyncio.Event()

    async def wait(fake: FakeRing, request: GenerationRequest) -> None:
        await go.wait()
        await say(fake, request, "done")

    ring.behave = wait
    batch = await submit(served.with_options(api_key=key.token), requests(2))
    await until(lambda: ring.requests)
    assert {request.tenant for request in ring.requests} == {"acme"}
    await keys.revoke(key)
    await changes_to(gateway, bearer(key), 401)
    stranger = bearer(others)
    assert (await http.get("/v1/batches", headers=stranger)).json()["data"] == []
    for method, path in (("GET", batch.id), ("POST", f"{batch.id}/cancel")):
        answer = await http.request(method, f"/v1/batches/{path}", headers=stranger)
        assert answer.status_code == 404
    go.set()
    ended = await until_status(served.with_options(api_key=colleague.token), batch.id)
    assert ended.request_counts.completed == 2


async def test_a_repeated_submission_is_one_batch(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    file = await served.files.create(file=("a", requests(1)), purpose="batch")
    batches = [
        await served.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_headers={"Idempotency-Key": "once"}
        )
        for _ in range(2)
    ]
    assert batches[0].id == batches[1].id
    with pytest.raises(openai.UnprocessableEntityError):
        await served.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"a": "b"},
            extra_headers={"Idempotency-Key": "once"},
        )
    await until_status(served, batches[0].id)
    assert len(ring.requests) == 1


async def test_cancelling_keeps_what_is_done(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def some(fake: FakeRing, request: GenerationRequest) -> None:
        if len(fake.requests) <= 10:
            await say(fake, request)

    ring.behave = some
    batch = await submit(served, requests(100))
    await until(lambda: len(ring.requests) > 20)
    assert (await served.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    done = await until_status(served, batch.id)
    assert (done.status, done.error_file_id) == ("cancelled", None)
    assert done.request_counts.model_dump() == {"total": 100, "completed": 10, "failed": 0}
    assert len(await lines_of(served, done.output_file_id)) == 10
    under_way = {request.generation_id for request in ring.requests[10:]}
    await until(lambda: under_way <= ring.cancelled | ring.commanded)
    assert (await served.batches.cancel(batch.id)).status == "cancelled"
    over = await until_status(served, (await submit(served, b"")).id)
    with pytest.raises(openai.ConflictError, match="status 'failed'"):
        await served.batches.cancel(over.id)


async def test_what_is_not_done_in_time_has_expired(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    async def some(fake: FakeRing, request: GenerationRequest) -> None:
        if len(fake.requests) <= 10:
            await say(fake, request)

    ring.behave = some
    batch = await submit(served, requests(50))
    await until(lambda: ring.answered >= 20)
    await let_expire(ring.bus, batch.id, 10)
    done = await until_status(served, batch.id)
    assert (done.status, done.expired_at is not None) == ("expired", True)
    assert done.request_counts.model_dump() == {"total": 50, "completed": 10, "failed": 40}
    finished = await lines_of(served, done.output_file_id)
    expired = await lines_of(served, done.error_file_id)
    assert {each["error"]["code"] for each in expired} == {"batch_expired"}
    assert {each["response"] for each in expired} == {None}
    assert custom_ids(finished + expired) == sorted(f"c{number}" for number in range(50))


async def test_lines_wait_while_the_gateway_or_the_fleet_is_full(
    nats_settings: CommonSettings, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three generations at a time in this gateway; and one line fails at first, as when its group is lost."""
    monkeypatch.setattr("services.gateway.batches.line_runner.backoff", lambda tries: 0.05)
    failed: set[str] = set()

    async def unsteady(fake: FakeRing, request: GenerationRequest) -> None:
        if request.request_id.endswith("-3") and request.request_id not in failed:
            failed.add(request.request_id)
            error = ("unavailable", "Not now.", False)
            await fake.emit(request, 0, [], finish="error", error=error)
            return
        await say(fake, request)

    ring.behave = unsteady
    await ready(ring)
    async with run_gateway(nats_settings, max_generations=3) as gateway, gateway.openai() as client:
        done = await until_status(client, (await submit(client, requests(12))).id)
        assert done.request_counts.completed == 12
        async with gateway.http() as http:
            metrics = (await http.get("/metrics")).text
        assert 'ryzanstein_gateway_batch_lines_total{result="completed"} 12.0' in metrics
    assert len(failed) == 1
    assert len(ring.requests) == 13


async def test_a_batch_waits_for_a_fleet_from_zero(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    batch = await submit(client, requests(5))
    found = await until_status(client, batch.id, "in_progress")
    assert found.in_progress_at is not None
    assert not ring.requests  # nothing grows old in the queue
    await ready(ring)
    assert (await until_status(client, batch.id)).status == "completed"
    assert len(ring.requests) == 5


async def test_an_input_that_is_deleted_meanwhile(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    """Its lines cannot be read any more when the batch is taken up again."""
    ring.behave = silence
    async with asyncio.timeout(30):
        batch = await submit(served, requests(3000))
        await until_status(served, batch.id, "in_progress")
        await served.files.delete(batch.input_file_id)
        await let_expire(ring.bus, batch.id, 0)
        done = await until_status(served, batch.id)
    assert done.status == "failed"
    assert errors_of(done) == [(None, "input_file_gone", None)]


async def test_the_gateway_of_a_batch_yields_to_another_that_begins(
    nats_settings: CommonSettings, gateway: RunningGateway, served: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    """A gateway that stops leaves its batch at once, and what it has begun is gone on with."""
    gate = asyncio.Event()

    async def held(fake: FakeRing, request: GenerationRequest) -> None:
        if len(fake.requests) > 10:
            await gate.wait()
        await say(fake, request)

    ring.behave = held
    batch = await submit(served, requests(40))
    await until(lambda: len(ring.requests) > 20)
    async with run_gateway(nats_settings) as other, other.openai() as client:
        gateway.service.end()
        await gateway.task
        gate.set()
        done = await until_status(client, batch.id)
        assert done.status == "completed"
        assert custom_ids(await lines_of(client, done.output_file_id)) == custom_ids(
            [line(f"c{number}") for number in range(40)]
        )
    identities = [request.generation_id for request in ring.requests]
    assert len(identities) == len(set(identities)) == 40
