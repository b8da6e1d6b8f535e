"""What all clients have in common: a plan, and requests that are sent until they have an end.

pause ──▶ draw a request ──▶ send ──lost──▶ resume, or send again ──▶ ... ──▶ answered
                               ├──refused, may be tried again──▶ pause ──▶ the same
                               └──refused for good
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import msgspec

from tests.chaos.expected import stub_text
from tests.simulation.clients.ask import Lost, Refused, Surroundings, refusal
from tests.simulation.clients.history import Acknowledged, Kept, Request, Try, Wanted

# Seconds for which a generation is asked to go on while nobody reads it: clients look for another gateway at leisure.
# More than a fault lasts.
BACKGROUND = 600.0
HEADERS = {"X-Ryzanstein-Background": f"{BACKGROUND:g}"}

# Code of the end of a generation whose rings were lost more often than it is tried again: to resume it would show that
# end once more, so it is asked for anew.
LOST_TOO_OFTEN = "ring_lost"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client behaves; what is drawn, is drawn between two numbers."""

    requests: int = 0  # so many, then it is done; 0: until it is told to stop
    pause: tuple[float, float] = (0.0, 10.0)  # seconds between two of its requests
    tokens: tuple[int, int] = (1, 60)  # of an answer
    prompt: tuple[int, int] = (5, 200)  # characters of a request
    # Lines of a batch, examples of a training job, turns of a conversation, generations of a session.
    size: tuple[int, int] = (1, 20)
    # Seconds between two looks at what takes long; before a slow client reads on, or a turn follows another.
    wait: tuple[float, float] = (5.0, 20.0)


class Client:
    """A subclass says what one request is. `run` is the main of its process."""

    kind: ClassVar[str] = ""

    def __init__(self, name: str, around: Surroundings, plan: Plan | None = None) -> None:
        self.name = name
        self.around = around
        self.plan = plan or Plan()
        self.draw = around.draw
        self.history = around.history
        self._number = 0
        self.finished = False

    async def run(self) -> None:
        """Until its plan is done or it is told to stop."""
        while not self.around.stopping() and (not self.plan.requests or self._number < self.plan.requests):
            await asyncio.sleep(self.draw.uniform(*self.plan.pause))
            if self.around.stopping():
                break
            self._number += 1
            try:
                await self.once()
            except Exception as error:
                self.wrong(f"{type(error).__name__}: {error}")
        self.finished = True

    async def once(self) -> None:
        """One request, or whatever the client does in a turn."""
        raise NotImplementedError

    def wrong(self, what: str) -> None:
        """Something that no request has recorded."""
        self.history.faults.append((self.around.now, f"{self.name}: {what}"))

    # --- for subclasses --------------------------------------------------------------------------

    def seed(self) -> int:
        return self.draw.getrandbits(62)

    def words(self) -> str:
        """A text of the plan's length."""
        count = self.draw.randint(*self.plan.prompt)
        return "".join(self.draw.choices("abcdefghij klmnop qrstuv wxyz ", k=count)) + "."

    def request(self, body: dict[str, Any], wanted: Wanted, key: str = "") -> Request:
        made = Request(self.name, self.kind, self._number, body, wanted, self.around.now, self.around.tenant, key)
        return self.history.began(made)

    def acknowledged(self, what: Kept, identity: str, gateway: str) -> Acknowledged:
        around = self.around
        made = Acknowledged(what, identity, around.now, around.tenant, around.token, gateway)
        self.history.acknowledged.append(made)
        return made

    def prompted(self, model: str) -> tuple[dict[str, Any], int, int]:
        """A completion's body, with its seed and how many tokens it asks for."""
        seed, tokens = self.seed(), self.draw.randint(*self.plan.tokens)
        return {"model": model, "prompt": self.words(), "seed": seed, "max_tokens": tokens}, seed, tokens

    def drawn(self, seed: int, *, may_stop: bool = True) -> tuple[dict[str, Any], Wanted]:
        """Sampling fields and what must come of them."""
        tokens = self.draw.randint(*self.plan.tokens)
        text = stub_text(seed, tokens)
        body: dict[str, Any] = {"model": self.around.model, "seed": seed, "max_tokens": tokens}
        stop = _stop_in(text, self.draw.random()) if may_stop and self.draw.random() < 0.1 else ""
        if stop:
            body["stop"] = [stop]
            return body, Wanted(text[: text.index(stop)], -1, "stop")
        return body, Wanted(text, tokens)

    def response(self) -> tuple[dict[str, Any], Wanted]:
        """Fields of a response, whose API has no seed."""
        tokens = self.draw.randint(*self.plan.tokens)
        body = {"model": self.around.model, "max_output_tokens": max(16, tokens), "input": self.words()}
        return body, Wanted(None, max(16, tokens))

    def chat(self, *, may_stop: bool = True) -> tuple[dict[str, Any], Wanted]:
        """A chat that nobody has had before."""
        body, wanted = self.drawn(self.seed(), may_stop=may_stop)
        body["messages"] = [{"role": "user", "content": self.words()}]
        if wanted.tokens > 0 and self.draw.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 1}
            wanted.logprobs = True
        return body, wanted

    async def until_answered(self, request: Request, ask: Callable[[str, Try], Awaitable[None]]) -> bool:
        """Calls `ask` with a gateway, again and again, until it returns: the request is answered then; or until it is
        refused for good: False."""
        while True:
            tried = Try(self.around.now, "", resumes=bool(request.identity and request.position != ""))
            request.tries.append(tried)
            wait, token = 0.0, self.around.token
            try:
                tried.gateway = self.around.gateway()
                await ask(tried.gateway, tried)
            except Lost:
                tried.ending = "lost"
            except Refused as error:
                tried.ending, tried.status, tried.code = "refused", error.status, error.code
                tried.replaced = self.around.replaced(token, error)
                if not (error.again or tried.replaced) or request.cancel_asked:
                    self.end_refused(request, error)
                    return False
                if error.code == LOST_TOO_OFTEN:
                    request.identity, request.position = "", ""
                wait = error.retry_after
            else:
                tried.ending = tried.ending or "ended"
                self.history.ended(request, "answered", self.around.now)
                return True
            finally:
                tried.until = self.around.now
            self.history.saw(request)
            await self.around.pause(wait)

    def end_refused(self, request: Request, error: Refused) -> None:
        if error.code != request.wanted.refusal:
            request.fault = request.fault or f"refused for good: {error}"
        self.history.ended(request, "refused", self.around.now)


