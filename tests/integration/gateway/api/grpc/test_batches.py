"""Batch jobs over gRPC; their files are those of the REST API."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from services.gateway.api.grpc.generated import inference_pb2 as pb
from tests.integration.gateway.api.grpc.conftest import Client
from tests.integration.gateway.api.grpc.test_errors import details, failure
from tests.integration.gateway.api.grpc.test_keys import metadata
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.helpers import (
    CHAT,
    custom_ids,
    jsonl,
    line,
    lines_of,
    ready,
    requests,
    submit,
    until_status,
)
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence

LINES = pb.SubmitBatchRequest(endpoint=CHAT, jsonl=requests(3), metadata={"a": "b"}, output_expires_after_seconds=3600)
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def rest(gateway: RunningGateway, ring: FakeRing) -> AsyncIterator[openai.AsyncOpenAI]:
    """The REST API of the same gateway, whose model has a group."""
    await ready(ring)
    async with gateway.openai() as made:
        yield made


async def get(client: Client, batch: str, **options: Any) -> pb.Batch:
    return (await client.GetBatch(pb.GetBatchRequest(batch_id=batch), **options)).batch


async def until_over(client: Client, batch: str) -> pb.Batch:
    async with asyncio.timeout(40):
        while True:
            if (found := await get(client, batch)).HasField("end_time"):
                return found
            await asyncio.sleep(0.05)


async def names(rest: openai.AsyncOpenAI) -> list[str]:
    return [file.filename async for file in rest.files.list()]


async def test_lines_become_a_file_and_are_answered(client: Client, rest: openai.AsyncOpenAI) -> None:
    batch = (await client.SubmitBatch(LINES)).batch
    assert (batch.status, batch.endpoint, batch.metadata) == (pb.BATCH_STATUS_VALIDATING, CHAT, {"a": "b"})
    assert batch.expire_time.seconds - batch.create_time.seconds in (86_399, 86_400, 86_401)
    done = await until_over(client, batch.id)
    assert done.status == pb.BATCH_STATUS_COMPLETED
    assert (done.total, done.completed, done.failed, done.error_file_id) == (3, 3, 0, "")
    assert (done.model, done.usage.completion_tokens) == (MODEL, 39)
    assert custom_ids(await lines_of(rest, done.output_file_id)) == ["c0", "c1", "c2"]
    output = await rest.files.retrieve(done.output_file_id)
    assert output.expires_at == pytest.approx(output.created_at + 3600, abs=1)
    given = await rest.files.retrieve(done.input_file_id)
    assert (given.purpose, given.bytes) == ("batch", len(LINES.jsonl))
    assert given.expires_at is not None
    assert (await rest.batches.retrieve(batch.id)).output_file_id == done.output_file_id


async def test_a_file_of_the_rest_api_with_wrong_lines(client: Client, rest: openai.AsyncOpenAI) -> None:
    data = jsonl([line("same"), line("same")])
    file = await rest.files.create(file=("input.jsonl", data), purpose="batch")
    request = pb.SubmitBatchRequest(endpoint=CHAT, input_file_id=file.id, completion_window="1h")
    batch = (await client.SubmitBatch(request)).batch
    assert batch.input_file_id == file.id
    done = await until_over(client, batch.id)
    assert done.status == pb.BATCH_STATUS_FAILED
    assert [(error.line, error.code, error.param) for error in done.errors] == [(2, "duplicate_custom_id", "custom_id")]


async def test_cancelled_and_over(client: Client, rest: openai.AsyncOpenAI, ring: FakeRing) -> None:
    ring.behave = silence
    batch = (await client.SubmitBatch(LINES)).batch
    await until_status(rest, batch.id, "in_progress")
    cancelled = (await client.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id))).batch
    assert cancelled.status in (pb.BATCH_STATUS_CANCELLING, pb.BATCH_STATUS_CANCELLED)
    assert (await until_over(client, batch.id)).status == pb.BATCH_STATUS_CANCELLED
    again = await client.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id))
    assert again.batch.status == pb.BATCH_STATUS_CANCELLED


async def test_what_is_over_is_not_cancelled(client: Client, rest: openai.AsyncOpenAI) -> None:
    batch = (await client.SubmitBatch(LINES)).batch
    assert (await until_over(client, batch.id)).status == pb.BATCH_STATUS_COMPLETED
    error = await failure(client.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id)))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)["ErrorInfo"].reason == "BATCH_IS_OVER"


async def test_pages_are_of_both_apis_batches(client: Client, rest: openai.AsyncOpenAI) -> None:
    made = [(await client.SubmitBatch(LINES)).batch.id for _ in range(2)]
    made.append((await submit(rest, requests(1))).id)
    first = await client.ListBatches(pb.ListBatchesRequest(page_size=2))
    second = await client.ListBatches(pb.ListBatchesRequest(page_size=2, page_token=first.next_page_token))
    assert [batch.id for page in (first, second) for batch in page.batches] == made[::-1]
    assert second.next_page_token == ""
    everything = await client.ListBatches(pb.ListBatchesRequest())
    assert len(everything.batches) == 3


async def test_a_key_is_one_batch_and_one_file(client: Client, rest: openai.AsyncOpenAI) -> None:
    key = [("idempotency-key", "once")]
    made = await asyncio.gather(*(client.SubmitBatch(LINES, metadata=key) for _ in range(4)))
    made.append(await client.SubmitBatch(LINES, metadata=key))
    assert len({answer.batch.id for answer in made}) == 1
    other = pb.SubmitBatchRequest(endpoint=CHAT, jsonl=requests(4))
    error = await failure(client.SubmitBatch(other, metadata=key))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    await until_over(client, made[0].batch.id)
    assert (await names(rest)).count("input.jsonl") == 1
    elsewhere = await rest.batches.create(
        input_file_id=made[0].batch.input_file_id,
        endpoint=CHAT,  # type: ignore[arg-type]
        completion_window="24h",
        extra_headers={"idempotency-key": "once"},
    )
    assert elsewhere.id != made[0].batch.id


WRONG: list[tuple[str, Any, grpc.StatusCode, str, str]] = [
    ("SubmitBatch", pb.SubmitBatchRequest(endpoint=CHAT), INVALID, "MISSING_REQUIRED_PARAMETER", "input"),
    ("SubmitBatch", pb.SubmitBatchRequest(endpoint="/x", jsonl=b"x"), INVALID, "INVALID_VALUE", "endpoint"),
    (
        "SubmitBatch",
        pb.SubmitBatchRequest(endpoint=CHAT, jsonl=b"x", completion_window="soon"),
        INVALID,
        "INVALID_VALUE",
        "completion_window",
    ),
    (
        "SubmitBatch",
        pb.SubmitBatchRequest(endpoint=CHAT, jsonl=b"x", metadata={"a": "b" * 513}),
        INVALID,
        "STRING_ABOVE_MAX_LENGTH",
        "metadata.a",
    ),
    (
        "SubmitBatch",
        pb.SubmitBatchRequest(endpoint=CHAT, jsonl=b"x", output_expires_after_seconds=1),
        INVALID,
        "INTEGER_BELOW_MIN_VALUE",
        "output_expires_after_seconds",
    ),
    ("SubmitBatch", pb.SubmitBatchRequest(endpoint=CHAT, input_file_id="none"), MISSING, "NOT_FOUND", ""),
    ("GetBatch", pb.GetBatchRequest(), INVALID, "MISSING_REQUIRED_PARAMETER", "batch_id"),
    ("GetBatch", pb.GetBatchRequest(batch_id="no such\n*"), MISSING, "NOT_FOUND", ""),
    ("CancelBatch", pb.CancelBatchRequest(), INVALID, "MISSING_REQUIRED_PARAMETER", "batch_id"),
    ("CancelBatch", pb.CancelBatchRequest(batch_id="batch_0"), MISSING, "NOT_FOUND", ""),
    ("ListBatches", pb.ListBatchesRequest(page_size=101), INVALID, "INTEGER_ABOVE_MAX_VALUE", "page_size"),
    ("ListBatches", pb.ListBatchesRequest(page_size=-1), INVALID, "INTEGER_BELOW_MIN_VALUE", "page_size"),
    ("ListBatches", pb.ListBatchesRequest(page_token="x"), INVALID, "INVALID_VALUE", "page_token"),
]


async def test_what_is_wrong_is_named_and_leaves_no_file(client: Client, rest: openai.AsyncOpenAI) -> None:
    for name, request, code, reason, field in WRONG:
        error = await failure(getattr(client, name)(request))
        shown = details(error)
        assert (error.code(), shown["ErrorInfo"].reason) == (code, reason), name
        if field:
            assert shown["BadRequest"].field_violations[0].field == field
    assert await names(rest) == []


async def test_another_tenants_batch_is_not_there(
    client: Client, gateway: RunningGateway, keys: Keys, ring: FakeRing
) -> None:
    await ready(ring)
    mine, theirs = await keys.make("mine"), await keys.make("theirs")
    await changes_to(gateway, bearer(theirs), 200)
    await changes_to(gateway, bearer(mine), 200)
    batch = (await client.SubmitBatch(LINES, metadata=metadata(mine))).batch
    by_file = pb.SubmitBatchRequest(endpoint=CHAT, input_file_id=batch.input_file_id)
    for call in (
        client.GetBatch(pb.GetBatchRequest(batch_id=batch.id), metadata=metadata(theirs)),
        client.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id), metadata=metadata(theirs)),
        client.SubmitBatch(by_file, metadata=metadata(theirs)),
    ):
        assert (await failure(call)).code() == MISSING
    listed = await client.ListBatches(pb.ListBatchesRequest(), metadata=metadata(theirs))
    assert list(listed.batches) == []
    after = pb.ListBatchesRequest(page_token=batch.id)
    assert (await failure(client.ListBatches(after, metadata=metadata(theirs)))).code() == INVALID
    assert (await get(client, batch.id, metadata=metadata(mine))).id == batch.id
