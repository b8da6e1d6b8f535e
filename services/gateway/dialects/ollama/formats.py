"""Answers in the shape of Ollama's /api/chat, /api/generate and /api/embed: lines of JSON, and whole responses.

A line says what is new in `message` (`response` of a generate), a call of a tool always whole; the last one has
`done`, why, and figures. Everything around the text is encoded once.

Durations are nanoseconds of this reading, for the log has no times: of the reader that began an answer they are what
its client has waited, of one that came later, what that one has.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.embeddings import floats_of, vector_outputs
from services.gateway.streams.formats import ResponseSerializer, Usage, around_text
from services.gateway.streams.output import OutputDelta, ParsedOutput, ScoredToken, TextOutput, arguments_of
from services.gateway.streams.progress import PromptProgress
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord
from shared.sparse_attention import sparse_tokens

_json = msgspec.json.Encoder()


class WholeCallsOutput(ParsedOutput):
    """A call is given when it is complete: when another begins, or at the end. So a reader that has read as many
    tokens in silence holds the very same back."""

    def __init__(self, record: GenerationRecord, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        super().__init__(record, request, tokenizer)
        self._begun: CallDelta | None = None
        self._arguments: list[str] = []

    def take(self) -> OutputDelta:
        piece = super().take()
        if not piece.calls and not (self.finish and self._begun):
            return piece
        complete: list[CallDelta] = []
        for call in piece.calls:
            if call.id:
                complete += self._complete()
                self._begun = call
            self._arguments.append(call.arguments)
        if self.finish:
            complete += self._complete()
        return piece._replace(calls=complete)

    def _complete(self) -> list[CallDelta]:
        call, self._begun = self._begun, None
        arguments, self._arguments = "".join(self._arguments), []
        return [] if call is None else [msgspec.structs.replace(call, arguments=arguments)]


def shown_calls(calls: Sequence[CallDelta]) -> tuple[list[dict[str, Any]], str]:
    """Calls with their arguments as objects; and as text the one that was cut off in the middle of them."""
    found: list[dict[str, Any]] = []
    cut = ""
    for call in calls:
        arguments = arguments_of(call.arguments)
        if not isinstance(arguments, dict):
            cut += f'{{"name":{_json.encode(call.name).decode()},"arguments":{call.arguments}'
            continue
        found.append({"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}})
    return found, cut


class OllamaFormat(ResponseSerializer):
    """What both endpoints have in common."""

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        record = answer.record
        kind = TextOutput if record.parsing is None else WholeCallsOutput
        super().__init__([kind(record, item.request, tokenizer) for item in answer.generations])
        self._answer, self._tokenizer = answer, tokenizer
        self._head = _json.encode({"model": record.model_shown, "created_at": rfc3339(record.created)})[:-1]
        self._began = self._first = time.perf_counter_ns()
        self._open = True  # whether nothing has been shown yet
        self._around: list[bytes] = []  # what stands before and behind a text

    def text(self, index: int, text: str) -> bytes:
        if not self._around:
            self._around = around_text(self, index)
        return self._around[0] + _json.encode(text) + self._around[1]

    def delta(self, index: int, piece: OutputDelta) -> bytes:
        if self._open:
            self._open, self._first = False, time.perf_counter_ns()
        more = self._logprobs(piece.scored) if piece.scored else b""
        return b'%b,%b%b,"done":false}' % (self._head, self._said(piece), more)

    def last(self, index: int, piece: OutputDelta) -> bytes:
        return self._done(piece, self.outputs[index].tokens)

    def progress(self, progress: PromptProgress) -> bytes:
        """A line without text."""
        said = self._said(OutputDelta("", ()))
        return b'%b,%b,"done":false,"prompt_progress":%b}' % (self._head, said, _json.encode(progress))

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        """One that goes on is not done, and has no figures."""
        (piece,) = choices
        return self._done(piece, usage.completion_tokens) if piece.finish else self.delta(0, piece)

    def _done(self, piece: OutputDelta, tokens: int) -> bytes:
        more = self._logprobs(piece.scored) if piece.scored else b""
        figures = _json.encode(self._figures(tokens))[1:]
        reason = b"length" if piece.finish == "length" else b"stop"  # also behind a call
        return b'%b,%b%b,"done":true,"done_reason":"%b",%b' % (self._head, self._said(piece), more, reason, figures)

    def _figures(self, tokens: int) -> dict[str, int]:
        """No time is 0: clients divide by it. What is shown at its end alone has all its time as that of its tokens, so
        that a rate made of it is too low and never absurd."""
        now = time.perf_counter_ns()
        first = self._began if self._open else self._first
        request = self._answer.generations[0].request
        sparse = sparse_tokens(request.sparse, len(request.prompt), tokens)
        return {
            "total_duration": max(1, now - self._began),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt),
            "prompt_eval_duration": max(1, first - self._began),
            "eval_count": tokens,
            "eval_duration": max(1, now - first),
            **({"prompt_eval_sparse_count": sparse.prompt} if sparse.prompt else {}),
            **({"eval_sparse_count": sparse.output} if sparse.output else {}),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> bytes:
        found = [
            self._token(item.token, item.known.logprob)
            | ({"top_logprobs": [self._token(*one) for one in item.known.top]} if item.known.top else {})
            for item in scored
        ]
        return b',"logprobs":' + _json.encode(found)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    def _said(self, piece: OutputDelta) -> bytes:
        """The members of a line that have its text."""
        raise NotImplementedError


class OllamaChatFormat(OllamaFormat):
    """/api/chat."""

    def _said(self, piece: OutputDelta) -> bytes:
        if not piece.calls:
            more = b',"thinking":' + _json.encode(piece.reasoning) if piece.reasoning else b""
            return b'"message":{"role":"assistant","content":%b%b}' % (_json.encode(piece.text), more)
        calls, cut = shown_calls(piece.calls)
        message = {"role": "assistant", "content": piece.text + cut}
        message |= {"thinking": piece.reasoning} if piece.reasoning else {}
        return b'"message":' + _json.encode(message | ({"tool_calls": calls} if calls else {}))


class OllamaGenerateFormat(OllamaFormat):
    """/api/generate."""

    def _said(self, piece: OutputDelta) -> bytes:
        more = b',"thinking":' + _json.encode(piece.reasoning) if piece.reasoning else b""
        return b'"response":%b%b' % (_json.encode(piece.text), more)


def rfc3339(seconds: float) -> str:
    """Of unix time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# --- vectors -------------------------------------------------------------------------------------


class OllamaVectorFormat(ResponseSerializer):
    """/api/embed; with `single` /api/embeddings, of one text."""

    single = False

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(vector_outputs(answer))
        self._model = answer.record.model_shown
        self._began = time.perf_counter_ns()

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        vectors = [  # each encoded apart, as `VectorFormat` does
            msgspec.Raw(_json.encode(floats_of(choice.text))) for choice in choices if choice.finish
        ]
        if self.single:
            return _json.encode({"embedding": vectors[0] if vectors else []})
        return _json.encode(
            {
                "model": self._model,
                "embeddings": vectors,
                "total_duration": time.perf_counter_ns() - self._began,
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
            }
        )


class OneVectorFormat(OllamaVectorFormat):
    """/api/embeddings."""

    single = True
