"""What has come of a line, as it stands in the output or error file. Pure."""

import hashlib
from typing import Any

import msgspec

from services.gateway.errors import describe, status_of
from shared.messages.batches import LineResult, TokenCounts

_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct):
    """Tokens in a response's body: chat completions' and completions' names, then those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_body = msgspec.json.Decoder(_Body)


def request_id_of(batch: str, line: int) -> str:
    """The request id of a line: in its result, and in every service's log."""
    return f"{batch}-{line}"


def succeeded(batch: str, line: int, custom_id: str, body: bytes) -> LineResult:
    """`body`: the endpoint's response."""
    text = _line(batch, line, custom_id, _response(batch, line, 200, msgspec.Raw(body)), None)
    return LineResult(line, True, text, _usage(body))


def failed(batch: str, line: int, custom_id: str, error: BaseException) -> LineResult:
    """The request was refused, or the server has a fault: the answer that a client would have got."""
    body = _encode(describe(error, request_id_of(batch, line)))
    text = _line(batch, line, custom_id, _response(batch, line, status_of(error), msgspec.Raw(body)), None)
    return LineResult(line, False, text)


def not_run(batch: str, line: int, custom_id: str, error: dict[str, str]) -> LineResult:
    """It has no answer: `error` says why, by `code` and `message`."""
    return LineResult(line, False, _line(batch, line, custom_id, None, error))


EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def _response(batch: str, line: int, status: int, body: msgspec.Raw) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id_of(batch, line), "body": body}


def _line(
    batch: str, line: int, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    digest = hashlib.blake2b(request_id_of(batch, line).encode(), digest_size=12).hexdigest()
    return _encode(
        {"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response, "error": error}
    )


def _usage(body: bytes) -> TokenCounts:
    try:
        usage = _body.decode(body).usage or _Usage()
    except msgspec.DecodeError:
        return TokenCounts()
    details = usage.prompt_tokens_details or usage.input_tokens_details or {}
    cached = details.get("cached_tokens", 0)
    return TokenCounts(
        usage.prompt_tokens or usage.input_tokens,
        cached if isinstance(cached, int) else 0,
        usage.completion_tokens or usage.output_tokens,
    )
