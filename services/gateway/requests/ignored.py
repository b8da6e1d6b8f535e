"""Fields that change nothing here: ignored, and named to the client; or refused, where the settings say so."""

import re
from collections.abc import Iterable, MutableMapping

import msgspec

from services.gateway.requests.refusals import asks_for_nothing, unsupported
from services.gateway.requests.schemas import IGNORED

HEADER = "x-ryzanstein-ignored-fields"
"""Of an answer: the fields of the request that changed nothing, with commas."""
MOST, LONGEST = 16, 64
_OTHER = re.compile(r"[^\w.\[\]-]", re.ASCII)


def given(request: msgspec.Struct) -> list[str]:
    """Fields of `request` that change nothing and are not neutral either."""
    return [
        name
        for name, neutral in IGNORED.items()
        if (value := getattr(request, name, None)) is not None and not asks_for_nothing(value, neutral)
    ]


def tell(names: Iterable[str], headers: MutableMapping[str, str], *, strict: bool) -> None:
    """Adds `names` to the answer's header. Raises `InvalidParameter` for the first of them where `strict`."""
    before = [name for name in headers.get(HEADER, "").split(", ") if name]
    for name in names:
        if strict:
            raise unsupported(name[:LONGEST])
        shown = _OTHER.sub("?", name[:LONGEST])
        if shown not in before and len(before) < MOST:
            before.append(shown)
    if before:
        headers[HEADER] = ", ".join(before)
