"""Constant concurrent clients, every token of theirs checked while it comes.

A client whose connection is lost goes to another gateway: it resumes the generation there (`resume.py`)
where that is possible, else it sends the same request again. Neither is an error; a token that is
missing, repeated or wrong is one, and so is a request that is not answered.
"""

import asyncio
import itertools
import json
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import websockets
from websockets.asyncio.client import connect

from tests.chaos import resume
from tests.chaos.expected import Task, stub_tasks
from tests.chaos.streams import Answer, Lost, Refused

CHAT = "/v1/chat/completions"
PAUSE = 0.1  # seconds before a client that nobody serves tries again
WARM = 5  # pieces of text after which a stream counts as flowing
KINDS = ("sse", "websocket", "sse", "plain")


@dataclass
class Record:
    """One request of one client. Times are seconds of `time.monotonic`."""

    kind: str
    task: Task
    started: float
    text: str = ""
    position: object = ""  # id of the last event, or position of the last chunk: where a reader may resume
    identity: str = ""  # the answer's id
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # when text came
    ended: float = 0.0
    broken: list[float] = field(default_factory=list)  # when its connection was lost
    refused: list[str] = field(default_factory=list)  # codes of the errors after which it was sent again
    resumed: int = 0
    fault: str = ""

    @property
    def generation(self) -> str:
        """As the bus names it."""
        return f"{self.identity.partition('-')[2]}-0"

    def begin_again(self) -> None:
        self.text, self.position, self.identity, self.finish_reason = "", "", "", None
        self.logprobs = []

    def take(self, text: str, now: float) -> None:
        """Raises `Wrong` at the first character that is not the expected one."""
        if not text:
            return
        self.arrivals.append(now)
        begin = len(self.text)
        self.text += text
        if not self.task.text.startswith(self.text):
            expected = self.task.text[begin : begin + len(text)]
            raise Wrong(f"at {begin}: got {text!r} in place of {expected!r}")

    def finish(self) -> None:
        """Raises `Wrong` when something is missing."""
        reason = self.finish_reason
        if self.text != self.task.text:
            raise Wrong(f"ended after {len(self.text)} of {len(self.task.text)} characters ({reason})")
        if reason != self.task.finish:
            raise Wrong(f"ended with {reason!r} in place of {self.task.finish!r}")
        for at, (given, expected) in enumerate(zip(self.logprobs, self.task.logprobs, strict=True)):
            if given != expected:
                raise Wrong(f"at token {at}: the log probabilities {given} in place of {expected}")
        self.ended = time.monotonic()

    def under_way(self, at: float) -> bool:
        """Whether some of its text had come at `at`, and not all."""
        return bool(self.arrivals) and self.arrivals[0] < at and (not self.ended or self.ended > at)

    def stall(self) -> float:
        """The longest wait for a piece of text, the first included, in seconds."""
        times = [self.started, *self.arrivals]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def flowing_again(self, at: float, told: float) -> float:
        """When its longest wait for text was over, of those that `at` or the time until `told` fell into."""
        waits = [(b - a, b) for a, b in itertools.pairwise(self.arrivals) if b > at and a <= told]
        return max(waits, default=(0.0, at))[1]

    def gap_after(self, at: float) -> float | None:
        """Seconds from `at` to the next piece of text."""
        return next((arrival - at for arrival in self.arrivals if arrival > at), None)


class Wrong(Exception):
    """A token that is lost, repeated or not the right one."""


