"""Errors as clients see them: a status, a body in OpenAI's shape, and the words for what is wrong with a field.

What is beyond a type, or beyond the range, length or values that its annotation gives a field, msgspec finds while it
decodes; `refusal` says it as an `InvalidParameter`, in one place for REST, WebSocket, gRPC and batches. Words and codes
follow OpenAI's, because clients and their users know them.
"""

import contextlib
import logging
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import inspect

from shared.errors import (
    BrokerUnavailable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelDoesNotFit,
    NoGroupAvailable,
    PayloadTooLarge,
    QueueFull,
    RyzansteinError,
    StorageFull,
    Unavailable,
    UnknownModel,
)
from shared.keys import redact
from shared.limits import NESTING, Limit

T = TypeVar("T")
log = structlog.get_logger(__name__)


class RequestTimeout(InvalidRequest):
    """The client has not sent the whole request in time."""

    code = "request_timeout"


class KeyReused(InvalidRequest):
    """Another body came under an idempotency key that is known already."""

    code = "idempotency_key_reused"


class AuthenticationFailed(InvalidRequest):
    """There is no API key, or not one that is good."""

    code = "invalid_api_key"
    headers = {"www-authenticate": 'Bearer realm="ryzanstein"'}


class RateLimited(Unavailable):
    """A key or a tenant has done as much as it may within this minute, or has as much under way."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, wait: float = 0.0) -> None:
        """`kind`: requests or tokens, OpenAI's type of the error; `wait`: seconds to the next try, 0: none will do."""
        super().__init__(message, retry_after=math.ceil(wait) or None)
        self.kind = kind
        self.wait = wait
        self.headers = {"retry-after-ms": str(math.ceil(wait * 1000))} if wait else {}


class QuotaExceeded(InvalidRequest):
    """A tenant keeps as much as it may: waiting does not help, deleting does."""

    code = "quota_exceeded"
    headers = {"x-should-retry": "false"}  # asks OpenAI's clients, which would try again after a 429, not to


class ModelLoadFailed(Unavailable):
    """A model that was asked for could not be loaded: the same request fails again until somebody changes something."""

    code = "model_load_failed"
    retryable = False
    headers = {"x-should-retry": "false"}


_STATUS: list[tuple[type[RyzansteinError], int]] = [
    (AuthenticationFailed, 401),
    (UnknownModel, 404),
    (ModelDoesNotFit, 409),
    (ContextLengthExceeded, 400),
    (PayloadTooLarge, 413),
    (RequestTimeout, 408),
    (KeyReused, 422),
    (RateLimited, 429),
    (QuotaExceeded, 429),
    (QueueFull, 429),
    (NoGroupAvailable, 503),
    (DeadlineExceeded, 504),
    (StorageFull, 507),
    (BrokerUnavailable, 503),
    (Unavailable, 503),
]
_RETRY_AFTER = {429: 1.0, 503: 2.0, 504: 2.0}


CLIENT_GONE = 499  # nginx's status for a request that its client gave up; in logs and metrics alone


class InvalidParameter(InvalidRequest):
    """A field of the request is wrong; `reason` is OpenAI's code for how, e.g. `invalid_type`."""

    def __init__(
        self, message: str, *, param: str | None, reason: str = "invalid_value", problems: "Sequence[FieldProblem]" = ()
    ) -> None:
        super().__init__(message, param=param)
        self.reason = reason
        self.problems = problems  # everything that is wrong, where more than one thing is told


class InvalidField(InvalidParameter):
    """The same, said of one field; `wrong`: what is, as the end of the sentence."""

    def __init__(self, param: str, wrong: str, *, reason: str = "invalid_value") -> None:
        super().__init__(f"Invalid '{param}': {wrong}", param=param, reason=reason)


@contextlib.contextmanager
def renamed(
    names: Mapping[str, str],
    prompt: str,
    words: Mapping[str, str] = MappingProxyType({}),
    place_of: Callable[[str], str] = str,
) -> Iterator[None]:
    """Errors of what a request was translated into, in the words of the request. `names`: see `own_name`; `prompt`: its
    field that may be too long; `words`: of the error that says so, in order; `place_of`: the place in the request of
    what stands elsewhere, before it is named."""
    try:
        yield
    except InvalidParameter as error:
        if not error.param:
            raise
        param = own_name(place_of(error.param), names)
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise InvalidParameter(message, param=param, reason=error.reason) from None
    except ContextLengthExceeded as error:
        message = error.message
        for word, own in words.items():
            message = message.replace(word, own)
        raise ContextLengthExceeded(message, param=prompt) from None


def own_name(param: str, names: Mapping[str, str]) -> str:
    """What a field of a chat, or a part of one, is called in another API; a longer one of `names` stands before its
    beginning."""
    for name, ours in names.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return ours + param[len(name) :]
    return param


