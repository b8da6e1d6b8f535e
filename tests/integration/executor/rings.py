"""Real rings of real processes with a tiny model, and sessions that converse with them turn by turn.

Nothing stands between test and leaders: the test dispatches as a scheduler does, and writes the groups' records as
the health monitor does, so that it decides who is a peer of whom.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from shared.config import CommonSettings
from shared.messages import (
    DispatchBatch,
    DispatchReply,
    GenerationRequest,
    GroupRecord,
    SamplingParams,
    SessionPin,
    SparseAttention,
    TokenFrame,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key
from tests.integration.executor.reader import Reader
from tests.processes import ServiceProcess, service_process
from tests.unit.executor.model.tiny import make_model
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

BLOCK = 4
CONTEXT = 1024
VOCABULARY = 258  # as many tokens as the tiny tokenizer has
MODEL = "tiny"
RING = ("--device", "cpu", "--dtype", "fp32", "--threads", "1", "--block-size", str(BLOCK), "--drain-grace", "5")
RING += ("--context-length", str(CONTEXT), "--served-model-name", MODEL)


def make_served_model(directory: Path, *, seed: int = 0, **sizes: int) -> Path:
    """A random model with a tokenizer that gateways can use. Another `seed`: other weights; a `head_dim` of 32: one
    for the native kernels."""
    of_all = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": 1}
    make_model(directory, "llama", rope_theta=1e4 + seed, **of_all, **sizes)
    for name, content in tiny_files().items():
        (directory / name).write_bytes(content)
    return directory


def request_of(group: str, number: int, length: int, **fields: Any) -> GenerationRequest:
    """The `number`th of a load of `group`, whose prompt of `length` tokens is the same for every group."""
    prompt = [3 + (number * 31 + i * 7) % (VOCABULARY - 3) for i in range(length)]
    return GenerationRequest(f"{group}-{number}", "r", MODEL, "me", prompt, **fields)


class Rings:
    """Groups by name."""

    def __init__(self, bus: Bus, settings: CommonSettings, directory: Path, stack: contextlib.AsyncExitStack):
        self.bus = bus
        self._settings = settings
        self._directory = directory
        self._stack = stack
        self.reader = Reader()
        self.processes: dict[str, ServiceProcess] = {}

    async def begin(
        self,
        group: str,
        model: Path,
        *arguments: str,
        memory: int = 4 << 20,
        variables: Mapping[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        more = ("--model", str(model), "--group", group, "--kv-memory", str(memory))
        context = service_process(
            self.bus,
            self._settings,
            "services.executor",
            self._directory,
            *RING,
            *more,
            *arguments,
            instance=f"executor-{group}",
            variables=variables,
            forked=forked,
        )
        self.processes[group] = await self._stack.enter_async_context(context)

    async def ready(self, *groups: str, timeout: float = 60) -> None:
        """Waits for them, each `timeout` seconds at most, and tells everybody that they serve."""
        for group in groups:
            beat = (await self.processes[group].wait_ready(timeout)).group
            await self.announce(GroupRecord(group, beat.model, "ready", beat.epoch, beat.ranks, beat.load))

    async def announce(self, record: GroupRecord) -> None:
        await (await Bucket.open(self.bus, subjects.GROUPS_BUCKET, GroupRecord)).put(record.group, record)

    async def hide(self, *but: str) -> None:
        """Nobody knows of any other group any more."""
        bucket = await Bucket.open(self.bus, subjects.GROUPS_BUCKET, GroupRecord)
        for group in set(await bucket.items()) - set(but):
            await bucket.delete(group)

    def kill_ring(self, group: str) -> None:
        """The executor and all its ranks, at once."""
        process = self.processes[group].process
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()

    async def until_logged(self, group: str, text: str) -> None:
        log = self.processes[group].log
        async with asyncio.timeout(30):
            while True:
                if text in log.read_text():
                    return
                await asyncio.sleep(0.05)

    async def hand_in(self, group: str, requests: Sequence[GenerationRequest]) -> None:
        """All at once, and all are taken."""
        batch = DispatchBatch(list(requests))
        reply = await self.bus.request(subjects.dispatch(group), batch, DispatchReply, timeout=10)
        assert len(reply.accepted) == len(requests), reply.refused

    async def texts(self, requests: Sequence[GenerationRequest]) -> list[tuple[list[int], str]]:
        """The tokens of requests that were handed in, and how they ended."""
        found = [await self.reader.finish(one.generation_id) for one in requests]
        return [(tokens, last.finish) for tokens, last in found]

    async def answer(self, group: str, request: GenerationRequest) -> tuple[list[int], int]:
        """Of one request: its tokens, and how many of its prompt `group` found in its cache."""
        await self.hand_in(group, [request])
        tokens, last = await self.reader.finish(request.generation_id)
        assert last.finish == "length", last.error
        own = [one for one in self.reader.entries if one.generation_id == request.generation_id]
        return tokens, max(one.cached_tokens for one in own)

    async def leave(self, group: str) -> str:
        """Ends it by its signal; returns what it logged."""
        process = self.processes[group]
        assert await process.end() == 0, process.log.read_text()
        return process.log.read_text()

    async def pin(self, session: str) -> SessionPin | None:
        bucket = await Bucket.open(self.bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)
        entry = await bucket.get(pin_key(MODEL, session))
        return None if entry is None else entry.value


@contextlib.asynccontextmanager
async def rings(bus: Bus, settings: CommonSettings, directory: Path) -> AsyncIterator[Rings]:
    async with contextlib.AsyncExitStack() as stack:
        made = Rings(bus, settings, directory, stack)
        await bus.subscribe(subjects.tokens("me"), TokenFrame, made.reader.on_frame)
        yield made


class Session:
    """A conversation: each turn's prompt is all that was said before, and something new."""

    def __init__(
        self, rings: Rings, name: str, beginning: list[int] | None = None, sparse: SparseAttention | None = None
    ) -> None:
        self._rings = rings
        self.name = name
        self._sparse = sparse
        self._random = random.Random(name)
        self.tokens = list(beginning or [])
        self._turns = 0

    @property
    def reusable(self) -> int:
        """Tokens of the next prompt that stand in full blocks of what was computed before."""
        computed = len(self.tokens) - 1 if self._turns else 0  # the last token was sampled, never computed
        return computed // BLOCK * BLOCK

    async def turn(self, group: str, new: int = 20, answer: int = 12) -> int:
        """Has `group` answer; returns how many tokens of the prompt it found in its cache."""
        name = f"{self.name}.{self._turns}"
        self.tokens += [self._random.randrange(3, VOCABULARY) for _ in range(new)]
        request = GenerationRequest(
            generation_id=name,
            request_id=name,
            model=MODEL,
            consumer="me",
            prompt=self.tokens,
            max_tokens=answer,
            sampling=SamplingParams(temperature=0.0),
            session=self.name,
            sparse=self._sparse,
        )
        tokens, cached = await self._rings.answer(group, request)
        self._turns += 1
        self.tokens += tokens
        return cached
