"""Files among the parts of messages: the model reads their text."""

import base64
from typing import Any

import openai
import pytest

from shared import limits
from tests.integration.gateway.fake_ring import MODEL, FakeRing

TEXT = "Ada was born in 1815.\n"
DATA = "data:text/plain;charset=utf-8;base64," + base64.b64encode(TEXT.encode()).decode()
SHOWN = f'<file name="ada.txt">\n{TEXT}\n</file>'


def prompt(ring: FakeRing) -> str:
    return bytes(ring.requests[-1].prompt).decode()


async def test_a_chat_reads_files(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    uploaded = await client.files.create(file=("ada.txt", TEXT.encode()), purpose="user_data")
    for file in (
        {"file_id": uploaded.id},
        {"file_data": DATA, "filename": "ada.txt"},
        {"file_data": DATA.partition(",")[2], "filename": 'a"da.txt'},
        {"file_data": "data:text/plain,Ada%20was%20born%20in%201815.%0A", "filename": "ada.txt"},
    ):
        content: Any = [{"type": "text", "text": "When?"}, {"type": "file", "file": file}]
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
        assert f"When?\n{SHOWN}" in prompt(ring)


async def test_a_response_reads_files_and_lists_them(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    uploaded = await client.files.create(file=("ada.txt", TEXT.encode()), purpose="user_data")
    part: Any = {"type": "input_file", "file_id": uploaded.id, "detail": "low"}
    given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "When?"}, part]}]
    response = await client.responses.create(model=MODEL, input=given)
    assert f"When?\n{SHOWN}" in prompt(ring)
    (item,) = (await client.responses.input_items.list(response.id)).model_dump(exclude_none=True)["data"]
    assert item["content"][1] == part
    counted = await client.responses.input_tokens.count(model=MODEL, input=given)
    assert counted.input_tokens == len(ring.requests[-1].prompt)
    output: Any = [
        *given,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ]
    await client.responses.create(model=MODEL, input=output)
    assert prompt(ring).count(SHOWN) == 2


async def test_what_is_no_text_is_refused(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    for file, code in [
        ({"file_id": "file-0"}, "file_not_found"),
        ({"file_data": "no base64!"}, "invalid_value"),
        ({"filename": "a.txt"}, "missing_required_parameter"),
        ({"file_data": base64.b64encode(b"%PDF-1.7\n\xff").decode()}, "unsupported_file"),
        ({"file_data": base64.b64encode(b"a\x00b").decode()}, "unsupported_file"),
        ({"file_data": DATA, "file_id": "file-0"}, "unsupported_parameter"),
    ]:
        messages: Any = [{"role": "user", "content": [{"type": "file", "file": file}]}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.code == code
        assert str(caught.value.param).startswith("messages[0].content[0].file")
        assert not ring.requests


async def test_files_are_bounded(client: openai.AsyncOpenAI) -> None:
    many: Any = [{"type": "file", "file": {"file_data": DATA}}] * (limits.INPUT_FILES.value + 1)
    with pytest.raises(openai.BadRequestError, match="input_files"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": many}])
    large = b"x" * (limits.INPUT_FILE_BYTES.value + 1)
    uploaded = await client.files.create(file=("large.txt", large), purpose="user_data")
    part: Any = {"type": "file", "file": {"file_id": uploaded.id}}
    with pytest.raises(openai.APIStatusError, match="input_file_bytes") as caught:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
    assert caught.value.status_code == 413
