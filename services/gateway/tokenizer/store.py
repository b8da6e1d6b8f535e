"""Tokenizers by name, loaded once each from the object store that executors fill."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Mapping

import msgspec
import structlog

from services.gateway.tokenizer.encoding import LARGE, Encoding
from services.gateway.tokenizer.template_process import TemplateProcess
from services.gateway.tokenizer.templates import templates_of
from services.gateway.tokenizer.tokenizer import ModelTokenizer, StubTokenizer, Tokenizer
from services.gateway.tool_calls.families import reasoning_named
from shared.errors import InternalError, Unavailable
from shared.limits import TOKENIZERS
from shared.messages import ModelCard, TokenizerBundle
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.objects import MissingObject, Objects
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)


class TokenizerStore:
    """Concurrent requests for one tokenizer share its loading; a failed one is tried again. The one that was not asked
    for the longest makes room for others."""

    def __init__(self, bus: Bus, *, special_tokens_in_messages: bool = False) -> None:
        """`special_tokens_in_messages`: see `ModelTokenizer`."""
        self._objects = Objects(bus, subjects.TOKENIZERS_STORE)
        self._special_tokens_in_messages = special_tokens_in_messages
        self._loading: OrderedDict[str, asyncio.Task[Tokenizer]] = OrderedDict()
        self._renderers: dict[str, TemplateProcess] = {}
        self._closing = TaskSet("")
        self._encoding = Encoding()
        self._stub, self._reasoning_stub = StubTokenizer(), StubTokenizer(reasons=True)

    async def start(self) -> None:
        """Creates the store: executors may create none. Raises `BrokerUnavailable`."""
        await self._objects.open()

    async def get(self, card: ModelCard, tenant: str = "") -> Tokenizer:
        """The tokenizer of `card`, for a request of `tenant`. Raises `Unavailable` while it cannot be had,
        `InternalError` when broken."""
        if not card.tokenizer:
            return self._reasoning_stub if reasoning_named(card.reasoning_parser) else self._stub
        return (await asyncio.shield(self._task(card.tokenizer))).of(tenant)

    def prefetch(self, card: ModelCard) -> None:
        """Begins to load the tokenizer of `card`, so that the first request need not wait."""
        if card.tokenizer:
            self._task(card.tokenizer)

    def _task(self, name: str) -> asyncio.Task[Tokenizer]:
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name))
            task.add_done_callback(lambda done: self._forget_failure(name, done))
        self._loading.move_to_end(name)
        while len(self._loading) > TOKENIZERS.value:
            self._forget(next(iter(self._loading)))
        return task

    def _forget(self, name: str) -> None:
        """Running answers keep theirs; whoever needs it again loads it again."""
        self._loading.pop(name, None)
        if (renderer := self._renderers.pop(name, None)) is not None:
            self._closing.spawn(renderer.close())

    def _forget_failure(self, name: str, task: asyncio.Task[Tokenizer]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(name)

    async def _load(self, name: str) -> Tokenizer:
        try:
            data = await self._objects.get(name)
        except MissingObject:
            raise Unavailable(f"The tokenizer {name} is not stored in NATS yet; try again.") from None
        files = msgspec.msgpack.decode(data, type=TokenizerBundle).files
        del data
        renderer = await self._renderer(name, files)
        make = functools.partial(
            ModelTokenizer, files, renderer, self._encoding, special_tokens_in_messages=self._special_tokens_in_messages
        )
        return await self._encoding.run(LARGE + 1, make)

    async def _renderer(self, name: str, files: Mapping[str, bytes]) -> TemplateProcess | None:
        try:
            templates = templates_of(files)
        except ValueError as error:
            raise InternalError(f"The tokenizer files of the model cannot be used: {error}.") from error
        if templates is None:
            return None
        renderer = self._renderers.setdefault(name, TemplateProcess(templates))
        await renderer.probe()
        if renderer.refused:
            log.error("chat_template_refused", tokenizer=name, limit=renderer.refused)
        return renderer

    async def stop(self) -> None:
        """Ends the processes that render and the threads that tokenize."""
        for task in self._loading.values():
            task.cancel()
        for name in list(self._renderers):
            self._forget(name)
        await self._closing.finished()
        self._encoding.stop()
