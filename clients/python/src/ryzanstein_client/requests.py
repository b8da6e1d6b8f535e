"""What the blocking and the asynchronous client do alike. No I/O."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import stamina

from ryzanstein_client.cursor import Cursor
from ryzanstein_client.errors import ApiError, when_again
from ryzanstein_client.reading import Ask, Reading
from ryzanstein_client.types import GenerationState, Prefilled, RankedDocument, Ranking

StreamT = TypeVar("StreamT")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
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


class Patience:
    """For stamina: whether to try again, until `length` seconds after the first of the failures in a row."""

    def __init__(self, length: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._length = length
        self._clock = clock
        self._end: float | None = None

    def __call__(self, error: Exception) -> bool | float:
        now = self._clock()
        self._end = self._end or now + self._length
        return now < self._end and when_again(error)


def new_ask(path: str, body: Mapping[str, Any], idempotency_key: str | None, background: float | None = None) -> Ask:
    """A request that may be repeated: it always has a key."""
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    if background is not None:
        headers["X-Ryzanstein-Background"] = f"{background:g}"
    return Ask("POST", path, headers, body)


def new_reading(path: str, body: Mapping[str, Any], idempotency_key: str | None, background: float | None) -> Reading:
    return Reading(new_ask(path, {**body, "stream": True}, idempotency_key, background))


def resumed(generation: str | Cursor, after: str | None) -> Reading:
    """The reading of a generation that runs, or has ended."""
    if isinstance(generation, Cursor):
        found = generation if after is None else Cursor(generation.generation, after)
    else:
        found = Cursor(generation, after or "")
    if found.generation.startswith("resp_"):
        raise ValueError("A response is read on by OpenAI's client: responses.retrieve(..., starting_after=...).")
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


def prefill_of(session: str) -> str:
    return f"/v1/sessions/{quote(session, safe='')}/prefill"


def prefill_ask(session: str, body: Mapping[str, Any], wait: float) -> Ask:
    """It has no key: the same again joins it, or finds what it has computed."""
    return Ask("POST", f"{prefill_of(session)}?wait={wait:g}", {}, body)


def prefilled_from(answer: Mapping[str, Any]) -> Prefilled:
    return Prefilled(
        status=answer["status"],
        prompt_tokens=answer["prompt_tokens"],
        cached_tokens=answer["cached_tokens"],
        computed_tokens=answer["computed_tokens"],
        raw=answer,
    )


def ranking_from(answer: Mapping[str, Any]) -> Ranking:
    results = [
        RankedDocument(found["index"], found["relevance_score"], (found.get("document") or {}).get("text"))
        for found in answer["results"]
    ]
    return Ranking(results, answer)


class Streams(Generic[StreamT]):
    """The streams that both clients open; each says what a stream is to it (`open`)."""

    def __init__(self, url: str | Sequence[str], api_key: str, patience: float, answer_timeout: float) -> None:
        self._gateways = Gateways(url)
        self._answer_timeout = httpx.Timeout(answer_timeout, connect=min(answer_timeout, 5.0))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience = patience

    def open(self, reading: Reading) -> StreamT:
        """A stream of what `reading` reads."""
        raise NotImplementedError

    def stream_chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        idempotency_key: str | None = None,
        background: float | None = None,
        **fields: Any,
    ) -> StreamT:
        """A chat completion. `fields` are those of the endpoint.

        `idempotency_key`: yours, so that another process can repeat the request; else one is made up.
        `background`: seconds for which it goes on with no reader; else the server's grace of 5 s.
        """
        body = {"model": model, "messages": list(messages), **fields}
        return self.open(new_reading(CHAT, body, idempotency_key, background))

    def stream_completion(
        self,
        *,
        model: str,
        prompt: str | Sequence[int],
        idempotency_key: str | None = None,
        background: float | None = None,
        **fields: Any,
    ) -> StreamT:
        """A completion of a prompt; otherwise as `stream_chat`."""
        body = {"model": model, "prompt": prompt, **fields}
        return self.open(new_reading(COMPLETIONS, body, idempotency_key, background))

    def attach(self, generation: str | Cursor, after: str | None = None) -> StreamT:
        """Reads a generation from its beginning, or behind the position `after`; a cursor has its own."""
        return self.open(resumed(generation, after))

    def _lost(self, error: Exception, url: str) -> None:
        """What `url` has answered with, or that it has not: another gateway is next, where that may help."""
        if when_again(error):
            self._gateways.leave(url)

    def _options(self, ask: Ask) -> dict[str, Any]:
        """What httpx is given; what has a body is work of a model, which takes longer than a look at a state."""
        work = {} if ask.body is None else {"json": ask.body, "timeout": self._answer_timeout}
        return {"headers": {**self._headers, **ask.headers}, **work}

    def _attempts(self) -> Any:
        return stamina.retry_context(
            on=Patience(self._patience),
            attempts=None,
            timeout=None,
            wait_initial=FIRST_WAIT,
            wait_max=LONGEST_WAIT,
            wait_jitter=FIRST_WAIT,
        )


LOST = (httpx.TransportError, ApiError)
"""What a request ends with that another try may mend."""
