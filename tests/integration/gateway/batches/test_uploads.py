"""Uploads in parts, as the official client sends them."""

import asyncio
import hashlib
from typing import Any

import httpx
import openai
import pytest

from services.gateway.files.files import UPLOAD_TIME
from tests.integration.gateway.conftest import RunningGateway

PARTS = [b"first,", b"second,", b"third"]
WHOLE = b"".join(PARTS)


async def begun(client: openai.AsyncOpenAI, **fields: Any) -> openai.types.Upload:
    return await client.uploads.create(
        **({"bytes": len(WHOLE), "filename": "a.txt", "mime_type": "text/plain", "purpose": "user_data"} | fields)
    )


async def test_parts_become_a_file(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, gateway: RunningGateway
) -> None:
    upload = await begun(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert (upload.status, upload.expires_at - upload.created_at) == ("pending", int(UPLOAD_TIME))
    parts = await asyncio.gather(
        *(
            one.uploads.parts.create(upload.id, data=part)
            for one, part in zip((client, elsewhere, client), PARTS, strict=True)
        )
    )
    assert [file async for file in client.files.list()] == []
    done = await elsewhere.uploads.complete(
        upload.id, part_ids=[part.id for part in parts], md5=hashlib.md5(WHOLE, usedforsecurity=False).hexdigest()
    )
    assert done.status == "completed"
    assert (done.file.bytes, done.file.filename, done.file.purpose) == (len(WHOLE), "a.txt", "user_data")
    assert done.file.expires_at == done.file.created_at + 3600
    assert (await client.files.content(done.file.id)).content == WHOLE
    held, _ = gateway.service._backend.parts.files._held.of("")
    assert held == 1
    with pytest.raises(openai.NotFoundError):
        await client.uploads.complete(upload.id, part_ids=[part.id for part in parts])


async def test_what_does_not_fit_is_refused_and_changes_nothing(client: openai.AsyncOpenAI) -> None:
    upload, other = await begun(client), await begun(client)
    parts = [await client.uploads.parts.create(upload.id, data=part) for part in PARTS]
    strange = await client.uploads.parts.create(other.id, data=b"x")
    names = [part.id for part in parts]
    refused: list[dict[str, Any]] = [
        {"part_ids": []},
        {"part_ids": names[:2]},
        {"part_ids": [*names[:2], strange.id]},
        {"part_ids": [*names[:2], "part_0"]},
        {"part_ids": names, "md5": "0" * 32},
    ]
    for body in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.uploads.complete(upload.id, **body)
        assert caught.value.param == ("md5" if "md5" in body else "part_ids")
    done = await client.uploads.complete(upload.id, part_ids=names)
    assert done.file is not None
    assert (await client.uploads.cancel(other.id)).status == "cancelled"
    for ask in (client.uploads.cancel(other.id), client.uploads.parts.create(other.id, data=b"x")):
        with pytest.raises(openai.NotFoundError):
            await ask
    with pytest.raises(openai.NotFoundError):
        await client.uploads.cancel("upload_1")


async def test_the_beginning_is_checked(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    for fields, param in (
        ({"bytes": 0}, "bytes"),
        ({"purpose": "fun"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"filename": "a" * 256}, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await begun(client, **fields)
        assert caught.value.param == param
    with pytest.raises(openai.APIStatusError, match="limit upload") as large:
        await begun(client, bytes=2**50)
    assert large.value.status_code == 413
    upload = await begun(client)
    answer = await http.post(f"/v1/uploads/{upload.id}/parts", data={"other": "x"}, files={"data": ("x", b"x")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "other")


async def test_an_upload_that_is_not_completed_goes(client: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
    upload = await begun(client)
    await client.uploads.parts.create(upload.id, data=b"x")
    files = gateway.service._backend.parts.files
    assert files._held.of("")[0] == 2
    await files.sweep(upload.created_at + 2 * UPLOAD_TIME)
    assert files._held.of("")[0] == 0
    with pytest.raises(openai.NotFoundError):
        await client.uploads.cancel(upload.id)
