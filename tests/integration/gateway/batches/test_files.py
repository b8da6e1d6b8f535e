"""Files: in, out, listed, deleted; what is refused, and what is left of uploads that were cut off."""

import asyncio
import io
import os
import secrets
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from nats.js.errors import NotFoundError

from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from shared.config import CommonSettings
from shared.errors import InternalError
from shared.messages.batches import FileRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.objects import CHUNK, MissingObject, Objects
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import until

FILES = "/v1/files"


@pytest.fixture
async def objects(bus: Bus) -> Objects:
    store = Objects(bus, subjects.FILES_STORE)
    await store.open()
    return store


async def records(bus: Bus) -> dict[str, FileRecord]:
    return await (await Bucket.open(bus, subjects.FILES_BUCKET, FileRecord)).items()


async def stored(bus: Bus) -> int:
    """Messages in the object store."""
    info = await bus.jetstream().stream_info(f"OBJ_{subjects.FILES_STORE}")
    return info.state.messages


async def parts(*given: bytes) -> AsyncIterator[bytes]:
    for part in given:
        yield part


async def test_bytes_come_back_as_they_went(client: openai.AsyncOpenAI) -> None:
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7):
        await there_and_back(client, size)


async def there_and_back(client: openai.AsyncOpenAI, size: int) -> None:
    data = os.urandom(size)
    file = await client.files.create(file=("a/b\\data.bin", io.BytesIO(data)), purpose="user_data")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        size, "data.bin", "user_data", "processed",
    )  # fmt: skip
    assert (await client.files.content(file.id)).content == data
    assert await client.files.retrieve(file.id) == file


async def test_files_are_listed_in_pages_and_deleted(client: openai.AsyncOpenAI, bus: Bus) -> None:
    made = [
        await client.files.create(file=(f"{number}.txt", b"x"), purpose="batch" if number % 2 else "evals")
        for number in range(5)
    ]
    newest_first = [file.id for file in reversed(made)]
    assert [file.id async for file in client.files.list(limit=2)] == newest_first
    page = await client.files.list(limit=2, order="asc", after=made[0].id)
    assert ([file.id for file in page.data], page.has_more) == ([made[1].id, made[2].id], True)
    assert [file.id async for file in client.files.list(purpose="batch")] == [made[3].id, made[1].id]
    assert made[1].expires_at is not None
    assert made[0].expires_at is None
    for file in made:
        assert (await client.files.delete(file.id)).deleted
    assert (await client.files.list()).data == []
    assert await stored(bus) == 0
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        await client.files.content(made[0].id)


async def test_a_file_expires(client: openai.AsyncOpenAI, gateway: RunningGateway, bus: Bus) -> None:
    file = await client.files.create(
        file=("a.txt", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)
    files = gateway.service._backend.parts.files
    await files.sweep(time.time() + 3590)
    assert await client.files.retrieve(file.id) == file
    await files.sweep(time.time() + 3610)
    assert await records(bus) == {}
    assert await stored(bus) == 0


async def test_another_tenant_sees_nothing(gateway: RunningGateway, http: httpx.AsyncClient, keys: Keys) -> None:
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x")}}
    made, others = await keys.make("acme"), await keys.make("other")
    mine, other = bearer(made), bearer(others)
    for key in (mine, other):
        await changes_to(gateway, key, 200)
    await changes_to(gateway, {}, 401)
    assert (await http.get(FILES)).status_code == 401
    file = (await http.post(FILES, headers=mine, **form)).json()["id"]  # type: ignore[arg-type]
    for method, path in (("GET", f"/{file}"), ("GET", f"/{file}/content"), ("DELETE", f"/{file}")):
        answer = await http.request(method, FILES + path, headers=other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await http.get(FILES, headers=other)).json()["data"] == []
    assert len((await http.get(FILES, headers=mine)).json()["data"]) == 1


WRONG_FORMS: list[tuple[dict[str, str], dict[str, tuple[str, bytes]], str, str]] = [
    ({}, {"file": ("a", b"x")}, "purpose", "missing_required_parameter"),
    ({"purpose": "batch"}, {"other": ("a", b"x")}, "file", "missing_required_parameter"),
    ({"purpose": "batch_output"}, {"file": ("a", b"x")}, "purpose", "invalid_value"),
    ({"purpose": "batch", "colour": "red"}, {"file": ("a", b"x")}, "colour", "unknown_parameter"),
    (
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
        {"file": ("a", b"x")},
        "expires_after.seconds",
        "integer_below_min_value",
    ),
    (
        {"purpose": "batch", "expires_after[anchor]": "then", "expires_after[seconds]": "3600"},
        {"file": ("a", b"x")},
        "expires_after.anchor",
        "invalid_value",
    ),
    (
        {"purpose": "batch", "expires_after[anchor]": "created_at"},
        {"file": ("a", b"x")},
        "expires_after.seconds",
        "missing_required_parameter",
    ),
    (
        {"purpose": "batch", "expires_after[seconds]": "soon"},
        {"file": ("a", b"x")},
        "expires_after.seconds",
        "invalid_type",
    ),
]


async def test_forms_that_are_wrong_leave_nothing(http: httpx.AsyncClient, bus: Bus) -> None:
    for data, files, param, code in WRONG_FORMS:
        answer = await http.post(FILES, data=data, files=files)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert await records(bus) == {}
    assert await stored(bus) == 0


NO_FORMS: list[tuple[str, bytes]] = [
    ("application/json", b"{}"),
    ("multipart/form-data", b"x"),
    ("multipart/form-data; boundary=b", b"no form"),
    ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx'),
    ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
    (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n\xff\r\n--b--\r\n',
    ),
    ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="p"\r\n\r\n' + b"x" * 9999),
]


async def test_bodies_that_are_no_forms(http: httpx.AsyncClient, bus: Bus) -> None:
    for content_type, body in NO_FORMS:
        answer = await http.post(FILES, content=body, headers={"content-type": content_type})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert await records(bus) == {}


async def test_lists_that_cannot_be(http: httpx.AsyncClient) -> None:
    for query in ("limit=0", "limit=x", "limit=10001", "order=up", "colour=red"):
        assert (await http.get(f"{FILES}?{query}")).status_code == 400
    assert (await http.get(f"{FILES}?after=file-unknown")).status_code == 404


async def test_too_large_a_file_is_refused_however_it_is_sent(nats_settings: CommonSettings, bus: Bus) -> None:
    async with run_gateway(nats_settings, file_limit=1 << 20) as gateway, gateway.http() as http:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * (2 << 20))}}
        told = http.build_request("POST", FILES, **form)  # type: ignore[arg-type]
        body = await told.aread()

        async def streamed() -> AsyncIterator[bytes]:
            yield body

        untold = http.build_request(
            "POST", FILES, content=streamed(), headers={"content-type": told.headers["content-type"]}
        )
        for request in (told, untold):
            answer = await http.send(request)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert await records(bus) == {}
        assert await stored(bus) == 0


