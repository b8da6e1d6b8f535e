"""The asynchronous client: what `client.py` has, for asyncio."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import EventSource

from ryzanstein_client import requests
from ryzanstein_client.cursor import Cursor
from ryzanstein_client.errors import ApiError, LostConnection, refusal, when_again
from ryzanstein_client.reading import Ask, Reading
from ryzanstein_client.types import GenerationState, Piece, Prefilled, Ranking


class AsyncStream:
    """As `Stream`; leave it by `aclose`, or use it as a context manager."""

    def __init__(self, client: "AsyncClient", reading: Reading) -> None:
        self._reading = reading
        self._pieces = client.pieces(reading)

    @property
    def cursor(self) -> Cursor | None:
        """Behind the last piece that was handed out; None before the first."""
        return self._reading.cursor

    async def text(self) -> str:
        """What is left of the first choice's text, to its end."""
        return "".join([piece.text async for piece in self if piece.choice == 0])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """As `Stream.close`."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient(requests.Streams[AsyncStream]):
    """As `Client`, for one event loop."""

    def __init__(
        self,
        url: str | Sequence[str],
        api_key: str = "",
        *,
        timeout: float = 60.0,
        patience: float = 120.0,
        answer_timeout: float = 600.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """As `Client`."""
        super().__init__(url, api_key, patience, answer_timeout)
        self._owned = http is None
        self._http = http or httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)))

    def open(self, reading: Reading) -> AsyncStream:
        return AsyncStream(self, reading)

    async def start_chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        seconds: float = 600.0,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Cursor:
        """As `Client.start_chat`."""
        async with self.stream_chat(
            model=model, messages=messages, idempotency_key=idempotency_key, background=seconds, **fields
        ) as stream:
            await anext(stream)
            assert stream.cursor is not None
            return Cursor(stream.cursor.generation)

    async def state(self, generation: str | Cursor) -> GenerationState:
        """As `Client.state`."""
        return requests.state_from(await self._call(Ask("GET", requests.path_of(generation))))

    async def cancel(self, generation: str | Cursor) -> bool:
        """As `Client.cancel`."""
        return bool((await self._call(Ask("DELETE", requests.path_of(generation))))["cancelled"])

    async def prefill(
        self, session: str, *, model: str, messages: Sequence[Mapping[str, Any]], wait: float = 30.0, **fields: Any
    ) -> Prefilled:
        """As `Client.prefill`."""
        body = {"model": model, "messages": list(messages), **fields}
        return requests.prefilled_from(await self._call(requests.prefill_ask(session, body, wait)))

    async def cancel_prefill(self, session: str) -> bool:
        """As `Client.cancel_prefill`."""
        return bool((await self._call(Ask("DELETE", requests.prefill_of(session))))["cancelled"])

    async def rerank(
        self,
        *,
        model: str,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Ranking:
        """As `Client.rerank`."""
        body = {"model": model, "query": query, "documents": documents, **fields}
        return requests.ranking_from(await self._call(requests.new_ask(requests.RERANK, body, idempotency_key)))

    async def score(
        self,
        *,
        model: str,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> list[float]:
        """As `Client.score`."""
        body = {"model": model, "queries": queries, "documents": documents, **fields}
        answer = await self._call(requests.new_ask(requests.SCORE, body, idempotency_key))
        return [pair["score"] for pair in answer["data"]]

    async def aclose(self) -> None:
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- shells of `Reading` and of retrying --------------------------------------------------------

    async def pieces(self, reading: Reading) -> AsyncGenerator[Piece, None]:
        """The loop behind `AsyncStream`, as `Client.pieces`."""
        while not reading.done:
            async for attempt in self._attempts():
                with attempt:
                    async with aclosing(self._one_connection(reading)) as pieces:
                        async for piece in pieces:
                            yield piece

    async def _one_connection(self, reading: Reading) -> AsyncGenerator[Piece, None]:
        """Ends with the stream, or when it was lost after something new had come; raises when nothing had."""
        before, url = reading.cursor, self._gateways.current
        try:
            async with aclosing(self._events(reading, url)) as pieces:
                async for piece in pieces:
                    yield piece
            if not reading.done:
                raise LostConnection("The stream ended in its middle.")
        except requests.LOST as error:
            self._lost(error, url)
            if reading.cursor == before or not when_again(error):
                raise

    async def _events(self, reading: Reading, url: str) -> AsyncGenerator[Piece, None]:
        ask = reading.ask()
        async with self._http.stream(
            ask.method, url + ask.path, headers={**self._headers, **ask.headers}, json=ask.body
        ) as answer:
            if answer.status_code != 200:
                error = refusal(answer.status_code, answer.headers, await answer.aread())
                raise await self._judged(error, reading)
            async with aclosing(EventSource(answer).aiter_sse()) as events:
                async for event in events:
                    piece = reading.take(event.data, event.id)
                    if piece is not None:
                        yield piece
                    if reading.done:
                        return

    async def _judged(self, error: ApiError, reading: Reading) -> ApiError:
        """A generation that has failed or was cancelled says so for ever: trying again would not end."""
        if error.again and reading.cursor is not None:
            state = requests.state_from(await self._answer(Ask("GET", requests.path_of(reading.cursor))))
            error.again = state.status not in ("failed", "cancelled")
        return error

    async def _call(self, ask: Ask) -> dict[str, Any]:
        async for attempt in self._attempts():
            with attempt:
                return await self._answer(ask)
        raise AssertionError("stamina ends with an answer or an exception")

    async def _answer(self, ask: Ask) -> dict[str, Any]:
        url = self._gateways.current
        try:
            answer = await self._http.request(ask.method, url + ask.path, **self._options(ask))
            if not answer.is_success:
                raise refusal(answer.status_code, answer.headers, answer.content)
        except requests.LOST as error:
            self._lost(error, url)
            raise
        found: dict[str, Any] = answer.json()
        return found
