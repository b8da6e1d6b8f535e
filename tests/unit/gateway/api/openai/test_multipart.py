"""Forms are read the same however they come; what is no form is refused and nothing else."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.openai.multipart import FORM_ROOM, MultipartForm
from services.gateway.core.errors import ClientGone, InvalidParameter, RequestTimeout
from shared.errors import PayloadTooLarge
from shared.limits import UPLOAD_FIELDS


def scope(content_type: str = "multipart/form-data; boundary=XyZ") -> dict[str, Any]:
    return {"headers": [(b"content-type", content_type.encode())]}


def form(parts: list[bytes], *, goes: bool = False, limit: int = 1 << 20) -> MultipartForm:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if goes else {"type": "http.request", "body": b""})

    async def receive() -> Any:
        return messages.pop(0)

    return MultipartForm(scope(), receive, 5.0, limit)


def encoded(data: bytes, before: dict[str, str], behind: dict[str, str]) -> bytes:
    def field(name: str, value: str) -> bytes:
        return f'--XyZ\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()

    file = b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
    file += b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n"
    fields = [b"".join(field(*item) for item in part.items()) for part in (before, behind)]
    return fields[0] + file + fields[1] + b"--XyZ--\r\n"


async def read(given: MultipartForm) -> bytes:
    await given.until_file()
    data = b"".join([part async for part in given.file_data()])
    await given.rest()
    return data


cuts = st.lists(st.integers(0, 600), max_size=10)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted(min(place, len(data)) for place in places)
    return [data[begin:end] for begin, end in zip([0, *marks], [*marks, len(data)], strict=True)]


almost_ends = st.sampled_from([b"a\r\n--Xy", b"a\r\n--X", b"a\r\n-", b"--Xy--"])


@given(st.binary(max_size=200) | almost_ends, st.booleans(), cuts)
async def test_any_cutting_gives_the_same_form(data: bytes, first: bool, places: list[int]) -> None:
    if b"--XyZ" in data:
        return
    fields = {"purpose": "batch", "umlaut": "äö"}
    whole = encoded(data, fields if first else {}, {} if first else fields)
    given = form(cut(whole, places))
    assert await read(given) == data
    assert (given.fields, given.filename) == (fields, "a b.jsonl")


@given(st.binary(max_size=300), cuts)
async def test_anything_else_is_refused_in_words(data: bytes, places: list[int]) -> None:
    for body in (data, b"--XyZ\r\n" + data, encoded(b"x", {}, {})[:-9] + data):
        with contextlib.suppress(InvalidParameter):
            await read(form(cut(body, places)))


async def test_a_client_that_goes_or_sleeps() -> None:
    whole = encoded(b"x" * 100, {}, {})
    with pytest.raises(ClientGone):
        await read(form([whole[:150]], goes=True))

    async def receive() -> Any:
        raise TimeoutError

    with pytest.raises(RequestTimeout):
        await MultipartForm(scope(), receive, 0.01, 1).until_file()
    with pytest.raises(InvalidParameter, match="boundary is too long"):
        MultipartForm(scope("multipart/form-data; boundary=" + "x" * 300), receive, 1.0, 1)


async def test_what_is_too_much() -> None:
    many = encoded(b"", {f"f{number}": "" for number in range(40)}, {}).replace(b"\r\n\r\n\r\n", b"\r\n\r\nv\r\n")
    two = encoded(b"x", {}, {}).removesuffix(b"--XyZ--\r\n") + encoded(b"y", {}, {})
    long_header = b"--XyZ\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n"
    for body in (many, two, long_header):
        with pytest.raises(InvalidParameter):
            await read(form([body]))


def empty_fields(count: int, name: str = "f") -> bytes:
    part = '--XyZ\r\nContent-Disposition: form-data; name="{}"\r\n\r\n\r\n'
    return b"".join(part.format(f"{name}{number}").encode() for number in range(count))


async def test_a_field_without_a_value_counts_too() -> None:
    given = form([empty_fields(20_000)], limit=1 << 30)
    with pytest.raises(InvalidParameter, match="limit upload_fields"):
        await given.until_file()
    assert len(given.fields) <= UPLOAD_FIELDS.value + 1, "of so many parts one may be the file"
    same = form([empty_fields(1) * (UPLOAD_FIELDS.value + 2)])
    with pytest.raises(InvalidParameter, match="limit upload_fields"):
        await same.until_file()


async def test_a_field_of_a_long_name() -> None:
    with pytest.raises(InvalidParameter, match="upload_field_name: 256 characters"):
        await form([empty_fields(1, "n" * 300)]).until_file()


async def test_a_body_that_does_not_end_before_or_behind_the_file() -> None:
    """Chunked: no Content-Length says how much there will be."""
    file = encoded(b"x" * 100, {}, {})
    endless = [b"\r\n" + b"y" * 65_536] * 100
    before = form([b"y" * 65_536] * 100, limit=100)
    with pytest.raises((InvalidParameter, PayloadTooLarge)):
        await before.until_file()
    given = form([file, *endless], limit=100)
    with pytest.raises(PayloadTooLarge, match="RYZANSTEIN_FILE_LIMIT"):
        await read(given)
    header = b"--XyZ\r\n" + b"X-A: b\r\n" * 40_000
    with pytest.raises((InvalidParameter, PayloadTooLarge)):
        await read(form([header[at : at + 65_536] for at in range(0, len(header), 65_536)], limit=100))
    whole = encoded(b"x" * FORM_ROOM, {"purpose": "batch"}, {})
    assert len(await read(form([whole], limit=FORM_ROOM))) == FORM_ROOM