async def test_a_full_store_says_so(nats_settings: CommonSettings, bus: Bus) -> None:
    async with run_gateway(nats_settings, files_max_bytes=1 << 20) as gateway, gateway.http() as http:
        answers = [
            await http.post(FILES, data={"purpose": "batch"}, files={"file": ("a", os.urandom(600 << 10))})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 507]
        error = answers[1].json()["error"]
        assert (error["code"], error["type"]) == ("storage_full", "server_error")
        assert len(await records(bus)) == 1
        assert (await http.delete(f"{FILES}/{answers[0].json()['id']}")).status_code == 200
        again = await http.post(FILES, data={"purpose": "batch"}, files={"file": ("a", b"x" * (600 << 10))})
        assert again.status_code == 200


async def test_a_client_that_goes_leaves_nothing(gateway: RunningGateway, bus: Bus) -> None:
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 300_000
    )
    await writer.drain()
    async with asyncio.timeout(10):
        while await stored(bus) < 2:  # two chunks are there
            await bus.flush()
    assert [record.status for record in (await records(bus)).values()] == ["uploading"]
    writer.close()
    async with asyncio.timeout(10):
        while await records(bus) or await stored(bus):
            await bus.flush()
    assert reader is not None


async def test_what_a_killed_gateway_had_received_is_removed(bus: Bus, objects: Objects) -> None:
    files = Files(bus, GatewaySettings())
    await files.start()
    watching = asyncio.create_task(files.watch())
    nuid = secrets.token_hex(11)
    await objects._publish(objects._chunks(nuid), b"half a file", {})
    bucket = await Bucket.open(bus, subjects.FILES_BUCKET, FileRecord)
    begun = FileRecord("file-1", "", "a", "", time.time(), "file-1", status="uploading", nuid=nuid)
    await bucket.put("file-1", begun)
    assert await files.listed("", None) == []
    await until(lambda: files._held.of("") != (0, 0))
    await files.sweep(time.time())
    assert await stored(bus) == 1  # it may be under way
    await files.sweep(time.time() + 4000)
    assert await stored(bus) == 0
    assert await bucket.items() == {}
    watching.cancel()


async def test_other_clients_of_nats_read_and_write_the_same_objects(
    bus: Bus, objects: Objects, client: openai.AsyncOpenAI
) -> None:
    data = os.urandom(CHUNK * 2 + 5)
    file = await client.files.create(file=("a", data), purpose="batch")
    theirs = await bus.jetstream().object_store(subjects.FILES_STORE)
    assert (await theirs.get(file.id)).data == data
    await theirs.put("from-elsewhere", data[::-1])
    assert b"".join([part async for part in objects.read("from-elsewhere")]) == data[::-1]
    await theirs.delete("from-elsewhere")
    with pytest.raises(MissingObject):
        await anext(objects.read("from-elsewhere"))


async def test_of_several_writings_the_last_or_the_first_stays(bus: Bus, objects: Objects) -> None:
    async def content() -> bytes:
        return b"".join([part async for part in objects.read("one")])

    for number, fresh, expected in ((0, False, b"0"), (1, False, b"1"), (2, True, b"1")):
        await objects.write("one", parts(str(number).encode()), nuid=f"n{number}", fresh=fresh)
        assert await content() == expected
        assert await stored(bus) == 2  # nothing of the others is left
    await objects.delete("one")
    await objects.delete("one")
    assert await stored(bus) == 0


async def test_an_object_that_lost_a_part_is_not_taken_for_whole(bus: Bus, objects: Objects) -> None:
    await objects.write("one", parts(b"x" * CHUNK, b"y" * CHUNK), nuid="n1")
    jetstream = bus.jetstream()
    with pytest.raises(NotFoundError):
        await jetstream.get_msg(f"OBJ_{subjects.FILES_STORE}", seq=99)
    await jetstream.delete_msg(f"OBJ_{subjects.FILES_STORE}", 2)
    with pytest.raises(MissingObject):
        _ = [part async for part in objects.read("one")]
    await objects._publish(objects._chunks("n1"), b"z" * CHUNK, {})
    with pytest.raises(InternalError, match="not what was written"):
        _ = [part async for part in objects.read("one")]
