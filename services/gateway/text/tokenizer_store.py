"""Tokenizers by name, loaded once each from the object store that executors fill."""

import asyncio

import msgspec

from services.gateway.text.tokenization import ModelTokenizer, StubTokenizer, Tokenizer
from shared import subjects
from shared.bus import Bus
from shared.errors import Unavailable
from shared.messages import ModelCard, TokenizerBundle
from shared.stores import ObjectStore


class TokenizerStore:
    """Concurrent requests for one tokenizer share its loading; a failed one is tried again."""

    def __init__(self, bus: Bus) -> None:
        self._objects = ObjectStore(bus, subjects.TOKENIZERS_STORE)
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._stub = StubTokenizer()

    async def get(self, card: ModelCard) -> Tokenizer:
        """The tokenizer of `card`. Raises `Unavailable` while it cannot be had, `InternalError` when broken."""
        if not card.tokenizer:
            return self._stub
        return await asyncio.shield(self._task(card.tokenizer))

    def prefetch(self, card: ModelCard) -> None:
        """Begins to load the tokenizer of `card`, so that the first request need not wait."""
        if card.tokenizer:
            self._task(card.tokenizer)

    def _task(self, name: str) -> asyncio.Task[Tokenizer]:
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name))
            task.add_done_callback(lambda done: self._forget_failure(name, done))
        return task

    def _forget_failure(self, name: str, task: asyncio.Task[Tokenizer]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._loading.pop(name, None)

    async def _load(self, name: str) -> Tokenizer:
        data = await self._objects.get(name)
        if data is None:
            raise Unavailable(f"The tokenizer {name} is not stored in NATS yet; try again.")
        bundle = msgspec.msgpack.decode(data, type=TokenizerBundle)
        return await asyncio.to_thread(ModelTokenizer, bundle.files)