def hinted(error: InvalidParameter, names: Mapping[str, str]) -> InvalidParameter:
    """`error`, with the name of its own that an API has for an unknown field which is one of a chat."""
    last = (error.param or "").rpartition(".")[2]
    if error.reason != "unknown_parameter" or last not in names:
        return error
    message = f"{error.message.rstrip('.')}; this API has '{names[last]}' for it."
    return InvalidParameter(message, param=error.param, reason=error.reason)


class RouteError(InvalidRequest):
    """The URL or method is wrong, or what it names is not there."""

    def __init__(
        self, message: str, *, status: int = 404, reason: str = "not_found", allow: str = "", param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.reason = reason
        self.allow = allow  # methods that the URL takes, for the header of that name


class FieldProblem(msgspec.Struct, frozen=True):
    """One of several things that are wrong."""

    field: str
    message: str


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None
    # Of a model's entry in the registry: all that is wrong with it.
    errors: list[FieldProblem] | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def status_of(error: BaseException) -> int:
    """The HTTP status for `error`; 500 for what is a fault of ours."""
    if isinstance(error, RouteError):
        return error.status
    if isinstance(error, ClientGone):
        return CLIENT_GONE
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 400 if isinstance(error, InvalidRequest) else 500


def describe(error: BaseException, request_id: str) -> ErrorBody:
    """`error` for the client. A fault of ours shows nothing of our insides, only the request's id."""
    status = status_of(error)
    if status == 500 or not isinstance(error, RyzansteinError):
        message = f"The server failed on this request because of a bug; report it with the request id {request_id}."
        return ErrorBody(ErrorDetail(redact(message), "server_error", None, "internal_error"))
    code = getattr(error, "reason", None) or error.code
    kind = getattr(error, "kind", None) or _type(status)
    errors = list(getattr(error, "problems", ())) or msgspec.UNSET
    return ErrorBody(ErrorDetail(redact(error.message), kind, error.param, code, errors))


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers that belong to `error`: its own, Retry-After (whole seconds, at least 1), Allow, and Connection
    where what is left of the request must not be taken for the next one."""
    headers: dict[str, str] = dict(getattr(error, "headers", {}))
    seconds: Any = getattr(error, "retry_after", None)
    if seconds is None and not isinstance(error, (RateLimited, QuotaExceeded)):
        seconds = _RETRY_AFTER.get(status_of(error))
    if seconds is not None:
        headers["retry-after"] = str(max(1, round(seconds)))
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    if isinstance(error, RouteError) and error.allow:
        headers["allow"] = error.allow
    return headers


class ClientGone(Exception):
    """The client closed its connection."""


def log_failure(error: Exception) -> None:
    """A fault of ours with its stack trace, anything else as a line. What is wrong with a request has a code
    here: the words that say so, and the field's name, may be the client's."""
    if isinstance(error, InvalidRequest):
        log.info("request_refused", code=error.code, reason=getattr(error, "reason", "") or error.code)
    elif isinstance(error, RyzansteinError):
        fault = isinstance(error, InternalError)
        log.log(logging.ERROR if fault else logging.INFO, "generation_failed", code=error.code, error=str(error))
    else:
        log.exception("request_failed", exc_info=error)


# --- what is wrong with a field -------------------------------------------------------------------


def unsupported(name: str, detail: str = "leave it out", *, where: str = "by this server") -> InvalidParameter:
    return InvalidParameter(
        f"Unsupported parameter: '{name}' is not supported {where}; {detail}.",
        param=name,
        reason="unsupported_parameter",
    )


def missing(name: str, wanted: str = "") -> InvalidParameter:
    """`wanted`: what to send, where the name does not say it."""
    return InvalidParameter(
        f"Missing required parameter: '{name}'{wanted and f'; send {wanted}'}.",
        param=name,
        reason="missing_required_parameter",
    )


def check_size(name: str, given: Collection[object] | None, limit: Limit) -> None:
    """Raises `InvalidParameter` where a text has more characters, or anything else more entries, than `limit`."""
    if given is not None and len(given) > limit.value:
        raise above(name, given, limit)


def above(name: str, given: Collection[object], limit: Limit) -> InvalidParameter:
    """What `check_size` raises."""
    most, got = limit.value, len(given)
    if isinstance(given, Mapping):
        what = f"too many properties. Expected an object with at most {most} properties, but got an object with {got}"
        reason = "object_above_max_properties"
    else:
        kind, reason = "array", "array_above_max_length"
        if isinstance(given, str):
            kind, reason = "string", "string_above_max_length"
        article = "an" if kind == "array" else "a"
        what = (
            f"{kind} too long. Expected {article} {kind} with maximum length {most}, but got {article} {kind} with "
            f"length {got}"
        )
    return InvalidField(name, f"{what} instead ({limit.cited()}).", reason=reason)


def empty_array(name: str) -> InvalidParameter:
    return InvalidField(
        name,
        "empty array. Expected an array with minimum length 1, but got an empty array instead.",
        reason="empty_array",
    )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises `InvalidParameter` when `value` is not within `low` and `high`."""
    if not low <= value <= high:
        sign, bound = ("<=", high) if value > high else (">=", low)
        raise out_of_range(name, value, sign, bound, whole=isinstance(value, int))


def out_of_range(
    name: str, value: float, sign: str, bound: float | str, *, whole: bool, limit: Limit | None = None
) -> InvalidParameter:
    """`value` should be `sign` (`>=`, say) `bound`. `whole`: so it is for integers."""
    kind = "integer" if whole else "decimal"
    side, code = ("above maximum", "above_max") if sign.startswith("<") else ("below minimum", "below_min")
    cited = f" ({limit.cited()})" if limit and sign == "<=" else ""
    return InvalidField(
        name,
        f"{kind} {side} value. Expected a value {sign} {bound}, but got {value} instead{cited}.",
        reason=f"{kind}_{code}_value",
    )


def too_deep(value: Any) -> bool:
    """Whether `value` has more levels than the limit `nesting`."""
    level = [value]
    for _ in range(NESTING.value + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


# --- what msgspec refuses -------------------------------------------------------------------------


def convert(fields: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """`fields`, which came in another form than JSON, as a request. `strict`: a text is no number. Raises
    `InvalidParameter`."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, lambda: fields) from None


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?$")
_TYPE = re.compile(r"Expected `(.+?)`, got `(.+?)`$")
_BOUND = re.compile(r"Expected `(\w+)`( of length)? ([<>]=?) (\S+?)(?:\.0)?$")
_VALUE = re.compile(r"Invalid enum value '?(.*?)'?$", re.DOTALL)
# Of the field that says which of several kinds an object is.
_TAG = re.compile(r"Invalid value '?(.*?)'?$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")  # what msgspec takes for an integer among the keys of an object
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_KINDS: dict[str, type[inspect.Type]] = {
    "int": inspect.IntType,
    "float": inspect.FloatType,
    "str": inspect.StrType,
    "array": inspect.ListType,
    "object": inspect.DictType,
    "value": inspect.LiteralType,
}
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def refusal(error: msgspec.ValidationError, kind: Any, given: Callable[[], Any]) -> InvalidParameter:
    """`error`, for which what `given` returns is no `kind`, for the client."""
    text = str(error)
    for pattern, words in ((_UNKNOWN, "Unknown"), (_MISSING, "Missing required")):
        if match := pattern.match(text):
            name = f"{match[2]}.{match[1]}" if match[2] else match[1]
            reason = f"{words.lower().replace(' ', '_')}_parameter"
            return InvalidParameter(f"{words} parameter: '{name}'.", param=name, reason=reason)
    what, at, where = text.rpartition(" - at ")
    what, where = (what, where) if at else (text, "")
    path, in_key = where.rpartition("`$")[2].strip("`").lstrip("."), where.startswith("`key`")
    if match := _TYPE.match(what):
        return _wrong_key(path, given) if in_key else _wrong_type(path, match[1], match[2])
    try:
        return _beyond(what, path, in_key, _info(kind), given)
    except (LookupError, TypeError, ValueError, RecursionError, StopIteration):
        return InvalidParameter(f"Invalid value for '{path}': {what}.", param=path)


def _wrong_type(param: str, expected: str, got: str) -> InvalidParameter:
    kinds = [_WORDS.get(kind, kind) for kind in expected.split(" | ") if kind != "null"]
    wanted = kinds[0] if len(kinds) == 1 else "one of " + " or ".join(kinds)
    what = f"for '{param}'" if param else "of the body"
    shown = _WORDS.get(got, got)
    if got == "float" and "int" in expected.split(" | "):
        shown = "a number with a fraction, or one beyond 64 bits,"
    return InvalidParameter(
        f"Invalid type {what}: expected {wanted}, but got {shown} instead.", param=param or None, reason="invalid_type"
    )


def _wrong_key(path: str, given: Callable[[], Any]) -> InvalidParameter:
    """What stands at `path` is an object by token ids, and has a key that is no integer; msgspec does not say which."""
    try:
        _, keys = _find(given(), path, bool)
        wrong = next(f" {key[:64]!r}" for key in keys if not _INTEGER.fullmatch(key))
    except (msgspec.DecodeError, LookupError, TypeError, StopIteration):
        wrong = ""  # more is wrong with the body
    return InvalidParameter(
        f"Invalid key{wrong} in '{path}': expected the id of a token, an integer from 0 to the size of the model's "
        "vocabulary less 1.",
        param=path,
        reason="invalid_token_id",
    )


def _beyond(what: str, path: str, in_key: bool, info: inspect.Type, given: Callable[[], Any]) -> InvalidParameter:
    """Of a value that has the right type. Raises `LookupError` where nothing else is to be said."""
    if match := _TAG.match(what):
        kinds = _branches(_type_at(info, path.rpartition(".")[0], in_key))
        tags = [str(kind.tag) for kind, _ in kinds if isinstance(kind, inspect.StructType) and kind.tag]
        return _unknown_value(match[1], path, dict.fromkeys(tags))
    node = _type_at(info, path, in_key)
    if match := _BOUND.match(what):
        kind, of_length, sign, bound = match.groups()
        most = float(bound)

        def wrong(value: Any) -> bool:
            return not _SIGNS[sign](len(value) if of_length else value, most)

        name, value = _find(given(), path, wrong)
        if in_key:
            value = next(filter(wrong, value))
        limit = _said(node, kind).get("limit")
        if of_length:
            error = _wrong_length(name, value, limit, in_key)
        else:
            error = out_of_range(name, value, sign, bound, whole=kind == "int", limit=limit)
        return InvalidParameter(error.message, param=_without_index(name), reason=error.reason)
    if match := _VALUE.match(what):
        said = _said(node, "value")
        return _unknown_value(match[1], path, said["values"], said.get("reason", "invalid_value"))
    if not what.startswith("Expected `str` matching"):
        raise LookupError(what)
    said = _said(node, "str")
    return InvalidParameter(
        f"Invalid '{path}': expected {said['expected']}.",
        param=_without_index(path),
        reason=said.get("reason", "invalid_value"),
    )


def _unknown_value(given: str, path: str, known: Iterable[object], reason: str = "invalid_value") -> InvalidParameter:
    supported = ", ".join(f"'{value}'" for value in known)
    message = f"Invalid value: '{given[:64]}'. Supported values of '{path}' are: {supported}."
    return InvalidParameter(message, param=path, reason=reason)


def _wrong_length(name: str, value: Any, limit: Limit | None, in_key: bool) -> InvalidParameter:
    if value:
        assert limit is not None
        return above(name, value, limit)
    if in_key:
        message = f"Invalid '{name}': a key is empty; a key has at least one character."
        return InvalidParameter(message, param=name)
    if isinstance(value, str):
        message = f"Invalid '{name}': empty string. Expected at least one character."
        return InvalidParameter(message, param=name, reason="empty_string")
    return empty_array(name)


def _without_index(name: str) -> str:
    """The array of an element: clients know that by its name."""
    return name[: name.rindex("[")] if name.endswith("]") else name


def _find(given: Any, path: str, wrong: Callable[[Any], bool]) -> tuple[str, Any]:
    """The name and value of what msgspec means by `path`, in which the key of an object is `[...]`."""
    name = ""
    for index, field in _STEP.findall(path):
        if index.isdigit():
            given, name = given[int(index)], f"{name}[{index}]"
        else:
            key = field or next(key for key, value in given.items() if wrong(value))
            given, name = given[key], f"{name}.{key}" if name else key
    return name, given


_info = cache(inspect.type_info)


def _type_at(node: inspect.Type, path: str, in_key: bool) -> inspect.Type:
    """Of objects of several kinds, what stands there in any of them."""
    for index, field in _STEP.findall(path):
        inner = [one for branch, _ in _branches(node) for one in _inner(branch, index, field)]
        node = inner[0] if len(inner) == 1 else inspect.UnionType(tuple(inner))
    if in_key:
        return next(one.key_type for one, _ in _branches(node) if isinstance(one, inspect.DictType))
    return node


def _inner(node: inspect.Type, index: str, field: str) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.StructType):
        yield from (one.type for one in node.fields if one.encode_name == field)
    elif isinstance(node, inspect.ListType) and index.isdigit():
        yield node.item_type
    elif isinstance(node, inspect.DictType) and index == "...":
        yield node.value_type


def _said(node: inspect.Type, word: str) -> dict[str, Any]:
    """What the annotation of the branch of `node` that msgspec calls `word` says besides its bounds."""
    for branch, extra in _branches(node):
        if isinstance(branch, _KINDS[word]):
            return extra | ({"values": branch.values} if isinstance(branch, inspect.LiteralType) else {})
    raise LookupError(word)


def _branches(
    node: inspect.Type, extra: Mapping[str, Any] | None = None
) -> Iterator[tuple[inspect.Type, dict[str, Any]]]:
    """The types of a union, or the one, each with what annotations say besides its bounds."""
    if isinstance(node, inspect.Metadata):
        yield from _branches(node.type, {**(extra or {}), **(node.extra or {})})
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _branches(one, extra)
    else:
        yield node, dict(extra or {})
