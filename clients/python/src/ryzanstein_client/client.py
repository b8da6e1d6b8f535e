"""The blocking client."""

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import EventSource

from ryzanstein_client import requests
from ryzanstein_client.cursor import Cursor
from ryzanstein_client.errors import ApiError, LostConnection, refusal, when_again
from ryzanstein_client.reading import Ask, Reading
from ryzanstein_client.types import GenerationState, Piece, Prefilled, Ranking


class Stream:
    """Pieces of one generation, whatever connections and gateways are lost on the way. Iterate once; close it, or
    use it as a context manager, when you leave early.

    Iterating raises `ApiError` for what the server refuses, and `httpx.TransportError` when no gateway could be
    reached for as long as the client's `patience`.
    """

    def __init__(self, client: "Client", reading: Reading) -> None:
        self._reading = reading
        self._pieces = client.pieces(reading)

    @property
    def cursor(self) -> Cursor | None:
        """Behind the last piece that was handed out; None before the first."""
        return self._reading.cursor

    def text(self) -> str:
        """What is left of the first choice's text, to its end."""
        return "".join(piece.text for piece in self if piece.choice == 0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Closes the connection. The generation ends some seconds later, unless somebody reads it, or it was asked
        to go on in the background."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(requests.Streams[Stream]):
    """Of one server with any number of gateways. Threads may share it. Use it as a context manager, or close it."""

    def __init__(
        self,
        url: str | Sequence[str],
        api_key: str = "",
        *,
        timeout: float = 60.0,
        patience: float = 120.0,
        answer_timeout: float = 600.0,
        http: httpx.Client | None = None,
    ) -> None:
        """`url`: a gateway, or several of which any will do. `timeout`: seconds of silence after which a connection
        counts as lost. `patience`: seconds since the first failure without anything new after which it gives up.
        `answer_timeout`: seconds for a whole answer of a model. `http`: a client with certificates or a proxy of
        your own; you close it."""
        super().__init__(url, api_key, patience, answer_timeout)
        self._owned = http is None
        self._http = http or httpx.Client(timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)))

    def open(self, reading: Reading) -> Stream:
        return Stream(self, reading)

    def start_chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        seconds: float = 600.0,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Cursor:
        """Begins a chat completion that goes on for `seconds` while nobody reads it. Returns at its first token,
        with a cursor at its beginning."""
        with self.stream_chat(
            model=model, messages=messages, idempotency_key=idempotency_key, background=seconds, **fields
        ) as stream:
            next(stream)
            assert stream.cursor is not None
            return Cursor(stream.cursor.generation)

    def state(self, generation: str | Cursor) -> GenerationState:
        """What has come of it so far."""
        return requests.state_from(self._call(Ask("GET", requests.path_of(generation))))

    def cancel(self, generation: str | Cursor) -> bool:
        """Ends it for everybody; False when it had ended already."""
        return bool(self._call(Ask("DELETE", requests.path_of(generation)))["cancelled"])

    def prefill(
        self, session: str, *, model: str, messages: Sequence[Mapping[str, Any]], wait: float = 30.0, **fields: Any
    ) -> Prefilled:
        """Has a conversation so far computed before its next request, which names the session in `X-Session-ID`.
        `wait`: seconds until it answers all the same, 0 to 60. `fields` are those of a chat completion."""
        body = {"model": model, "messages": list(messages), **fields}
        return requests.prefilled_from(self._call(requests.prefill_ask(session, body, wait)))

    def cancel_prefill(self, session: str) -> bool:
        """Ends what the session has under way at its gateway; False where there is nothing."""
        return bool(self._call(Ask("DELETE", requests.prefill_of(session)))["cancelled"])

    def rerank(
        self,
        *,
        model: str,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Ranking:
        """Documents by how well they answer a query, the best first. `fields` are those of the endpoint: `top_n`,
        `return_documents`, ... However often it is repeated on the way, it is computed once."""
        body = {"model": model, "query": query, "documents": documents, **fields}
        return requests.ranking_from(self._call(requests.new_ask(requests.RERANK, body, idempotency_key)))

    def score(
        self,
        *,
        model: str,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> list[float]:
        """Of each pair of texts: one with one, one with each of several, or several with as many."""
        body = {"model": model, "queries": queries, "documents": documents, **fields}
        answer = self._call(requests.new_ask(requests.SCORE, body, idempotency_key))
        return [pair["score"] for pair in answer["data"]]

    def close(self) -> None:
        if self._owned:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- shells of `Reading` and of retrying --------------------------------------------------------

    def pieces(self, reading: Reading) -> Generator[Piece, None, None]:
        """The loop behind `Stream`: `patience` begins anew with each connection that brought something."""
        while not reading.done:
            for attempt in self._attempts():
                with attempt:
                    yield from self._one_connection(reading)

    def _one_connection(self, reading: Reading) -> Generator[Piece, None, None]:
        """Ends with the stream, or when it was lost after something new had come; raises when nothing had."""
        before, url = reading.cursor, self._gateways.current
        try:
            yield from self._events(reading, url)
            if not reading.done:
                raise LostConnection("The stream ended in its middle.")
        except requests.LOST as error:
            self._lost(error, url)
            if reading.cursor == before or not when_again(error):
                raise

    def _events(self, reading: Reading, url: str) -> Generator[Piece, None, None]:
        ask = reading.ask()
        with self._http.stream(
            ask.method, url + ask.path, headers={**self._headers, **ask.headers}, json=ask.body
        ) as answer:
            if answer.status_code != 200:
                error = refusal(answer.status_code, answer.headers, answer.read())
                raise self._judged(error, reading)
            for event in EventSource(answer).iter_sse():
                piece = reading.take(event.data, event.id)
                if piece is not None:
                    yield piece
                if reading.done:
                    return

    def _judged(self, error: ApiError, reading: Reading) -> ApiError:
        """A generation that has failed or was cancelled says so for ever: trying again would not end."""
        if error.again and reading.cursor is not None:
            state = requests.state_from(self._answer(Ask("GET", requests.path_of(reading.cursor))))
            error.again = state.status not in ("failed", "cancelled")
        return error

    def _call(self, ask: Ask) -> dict[str, Any]:
        for attempt in self._attempts():
            with attempt:
                return self._answer(ask)
        raise AssertionError("stamina ends with an answer or an exception")

    def _answer(self, ask: Ask) -> dict[str, Any]:
        url = self._gateways.current
        try:
            answer = self._http.request(ask.method, url + ask.path, **self._options(ask))
            if not answer.is_success:
                raise refusal(answer.status_code, answer.headers, answer.content)
        except requests.LOST as error:
            self._lost(error, url)
            raise
        found: dict[str, Any] = answer.json()
        return found
