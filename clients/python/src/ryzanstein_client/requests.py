"""What the blocking and the asynchronous client send alike. No I/O."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ryzanstein_client.cursor import Cursor
from ryzanstein_client.reading import Ask, Reading
from ryzanstein_client.types import GenerationState

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FIRST_WAIT = 0.05
"""Seconds before the first repeat; the later ones wait longer."""
LONGEST_WAIT = 1.0
"""A generation that nobody reads is kept for 5 s, unless more was asked for: be back before."""


class Gateways:
    """Addresses, and which is tried next."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        self._urls = [url.strip().rstrip("/").removesuffix("/v1") for url in given]
        if not all(self._urls) or not self._urls:
            raise ValueError("Name at least one gateway, as http://HOST:8000.")
        self._at = 0

    @property
    def current(self) -> str:
        return self._urls[self._at]

    def leave(self, url: str) -> None:
        """Goes on to the next one, if `url` is still the current one: others may have seen it first."""
        if url == self.current:
            self._at = (self._at + 1) % len(self._urls)


def credentials(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def new_reading(
    path: str, body: Mapping[str, Any], idempotency_key: str | None, background: float | None
) -> Reading:
    """A request that may be repeated: it always has a key."""
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    if background is not None:
        headers["X-Ryzanstein-Background"] = f"{background:g}"
    return Reading(Ask("POST", path, headers, {**body, "stream": True}))


def resumed(generation: str | Cursor, after: str | None) -> Reading:
    """The reading of a generation that runs, or has ended."""
    if isinstance(generation, Cursor):
        found = generation if after is None else Cursor(generation.generation, after)
    else:
        found = Cursor(generation, after or "")
    if found.generation.startswith("resp_"):
        raise ValueError(
            "A response is read on by OpenAI's client: responses.retrieve(..., starting_after=...)."
        )
    return Reading(None, found)


def path_of(generation: str | Cursor) -> str:
    name = generation.generation if isinstance(generation, Cursor) else generation
    return f"/v1/generations/{quote(name, safe='')}"


def state_from(answer: Mapping[str, Any]) -> GenerationState:
    return GenerationState(
        id=answer["id"],
        model=answer["model"],
        status=answer["status"],
        position=str(answer.get("position") or ""),
        response=answer.get("response"),
        error=answer.get("error"),
    )
