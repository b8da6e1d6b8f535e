"""Puts a workload on a server and measures every request. The loop is closed: each client starts its next session when
its last one has ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.errors import BenchError
from benchmarks.serve.sse import Answer, Client, Usage
from benchmarks.serve.stats import Sample, Summary, summarise
from benchmarks.serve.workloads import Measure, Session, Workload


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Counted(msgspec.Struct):
    usage: Usage


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask for what: the server, the model, and fields added to every request body (a None takes
    a field out)."""

    client: Client
    model: str
    extra: Mapping[str, object]

    def body(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, object]:
        """A request for exactly `max_tokens` tokens, greedy, as a stream."""
        fields: dict[str, object] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def unstreamed(self, contents: Sequence[str]) -> dict[str, object]:
        """A request for one token behind a conversation, whole."""
        body = self.body(conversation(contents), 1)
        return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


async def choose_model(client: Client, wanted: str | None) -> str:
    """`wanted` if the server lists it or lists none, by default the server's first. Raises BenchError
    otherwise."""
    answer = await client.get("/v1/models")
    if answer.status != 200:
        if wanted is not None and answer.status in (404, 405, 501):
            return wanted  # the server lists no models; it will say so itself if it has not this one
        raise BenchError(f"{client.url}/v1/models answered {answer.refusal()}.")
    try:
        names = [model.id for model in msgspec.json.decode(answer.body, type=_Models).data]
    except msgspec.MsgspecError as error:
        raise BenchError(f"{client.url}/v1/models did not answer with a list of models: {error}.") from None
    if not names:
        if wanted is not None:
            return wanted  # a server that loads what it is asked for
        raise BenchError(f"{client.url} serves no model yet: load one, or wait until it is ready.")
    if wanted is not None and wanted not in names:
        raise BenchError(f"{client.url} does not serve {wanted!r}; it serves {', '.join(names)}.")
    return wanted or names[0]


async def wait_answered(
    ask: Callable[[], Awaitable[Answer]], timeout: float, check: Callable[[], None] = lambda: None, poll: float = 0.1
) -> None:
    """Until `ask` is answered with 200. Raises BenchError where `check` does before it asks again, where the request is
    refused for good, and after `timeout` seconds."""
    deadline, reason = time.perf_counter() + timeout, "nobody answers"
    while time.perf_counter() < deadline:
        check()
        try:
            answer = await ask()
        except BenchError as error:
            reason = str(error)
        else:
            if answer.status == 200:
                return
            reason = answer.refusal()
            if answer.status in (400, 422):
                raise BenchError(f"It refused a request of one token: {reason}.")
        await asyncio.sleep(poll)
    raise BenchError(f"It was not ready after {timeout:g} s: {reason}")


def server_measure(target: Target) -> Measure:
    """Counts a conversation's tokens by the usage field of a one-token answer."""

    async def measure(contents: Sequence[str]) -> int:
        body = target.unstreamed(contents)
        answer = await target.client.post("/v1/chat/completions", body)
        if answer.status != 200:
            raise BenchError(f"A request of one token was refused with {answer.refusal()}.")
        try:
            return msgspec.json.decode(answer.body, type=_Counted).usage.prompt_tokens
        except msgspec.MsgspecError as error:
            raise BenchError(f"The server's answer carries no usage.prompt_tokens: {error}.") from None

    return measure


def conversation(contents: Sequence[str]) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


async def warm_up(target: Target, message: str, output_tokens: int) -> None:
    """One request that is not measured. Raises BenchError if it fails: so would all others."""
    answer = await target.client.stream(target.body(conversation([message]), output_tokens), {})
    if fault := answer.fault():
        raise BenchError(f"The warm-up request failed: {fault.rstrip('.')}.")


async def run_round(
    target: Target,
    workload: Workload,
    sessions: Sequence[Session],
    *,
    on_request: Callable[[Sample], None],
    between: "Between | None" = None,
) -> Summary:
    """Play all sessions and measure. `on_request` is told of each request that has ended. `between`: what happens
    between two turns of a session; None: nothing."""
    cpu = time.process_time()
    play = _Player(target, workload.output_tokens, on_request, between)
    await _closed_loop(play, workload.clients, sessions)
    return summarise(workload, play.samples, time.process_time() - cpu)


async def _closed_loop(play: "_Player", clients: int, sessions: Sequence[Session]) -> None:
    await play.target.client.connect(min(clients, len(sessions)))
    waiting = iter(sessions)

    async def client() -> None:
        for session in waiting:
            await play.session(session)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


@dataclass(frozen=True, slots=True)
class Between:
    """What a session's user does between two turns."""

    think: float  # seconds for which the next message is written
    prefill: bool  # whether the conversation is computed ahead meanwhile (`/v1/sessions/{id}/prefill`)


class _Player:
    """Plays sessions and collects their samples."""

    def __init__(
        self, target: Target, output_tokens: int, on_request: Callable[[Sample], None], between: Between | None
    ) -> None:
        self.target = target
        self._between = between
        self.samples: list[Sample] = []
        self._output_tokens = output_tokens
        self._on_request = on_request

    async def session(self, session: Session) -> None:
        """All turns in order; the answers stay in the history. A failed turn fails those after it, which
        cannot be asked without its answer."""
        headers = {"X-Session-ID": session.session_id} if session.session_id else {}
        contents: list[str] = []
        for turn, message in enumerate(session.messages):
            if turn and self._between is not None:
                fault = await self._think(self._between, session, contents)
                if fault:
                    self._fail_turns(turn, len(session.messages), time.perf_counter(), fault)
                    return
            contents.append(message)
            body = self.target.body(conversation(contents), self._output_tokens)
            answer = await self.target.client.stream(body, headers)
            sample = _sample(answer, turn)
            self._record(sample)
            if sample.error is not None:
                why = "not sent: an earlier turn failed"
                self._fail_turns(turn + 1, len(session.messages), sample.finished, why)
                return
            contents.append("".join(answer.text))

    async def _think(self, between: Between, session: Session, contents: Sequence[str]) -> str:
        """Until the next turn is sent; what has gone wrong, or nothing."""
        pause = asyncio.create_task(asyncio.sleep(between.think))
        if between.prefill:
            body = self.target.unstreamed(contents)
            path = f"/v1/sessions/{session.session_id}/prefill?wait=0"
            answer = await self.target.client.post(path, body)
            if answer.status not in (200, 202):
                pause.cancel()
                return f"--prefill-ahead was refused with {answer.refusal()}"
        await pause
        return ""

    def _fail_turns(self, first: int, turns: int, at: float, why: str) -> None:
        for turn in range(first, turns):
            self._record(Sample(at, at, turn, error=why))

    def _record(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._on_request(sample)


def _sample(answer: Answer, turn: int) -> Sample:
    usage = answer.usage or Usage()
    return Sample(
        started=answer.started,
        finished=answer.finished,
        turn=turn,
        error=answer.fault(),
        arrivals=answer.arrivals,
        deltas=answer.deltas,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
