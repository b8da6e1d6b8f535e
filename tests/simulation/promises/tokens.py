"""Tokens: each once, the right one, in order, whatever was lost in between; and what is said of them."""

from collections.abc import Iterator
from typing import ClassVar

from services.gateway.lifecycle.request_state import parse
from tests.chaos.expected import stub_text
from tests.simulation.clients.history import Request
from tests.simulation.promises.evidence import Evidence, by_identity
from tests.simulation.promises.promise import Finding, Promise


class RightTokens(Promise):
    """No token is lost, repeated or changed."""

    name: ClassVar[str] = "right_tokens"

    def __init__(self) -> None:
        self._checked: dict[Request, int] = {}  # characters of each open request that were compared

    def saw(self, request: Request) -> Iterator[Finding]:
        wanted, text = request.wanted.text, request.text
        if wanted is None or request.wanted.refusal:
            return
        done = self._checked.get(request, 0)
        if len(text) < done:  # it was sent again
            done = 0
        if not wanted.startswith(text[done:], done):
            yield wrong_text(request, wanted), request.identity or request.name
        self._checked[request] = len(text)
        if request.outcome != "open":
            self._checked.pop(request)
            yield from _end(request, wanted)

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        """Those whose seed a gateway drew."""
        unknown = [one for one in evidence.history.requests if one.wanted.text is None and one.outcome == "answered"]
        records = by_identity(evidence.store) if unknown and evidence.store.messages else {}
        for request in unknown:
            record = records.get(parse(request.identity) or "")
            if record is None or not record.requests:
                continue
            wanted = stub_text(record.requests[0].sampling.seed, request.wanted.tokens)
            if not wanted.startswith(request.text):
                yield wrong_text(request, wanted), request.identity
            else:
                yield from _end(request, wanted)


def wrong_text(request: Request, wanted: str) -> str:
    """At which position the first wrong character stands."""
    text = request.text
    at = next((i for i, pair in enumerate(zip(text, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
    gateways = ", ".join(dict.fromkeys(one.gateway for one in request.tries))
    return (
        f"{request.name} got {text[at : at + 8]!r} at position {at}, where {wanted[at : at + 8]!r} stands "
        f"(of {len(wanted)}; it was read at {gateways or 'no gateway'})."
    )


def _end(request: Request, wanted: str) -> Iterator[Finding]:
    """An answer that has ended is whole."""
    if request.outcome != "answered" or request.cancel_asked:
        return
    if request.text != wanted:
        told = f"{request.name} ended with {request.finish!r} after {len(request.text)} of {len(wanted)} characters."
        yield told, request.identity
    elif request.finish != request.wanted.finish:
        yield (f"{request.name} ended with {request.finish!r}, not {request.wanted.finish!r}.", request.identity)


class RightFigures(Promise):
    """Log probabilities are those of the tokens, and usage counts them."""

    name: ClassVar[str] = "right_figures"

    def saw(self, request: Request) -> Iterator[Finding]:
        if request.outcome != "answered" or request.cancel_asked or request.wanted.refusal:
            return
        yield from self._logprobs(request)
        yield from self._usage(request)

    def _logprobs(self, request: Request) -> Iterator[Finding]:
        if not request.wanted.logprobs:
            return
        tokens = [one["token"] for one in request.logprobs]
        if "".join(tokens) != request.text:
            told = f"{request.name} has log probabilities of {len(tokens)} tokens for {len(request.text)} characters."
            yield told, request.identity
        elif odd := [one["logprob"] for one in request.logprobs if one["logprob"] != 0.0]:
            yield (f"{request.name} has a log probability of {odd[0]} where the engine is sure.", request.identity)

    def _usage(self, request: Request) -> Iterator[Finding]:
        counted = (request.usage or {}).get("completion_tokens")
        wanted = request.wanted.tokens
        if counted is None:
            if "stream_options" in request.body or ("stream" not in request.body and request.key):
                yield f"{request.name} was answered without a usage.", request.identity
        elif wanted >= 0 and counted != wanted:
            told = f"{request.name} is said to have {counted} completion tokens, and has {wanted}."
            yield told, request.identity