def _stop_in(text: str, at: float) -> str:
    """Three characters in the middle of `text`; empty: it is too short."""
    begin = int(at * (len(text) - 6)) + 3
    found = text[begin : begin + 3]
    return found if len(text) > 9 and found.strip() == found else ""


def take_chunk(request: Request, chunk: dict[str, Any]) -> None:
    """What a chunk of a chat or a completion adds. Raises `Refused` where it is an error."""
    if "error" in chunk:
        raise refusal(chunk["error"])
    request.called(chunk["id"])
    request.usage = chunk.get("usage") or request.usage
    for choice in chunk["choices"]:
        request.finish = choice["finish_reason"] or request.finish
        request.logprobs += logprobs_of(choice)
        delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
        if delta:
            request.arrived(delta, asyncio.get_running_loop().time())


def take_whole(request: Request, answer: dict[str, Any]) -> None:
    """A whole chat or completion."""
    request.called(answer["id"])
    (choice,) = answer["choices"]
    request.text = choice["message"]["content"] if "message" in choice else choice["text"]
    request.finish, request.usage = choice["finish_reason"], answer["usage"]
    request.logprobs = logprobs_of(choice)


def take_response(request: Request, shown: dict[str, Any]) -> str:
    """A whole response, or the last state of one that was streamed; its text. Raises `Refused`."""
    if shown["status"] == "failed":
        raise refusal({"type": "server_error", **(shown["error"] or {})})
    reason = (shown.get("incomplete_details") or {}).get("reason")
    request.called(shown["id"])
    request.finish = "length" if reason == "max_output_tokens" else shown["status"]
    request.usage = {"completion_tokens": shown["usage"]["output_tokens"]}
    return "".join(part["text"] for item in shown["output"] for part in item["content"])


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []
