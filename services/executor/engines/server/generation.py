"""One request at the server: its events are checked, gathered, and taken as deltas.

server ══ events ══▶ read ─▶ check ─▶ gathered ──take──▶ EngineDelta
           ▲                            │
           └── not read while EVENTS_GATHERED wait: the server has to wait, too
"""

import asyncio
from collections.abc import Callable

import httpx
import msgspec

from services.executor.engines.base import EngineDelta, EngineRequest
from services.executor.engines.server.client import ServerClient, ServerFault, events
from services.executor.engines.server.dialects.base import ServerDialect, StreamPiece, code_of
from shared.errors import reason_of
from shared.messages import TokenLogprobs

EVENTS_GATHERED = 256  # of one request that nobody has taken yet
TOKENS_GATHERED = 4096  # in them, and in any one
EVENT_BYTES = 256 << 10  # of one event
# What an event may have more for each token of the request: servers tell the prompt again, or all output with each
# event, and that with log probabilities.
EVENT_BYTES_PER_TOKEN = 64


class ServerGeneration:
    def __init__(
        self,
        request: EngineRequest,
        client: ServerClient,
        dialect: ServerDialect,
        vocab_size: int,
        on_news: Callable[["ServerGeneration"], None],
    ) -> None:
        self.request = request
        self.answered = False  # whether the server has said anything
        self._on_news = on_news  # there is something to take
        self._client = client
        self._dialect = dialect
        self._vocab_size = vocab_size
        self._stops = frozenset(request.stop_token_ids)
        self._count = 0  # output tokens of it so far
        self._finish = ""  # what is told once the stream has ended: the last event may count cached tokens
        self._room = asyncio.Event()
        self._gathered = 0  # events that nobody has taken
        self._cached = 0
        self._vector = b""
        self._forget()

    def take(self) -> EngineDelta:
        """What has been gathered since."""
        delta = EngineDelta(
            self.request.id,
            self._tokens,
            self._told,  # type: ignore[arg-type]
            self._logprobs if self._tokens and self.request.sampling.logprobs >= 0 else None,
            self._cached,
            self._error,
            self._code,
            vector=self._vector if self._told else b"",
        )
        self._forget()
        return delta

    async def run(self) -> None:
        """Until it has ended. Raises `httpx.TransportError` where the connection breaks before."""
        dialect, pools = self._dialect, bool(self.request.pool)
        reader, path = dialect.reader(self.request), dialect.pooling_path if pools else dialect.path
        try:
            async with self._client.stream(path, dialect.body(self.request)) as response:
                self.answered = True
                if response.status_code != 200:
                    await self._refused(response)
                    return
                pieces = self._client.whole(response) if pools else events(response, self._event_bytes())
                async for event in pieces:
                    if await self._accept(reader(event)):
                        return
            self.end(self._finish, "its stream ended before the answer did")
        except httpx.TransportError:
            if not self._finish:
                raise
            self.end(self._finish, "")
        except msgspec.MsgspecError as error:
            self.end("", f"it sent what cannot be read ({reason_of(error)})")
        except ServerFault as fault:
            self.end("", str(fault))

    def end(self, finish: str, error: str, code: str = "internal_error") -> None:
        """`error`, the end of a sentence about the server, is told where there is no `finish`."""
        self._told = finish or "error"
        if not finish:
            self._error, self._code = f"{self._client.name} failed to generate: {error}", code
        self._on_news(self)

    async def _accept(self, piece: StreamPiece) -> bool:
        """Whether that was the last of it, so that the connection is closed and not read to its end."""
        if piece.error:
            self.end("", self._client.sentence(piece.error), piece.code)
            return True
        tokens = self._checked(piece)
        self._tokens += tokens
        self._count += len(tokens)
        if piece.logprobs is not None:
            self._logprobs += piece.logprobs[: len(tokens)]
        self._cached = max(self._cached, piece.cached_tokens)
        self._finish = self._finish or piece.finish
        self._vector = piece.vector
        if tokens and tokens[-1] in self._stops:
            if not self._finish:  # a server that does not know the request's stop tokens would go on
                self.end("stop", "")
                return True
            self._finish = "stop"  # also of the last token that was asked for
        self._gathered += 1
        self._on_news(self)
        while self._gathered >= EVENTS_GATHERED or len(self._tokens) >= TOKENS_GATHERED:
            self._room.clear()
            await self._room.wait()
        return False

    def _checked(self, piece: StreamPiece) -> list[int]:
        """Its tokens, until one that ends the answer."""
        tokens = piece.tokens
        if len(tokens) > TOKENS_GATHERED:
            raise ServerFault(f"it sent {len(tokens)} tokens in one event")
        if wrong := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise ServerFault(f"it sent the token id {wrong[0]}, where the vocabulary has {self._vocab_size}")
        if tokens and self._finish:
            raise ServerFault("it sent tokens after the end")
        if self._count + len(tokens) > self.request.max_tokens:
            raise ServerFault(f"it sent more than the {self.request.max_tokens} tokens that it was asked for")
        for index, token in enumerate(tokens[:-1]):
            if token in self._stops:
                piece.finish = ""
                return tokens[: index + 1]
        return tokens

    async def _refused(self, response: httpx.Response) -> None:
        answer = await self._client.error(response)
        self._client.refuse_unauthorized(answer)
        self.end("", f"it answers {answer.status}: {self._client.sentence(answer)}", code_of(answer.status))

    def _event_bytes(self) -> int:
        request = self.request
        of_output = request.max_tokens * (2 + max(0, request.sampling.logprobs))
        return EVENT_BYTES + EVENT_BYTES_PER_TOKEN * (len(request.tokens) + of_output)

    def _forget(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cached = 0
        self._told = self._error = self._code = ""
        self._gathered = 0
        self._room.set()