class Load:
    """`clients` at a time, for as long as the context is open; `check` afterwards."""

    def __init__(
        self,
        gateways: Callable[[], list[tuple[str, str]]],
        tasks: Iterator[Task],
        clients: int = 12,
        *,
        short: Iterator[Task] | None = None,
        short_clients: int = 4,
        patience: float = 90.0,
    ) -> None:
        """`short`: tasks of further clients, so that some request is between two services at any moment.
        `patience`: seconds after which a request counts as unanswered."""
        self._gateways = gateways
        self._tasks = tasks
        self._clients = clients
        self._short = short
        self._all = clients + (short_clients if short is not None else 0)
        self._patience = patience
        self._stopping = False
        self._running: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.records: list[Record] = []
        self.resumable = False

    async def __aenter__(self) -> "Load":
        self.resumable = await resume.is_offered(self._gateways()[0][1])
        self._running = [asyncio.create_task(self._client(number, self._kind(number))) for number in range(self._all)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # --- what tests wait for ---------------------------------------------------------------------

    async def flowing(self, seconds: float = 60) -> None:
        """Until every client that streams has received some text of a request that goes on."""
        streaming = sum(1 for number in range(self._clients) if self._kind(number) != "plain")

        def holds() -> bool:
            now = time.monotonic()
            going = [r for r in self.records if r.under_way(now) and len(r.arrivals) >= WARM]
            return len(going) >= streaming * 3 // 4

        await self._until(holds, seconds, "the clients receive text")

    async def settled(self, after: float, seconds: float = 180) -> float:
        """Until every request that began before `after` has ended, and each client has had one more answered.

        Returns the time at which the last of those from before had ended.
        """

        def holds() -> bool:
            old = [record for record in self.records if record.started <= after]
            new = [record for record in self.records if record.started > after and _over(record)]
            return all(map(_over, old)) and len(new) >= self._all

        await self._until(holds, seconds, "every client is served again")
        return max((r.ended for r in self.records if r.started <= after), default=after)

    async def refused(self, code: str, seconds: float = 60) -> float:
        """Until some client was refused with `code`."""

        def holds() -> bool:
            return any(code in record.refused for record in self.records)

        await self._until(holds, seconds, f"some client is refused with {code}")
        return time.monotonic()

    async def finish(self) -> None:
        """No new requests; those under way come to their end."""
        self._stopping = True
        await asyncio.gather(*self._running)

    def check(self, *, may_refuse: bool = False) -> None:
        """Raises with every token that was wrong and every request that was not answered."""
        faults = [f"{record.kind} {record.identity}: {record.fault}" for record in self.records if record.fault]
        if not may_refuse:
            faults += [
                f"{record.kind} {record.identity}: refused with {record.refused}"
                for record in self.records
                if record.refused
            ]
        assert not faults, f"{len(faults)} of {len(self.records)} requests:\n" + "\n".join(faults[:20])
        assert self.records, "no request was sent at all"

    # --- clients ---------------------------------------------------------------------------------

    def _kind(self, number: int) -> str:
        return KINDS[number % len(KINDS)]

    async def _client(self, number: int, kind: str) -> None:
        while not self._stopping:
            tasks = self._tasks if number < self._clients or self._short is None else self._short
            record = Record(kind, next(tasks), time.monotonic())
            self.records.append(record)
            try:
                async with asyncio.timeout(self._patience):
                    await self._ask(number, record)
            except TimeoutError:
                record.fault = f"unanswered after {self._patience:g} s, {len(record.text)} characters"
            except (Wrong, Refused) as error:
                record.fault = str(error)
            except Exception as error:
                record.fault = repr(error)
            self._changed.set()

    async def _ask(self, number: int, record: Record) -> None:
        """One gateway after the other until the answer is whole."""
        tries = number
        while True:
            gateways = self._gateways()
            _, address = gateways[tries % len(gateways)]
            try:
                if record.identity and self.resumable:
                    record.resumed += 1
                    await self._resume(address, record)
                else:
                    record.begin_again()
                    await self._send(address, record)
                return
            except Lost:
                if record.arrivals or not record.broken:
                    record.broken.append(time.monotonic())
            except Refused as error:
                if error.status not in (429, 503, 504):
                    raise
                record.refused.append(error.code)
                self._changed.set()
            tries += 1
            await asyncio.sleep(PAUSE)

    async def _resume(self, address: str, record: Record) -> None:
        if record.kind == "websocket":
            await self._websocket(address, resume.attach(record.identity, record.position), record)
        else:
            await self.read_events(resume.answer(address, record.identity, str(record.position)), record)

    async def _send(self, address: str, record: Record) -> None:
        if record.kind == "websocket":
            message = {"type": "generate", "id": "a", "request": record.task.body, "background": resume.BACKGROUND}
            await self._websocket(address, message, record)
        elif record.kind == "sse":
            body = {**record.task.body, "stream": True}
            await self.read_events(Answer(address, "POST", CHAT, body=body, headers=resume.HEADERS), record)
        else:
            await self._whole(address, record)

    async def _whole(self, address: str, record: Record) -> None:
        headers = resume.headers(record.key)
        async with Answer(address, "POST", CHAT, body=record.task.body, headers=headers) as answer:
            whole = await answer.whole()
        choice = whole["choices"][0]
        record.identity, record.finish_reason = whole["id"], choice["finish_reason"]
        record.logprobs += logprobs_of(choice)
        record.take(choice["message"]["content"], time.monotonic())
        if whole["usage"]["completion_tokens"] != record.task.tokens:
            raise Wrong(f"counted {whole['usage']['completion_tokens']} of {record.task.tokens} tokens")
        record.finish()

    async def read_events(
        self, answer: Answer, record: Record, pause: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """`pause` is awaited after the first piece of text. Raises `Wrong`, `Lost`, `Refused`."""
        async with answer:
            async for position, data in answer.events():
                if pause is not None and record.arrivals:
                    await pause()
                now = time.monotonic()
                if data == b"[DONE]":
                    record.finish()
                    return
                self._take_chunk(json.loads(data), record, now)
                record.position = record.position if position is None else position
        raise Wrong("the stream ended without [DONE]")

    async def _websocket(self, address: str, message: dict[str, object], record: Record) -> None:
        try:
            async with connect(f"ws://{address}/v1/stream", open_timeout=5, proxy=None) as socket:
                await socket.send(json.dumps(message))
                async for answer in socket:
                    now = time.monotonic()
                    said = json.loads(answer)
                    if said["type"] == "error":
                        raise _refusal(said)
                    if said["type"] == "done":
                        record.finish()
                        return
                    self._take_chunk(said["chunk"], record, now)
                    record.position = said.get("position", record.position)
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise Lost(repr(error)) from None
        raise Lost("the socket was closed")

    def _take_chunk(self, chunk: dict[str, Any], record: Record, now: float) -> None:
        if "error" in chunk:
            raise Refused(0, json.dumps(chunk).encode())
        record.identity = record.identity or chunk["id"]
        choice = chunk["choices"][0]
        record.finish_reason = choice["finish_reason"] or record.finish_reason
        record.logprobs += logprobs_of(choice)
        record.take(choice["delta"].get("content") or "", now)
        if len(record.arrivals) == WARM:
            self._changed.set()

    async def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            faults = [record.fault for record in self.records if record.fault]
            open_ones = [(r.kind, r.identity, len(r.text), r.refused) for r in self.records if not _over(r)]
            raise AssertionError(f"{what}: not within {seconds:g} s; faults {faults[:5]}, open {open_ones}") from None


def stub_load(gateways: Callable[[], list[tuple[str, str]]], chance: random.Random) -> Load:
    """Of the stub engine: twelve clients whose requests take two seconds or so, and four with short ones."""
    return Load(gateways, stub_tasks(chance, 120), short=stub_tasks(chance, 6))


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """Of the tokens in a choice, or in a chunk of it."""
    return (choice.get("logprobs") or {}).get("content") or []


def _over(record: Record) -> bool:
    return bool(record.ended or record.fault)


def _refusal(said: dict[str, Any]) -> Refused:
    """An error message of a socket, with the status that REST would have given it."""
    retryable = said["error"]["type"] in ("server_error", "rate_limit_error")
    return Refused(503 if retryable else 400, json.dumps(said).encode())


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
