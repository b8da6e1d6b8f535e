"""A consumer of tokens, as a gateway is one."""

import asyncio

from shared.messages import (
    ControlCommand,
    ControlReply,
    DispatchBatch,
    DispatchReply,
    GenerationRequest,
    SamplingParams,
    TokenEntry,
    TokenFrame,
)
from shared.nats import subjects
from shared.nats.bus import Bus


class Reader:
    """Everything that is published for one consumer."""

    def __init__(self) -> None:
        self.entries: list[TokenEntry] = []
        self.epochs: set[int] = set()
        self._news = asyncio.Event()

    async def on_frame(self, frame: TokenFrame) -> None:
        # Entries without tokens say which group has accepted a request, once per hand-in.
        self.entries += [entry for entry in frame.entries if entry.tokens or entry.finish]
        self.epochs.add(frame.epoch)
        self._news.set()

    async def finish(self, generation_id: str) -> tuple[list[int], TokenEntry]:
        """The tokens of a generation, in order, and its last entry."""
        async with asyncio.timeout(60):
            while True:
                of_it = [entry for entry in self.entries if entry.generation_id == generation_id]
                if of_it and of_it[-1].finish:
                    tokens: list[int] = []
                    for entry in of_it:
                        assert entry.position == of_it[0].position + len(tokens), "a gap or a repeat"
                        tokens += entry.tokens
                    return tokens, of_it[-1]
                self._news.clear()
                await self._news.wait()

    async def some(self) -> None:
        """Returns once a token has come."""
        async with asyncio.timeout(30):
            while not self.entries:
                await self.more()

    async def more(self) -> None:
        """Returns when the next frame comes."""
        self._news.clear()
        await self._news.wait()


def request(
    name: str, *, model: str = "stub", max_tokens: int = 8, seed: int = 1, generated: list[int] | None = None
) -> GenerationRequest:
    return GenerationRequest(
        generation_id=name,
        request_id=f"request-of-{name}",
        model=model,
        consumer="me",
        prompt=[1, 2, 3],
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        generated=generated or [],
        attempt=1 if generated else 0,
    )


async def dispatch(bus: Bus, *requests: GenerationRequest) -> DispatchReply:
    return await bus.request(subjects.dispatch("g"), DispatchBatch(list(requests)), DispatchReply, timeout=30)


async def control(bus: Bus, command: ControlCommand) -> ControlReply:
    return await bus.request(subjects.control("g"), command, ControlReply, timeout=30)
