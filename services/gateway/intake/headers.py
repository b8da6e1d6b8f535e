"""The headers of a request for tokens, checked, and of its answer. Every refusal is an `InvalidParameter`."""

import re
from collections.abc import Iterable, MutableMapping

import msgspec

from services.gateway.core.errors import InvalidParameter, unsupported

SESSION_ID = re.compile(r"[\x20-\x7e]{1,256}")
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,3})?")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Of an answer: whether its text is a function of the model, its settings and the request (`ModelCard.exact`).
EXACT_HEADER = "x-ryzanstein-exact"

# Of an answer: the fields of the request that changed nothing, with commas.
IGNORED_HEADER = "x-ryzanstein-ignored-fields"
MOST_IGNORED, LONGEST_IGNORED = 16, 64
_OTHER = re.compile(r"[^\w.\[\]-]", re.ASCII)


def check_session_id(value: str | None) -> str:
    """The X-Session-ID header, "" when it is missing. Raises `InvalidParameter`."""
    return _checked_header(value, SESSION_ID, "X-Session-ID", "1 to 256 printable ASCII characters")


def check_flag(value: str | None, name: str) -> bool:
    """A header that is true or false; left out or empty: false. Raises `InvalidParameter`."""
    given = (value or "false").lower()
    if given not in ("true", "false"):
        raise InvalidParameter(f"Invalid header '{name}': expected true or false.", param=name, reason="invalid_header")
    return given == "true"


def check_request_id(value: str | None) -> str:
    """The x-request-id header, "" when it is missing. Raises `InvalidParameter`."""
    wanted = "1 to 128 printable ASCII characters without spaces"
    return _checked_header(value, REQUEST_ID, "x-request-id", wanted)


def _checked_header(value: str | None, pattern: re.Pattern[str], name: str, wanted: str) -> str:
    if value is None:
        return ""
    if not pattern.fullmatch(value):
        raise InvalidParameter(f"Invalid header '{name}': expected {wanted}.", param=name, reason="invalid_header")
    return value


def check_idempotency_key(value: str | None) -> str:
    """The Idempotency-Key header, "" when it is missing. Raises `InvalidParameter`."""
    wanted = "1 to 255 printable ASCII characters without spaces"
    return _checked_header(value, IDEMPOTENCY_KEY, "Idempotency-Key", wanted)


def check_background(value: str | None, limit: float) -> float:
    """The seconds in the X-Ryzanstein-Background header, 0 when it is missing. Raises `InvalidParameter`."""
    if value is None:
        return 0.0
    wanted = f"seconds as a number above 0 and at most {limit:g}"
    name = "X-Ryzanstein-Background"
    given = float(_checked_header(value, SECONDS, name, wanted))
    if not 0 < given <= limit:
        raise InvalidParameter(f"Invalid header '{name}': expected {wanted}.", param=name, reason="invalid_header")
    return given


def tell_ignored(names: Iterable[str], headers: MutableMapping[str, str], *, strict: bool) -> None:
    """Adds `names` to the answer's header. Raises `InvalidParameter` for the first of them where `strict`."""
    told = headers.get(IGNORED_HEADER, "")
    before = told.split(", ") if told else []
    for name in names:
        if strict:
            raise unsupported(name[:LONGEST_IGNORED])
        shown = _OTHER.sub("?", name[:LONGEST_IGNORED])
        if shown not in before and len(before) < MOST_IGNORED:
            before.append(shown)
    if before:
        headers[IGNORED_HEADER] = ", ".join(before)


class IgnoredFields(msgspec.Struct, frozen=True):
    """Where the fields of one request are told that change nothing: in a header of its answer, or in a refusal."""

    headers: MutableMapping[str, str]
    strict: bool

    def tell(self, names: Iterable[str]) -> None:
        """Raises as `tell_ignored`."""
        tell_ignored(names, self.headers, strict=self.strict)
