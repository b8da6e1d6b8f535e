"""Files among the parts of messages: texts, which the model reads in their place. Anything else is refused by name.

{"type": "file", "file": {"file_id": "file-..."}}       ──▶  <file name="notes.txt">
{"type": "file", "file": {"file_data": "data:..."}}          ...
                                                             </file>
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import msgspec

from services.gateway.core.errors import InvalidParameter, RouteError, above, missing, unsupported
from services.gateway.files.files import Files
from services.gateway.intake.schemas import ChatCompletionRequest, InputFile, Message
from shared import limits
from shared.errors import PayloadTooLarge

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?:;[^,]*?)?(?P<base64>;base64)?,", re.IGNORECASE)
_UNNAMED = "file"
_KINDS = ((b"%PDF-", "a PDF"), (b"PK\x03\x04", "an archive or an office document"), (b"\x89PNG", "an image"))


async def with_files_read(request: ChatCompletionRequest, tenant: str, files: Files) -> ChatCompletionRequest:
    """`request`, which was checked, with the texts of its files in their place. Raises `InvalidParameter`,
    `PayloadTooLarge`, `BrokerUnavailable`."""
    parts = [
        (f"messages[{number}].content[{index}].file", part.file)
        for number, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if part.file is not None
    ]
    if not parts:
        return request
    if len(parts) > limits.INPUT_FILES.value:
        raise above("messages", parts, limits.INPUT_FILES)
    room, texts = limits.INPUT_FILE_BYTES.value, {}
    for path, file in parts:
        name, data = await _bytes_of(file, path, tenant, files, room)
        room -= len(data)
        texts[id(file)] = _shown(file.filename or name, _text_of(data, path))
    return msgspec.structs.replace(request, messages=_replaced(request.messages, texts))


def _replaced(messages: Sequence[Message], texts: dict[int, str]) -> list[Message]:
    """`texts`: by the identity of the file that each is of."""
    replaced = []
    for message in messages:
        if isinstance(message.content, list):
            content = [
                part
                if part.file is None
                else msgspec.structs.replace(part, type="text", text=texts[id(part.file)], file=None)
                for part in message.content
            ]
            message = msgspec.structs.replace(message, content=content)
        replaced.append(message)
    return replaced


async def _bytes_of(file: InputFile, path: str, tenant: str, files: Files, room: int) -> tuple[str, bytes]:
    if file.file_id and file.file_data:
        raise unsupported(f"{path}.file_data", "the file is named by 'file_id' already")
    too_large = PayloadTooLarge(
        f"The files in '{path.partition('[')[0]}' are too large; send their relevant parts "
        f"({limits.INPUT_FILE_BYTES.cited()})."
    )
    if file.file_data:
        data = await asyncio.to_thread(decoded, file.file_data, f"{path}.file_data")
        if len(data) > room:
            raise too_large
        return _UNNAMED, data
    if not file.file_id:
        raise missing(f"{path}.file_data", "the file, or a 'file_id'")
    try:
        return await files.whole(file.file_id, tenant, room)
    except PayloadTooLarge:
        raise too_large from None
    except RouteError as error:
        raise InvalidParameter(error.message, param=f"{path}.file_id", reason="file_not_found") from None


def decoded(given: str, path: str) -> bytes:
    """The bytes of a data URL, or of base64 alone. Raises `InvalidParameter`."""
    head = _DATA_URL.match(given)
    body = given[head.end() :] if head else given
    if head and not head["base64"]:
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter(f"Invalid '{path}': expected a data URL, or the file in base64.", param=path) from None


def _text_of(data: bytes, path: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\x00"
    if "\x00" not in text:
        return text
    kind = next((kind for begin, kind in _KINDS if data.startswith(begin)), "no text in UTF-8")
    raise InvalidParameter(
        f"Unsupported file in '{path}': it is {kind}, and this server reads files of text alone; send its text.",
        param=path,
        reason="unsupported_file",
    )


def _shown(name: str, text: str) -> str:
    """What the model reads."""
    plain = "".join(char for char in name if char.isprintable() and char not in '"<>')
    return f'<file name="{plain[:256]}">\n{text}\n</file>'
