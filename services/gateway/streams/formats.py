"""Answers in OpenAI's shape: JSON chunks put together from prepared pieces, and whole responses.

A chunk differs from the next in its text alone, so everything around the text is encoded once. `reasoning_content` is
DeepSeek's extension, which vLLM has too. `EchoFormat` is an answer as its fields ask for it: with its prompt before it,
or the best candidates alone.

    candidates of a prompt   mean log probability      best_of 4, n 2
    0  "a cat"               -0.9                      shown: 2, 0
    1  "a dog"               -1.4
    2  "the cat"             -0.3
    3  "cats"                -2.0
"""

import secrets
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import msgspec

from services.gateway.core.metrics import ModelMetrics
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.output import OutputDelta, OutputProcessor, ScoredToken, output_of
from services.gateway.streams.progress import PromptProgress
from services.gateway.streams.prompt_logprobs import EchoedPrompt, PromptList
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import TokenLogprobs
from shared.messages.records import Parsing
from shared.sparse_attention import NO_SPARSE, SparseTokens

_json = msgspec.json.Encoder()
PROMPT_IDS = "prompt_token_ids"
_MARK = secrets.token_hex(16)  # a text that stands nowhere else
SPARSE = "sparse_tokens"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; `cached_tokens` of the prompt were found in the KV cache, and `sparse_tokens` of either,
    where there are any, have not read everything before them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        prompt: int,
        completion: int,
        cached: int,
        predicted: int = 0,
        rejected: int = 0,
        sparse: SparseTokens = NO_SPARSE,
    ) -> "Usage":
        """`predicted`: tokens of the request's prediction that came; `rejected`: those that did not."""
        of_prompt = {"cached_tokens": cached, "audio_tokens": 0}
        of_output = {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": predicted,
            "rejected_prediction_tokens": rejected,
        }
        for details, tokens in ((of_prompt, sparse.prompt), (of_output, sparse.output)):
            if tokens:
                details[SPARSE] = tokens
        return cls(prompt, completion, prompt + completion, of_prompt, of_output)

    @property
    def sparse(self) -> SparseTokens:
        """Tokens that have not read everything before them."""
        return SparseTokens(self.prompt_tokens_details.get(SPARSE, 0), self.completion_tokens_details.get(SPARSE, 0))

    def count(self, metrics: ModelMetrics) -> None:
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.output_tokens.inc(self.completion_tokens)
        metrics.cached_tokens.inc(self.prompt_tokens_details["cached_tokens"])
        if sparse := sum(self.sparse):
            metrics.sparse_tokens.inc(sparse)

    def add_sparse(self, of_prompt: dict[str, int], of_output: dict[str, int]) -> None:
        """Tells those tokens in another API's details, where there are any."""
        for own, other in ((self.prompt_tokens_details, of_prompt), (self.completion_tokens_details, of_output)):
            if SPARSE in own:
                other[SPARSE] = own[SPARSE]


class ResponseSerializer:
    """How one endpoint shows an answer: what a `Run` reads it with, and the bytes it makes of that. Chunks are JSON
    texts without framing, or parts of protobuf messages."""

    def __init__(self, outputs: Sequence[OutputProcessor]) -> None:
        """`outputs`: of each choice."""
        self.outputs = outputs

    def first(self, index: int) -> bytes | None:
        """What precedes the first text of choice `index`, if anything does."""
        return None

    def delta(self, index: int, piece: OutputDelta) -> bytes:
        raise NotImplementedError

    def text(self, index: int, text: str) -> bytes:
        """`delta` of text alone."""
        return self.delta(index, OutputDelta(text, ()))

    def last(self, index: int, piece: OutputDelta) -> bytes:
        """The end of choice `index`; `piece` has no text, but may have log probabilities and token ids."""
        raise NotImplementedError

    def usage(self, usage: Usage) -> bytes:
        raise NotImplementedError

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        raise NotImplementedError

    def progress(self, progress: PromptProgress) -> bytes | None:
        """How much of the prompts is computed, where chunks can tell that."""
        return None


def around_text(shape: ResponseSerializer, index: int) -> list[bytes]:
    """What stands before and behind the JSON of a text in the chunks of a choice."""
    return shape.delta(index, OutputDelta(_MARK, ())).split(_json.encode(_MARK))


class JsonSerializer(ResponseSerializer):
    """OpenAI's. Everything around the text is encoded once, and again where another ring has another fingerprint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        record = answer.record
        super().__init__([output_of(record, item.request, tokenizer) for item in answer.generations])
        self._answer, self._record, self._tokenizer = answer, record, tokenizer
        # Whether log probabilities were asked for.
        self._asked = record.requests[0].sampling.logprobs >= 0 and not record.hide_logprobs
        self._prompts = PromptList(answer, tokenizer) if record.prompt_logprobs >= 0 else None
        self._prompt_ids: dict[int, bytes] = {}
        self._head = {
            "id": answer.public_id,
            "object": self.chunk_kind,
            "created": int(record.created),
            "model": record.model_shown,
            "system_fingerprint": None,
        } | ({"service_tier": record.service_tier} if record.service_tier else {})
        self._after = b'],"usage":null}' if record.include_usage else b"]}"
        self._fingerprint: str | None = None  # of the ring that chunks name; None: of none yet
        self._before = b""
        # What stands before and behind the text of each choice, of the ring that chunks name.
        self._around: dict[int, list[bytes]] = {}

    def text(self, index: int, text: str) -> bytes:
        fingerprint = self._answer.generations[index].fingerprint or self._record.fingerprint
        around = self._around.get(index)
        if around is None or fingerprint != self._fingerprint:
            around = self._around[index] = around_text(self, index)
        return around[0] + _json.encode(text) + around[1]

    def delta(self, index: int, piece: OutputDelta) -> bytes:
        """As `last`, too: the end is a finish reason."""
        end = (
            b'"finish_reason":"%b","stop_reason":%b' % (piece.finish.encode(), _json.encode(piece.stop_reason))
            if piece.finish
            else b'"finish_reason":null'
        )
        told = piece.scored or (piece.finish and self._asked)
        scored = self._logprobs(piece.scored) if told else b"null"
        more = self._ids(index, piece) if self._record.token_ids else b""
        shown = b'{"index":%d,%b,"logprobs":%b,%b%b}' % (index, self._said(piece), scored, end, more)
        fingerprint = self._answer.generations[index].fingerprint or self._record.fingerprint
        if fingerprint != self._fingerprint:
            self._name_ring(fingerprint)
        return self._before + shown + self._after

    last = delta

    def usage(self, usage: Usage) -> bytes:
        self._name_ring(self._answer.fingerprint)
        return self._before + b'],"usage":' + _json.encode(usage) + b"}"

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        self._name_ring(self._answer.fingerprint)
        shown = [
            {
                "index": index,
                **self._message(piece),
                "logprobs": msgspec.Raw(self._logprobs(piece.scored)) if piece.scored or self._asked else None,
                "finish_reason": piece.finish or None,
                "stop_reason": piece.stop_reason,
                **({"token_ids": piece.ids} if self._record.token_ids else {}),
            }
            for index, piece in enumerate(choices)
        ]
        head = self._head | {"object": self.kind, "choices": shown, "usage": usage}
        return _json.encode(head | self._beside(choices[0]))

    def progress(self, progress: PromptProgress) -> bytes:
        """As llama.cpp: a chunk without text."""
        self._name_ring(self._fingerprint or self._record.fingerprint)
        shown = b'{"index":0,%b,"logprobs":null,"finish_reason":null}' % self._said(OutputDelta("", ()))
        return self._before + shown + self._after[:-1] + b',"prompt_progress":' + _json.encode(progress) + b"}"

    def _name_ring(self, fingerprint: str) -> None:
        """That of chunks from now on."""
        self._fingerprint = fingerprint
        self._around.clear()
        self._head["system_fingerprint"] = fingerprint or None
        self._before = _json.encode(self._head)[:-1] + b',"choices":['

    def _of_prompt(self, number: int, piece: OutputDelta) -> Any:
        """Log probabilities of the prompt of choice `number`; null as vLLM's where nobody has asked for them."""
        return None if self._prompts is None else self._prompts.of(number, piece.prompt or b"")

    def _ids(self, index: int, piece: OutputDelta) -> bytes:
        return b',"token_ids":' + _json.encode(piece.ids)

    def _ids_of_prompt(self, choice: int) -> bytes:
        """As JSON; those of each prompt are put together once."""
        prompt = self._answer.generations[choice].request.prompt
        known = self._prompt_ids.get(id(prompt))
        if known is None:
            known = self._prompt_ids[id(prompt)] = _json.encode(list(prompt))
        return known

    def _logprobs(self, scored: Sequence[ScoredToken]) -> bytes:
        raise NotImplementedError

    def _said(self, piece: OutputDelta) -> bytes:
        """The member of a chunk's choice that has its text."""
        raise NotImplementedError

    def _message(self, piece: OutputDelta) -> dict[str, Any]:
        """The same of a whole choice, with what stands beside it."""
        raise NotImplementedError

    def _beside(self, first: OutputDelta) -> dict[str, Any]:
        """What a whole answer has beside its choices."""
        return {}


class ChatFormat(JsonSerializer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> bytes | None:
        parsing = self._record.parsing
        role = b'{"role":"assistant","content":%b,"refusal":null}' % (
            b"null" if parsing is not None and parsing.tools else b'""'
        )
        self._name_ring(self._answer.generations[index].fingerprint or self._record.fingerprint)
        shown = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}],' % (index, role)
        if self._record.token_ids:
            shown += b'"%b":%b' % (PROMPT_IDS.encode(), self._ids_of_prompt(index))
            return self._before + shown + self._after[1:]
        return self._before + shown[:-2] + self._after

    def _said(self, piece: OutputDelta) -> bytes:
        if piece.finish:
            return b'"delta":{}'
        if (parsing := self._record.parsing) is None:
            return b'"delta":{"content":%b}' % _json.encode(piece.text)
        return b'"delta":' + _json.encode(chat_delta(piece.text, piece.reasoning, piece.calls, parsing))

    def _message(self, piece: OutputDelta) -> dict[str, Any]:
        return {"message": chat_message(piece.text, piece.reasoning, piece.calls, self._record.parsing)}

    def _beside(self, first: OutputDelta) -> dict[str, Any]:
        beside: dict[str, Any] = {"prompt_logprobs": self._of_prompt(0, first)}
        if self._record.token_ids:
            beside[PROMPT_IDS] = msgspec.Raw(self._ids_of_prompt(0))
        return beside

    def _logprobs(self, scored: Sequence[ScoredToken]) -> bytes:
        content = [
            self._token(item.token, item.known.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in item.known.top]}
            for item in scored
        ]
        return _json.encode({"content": content, "refusal": None})

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = f"token_id:{token}" if self._record.tokens_as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}


class CompletionFormat(JsonSerializer):
    kind = chunk_kind = "text_completion"

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer)
        self._text = cache(self._text_of)

    def first(self, index: int) -> bytes | None:
        return self.delta(index, OutputDelta("", (), begins=True)) if self._record.token_ids else None

    def _said(self, piece: OutputDelta) -> bytes:
        return b'"text":' + _json.encode(piece.text)

    def _message(self, piece: OutputDelta) -> dict[str, Any]:
        fields = {"text": piece.text, "prompt_logprobs": self._of_prompt(piece.number, piece)}
        if self._record.token_ids:
            fields[PROMPT_IDS] = msgspec.Raw(self._ids_of_prompt(piece.number))
        return fields

    def _ids(self, index: int, piece: OutputDelta) -> bytes:
        ids = super()._ids(index, piece)
        return ids + b',"%b":%b' % (PROMPT_IDS.encode(), self._ids_of_prompt(index)) if piece.begins else ids

    def _logprobs(self, scored: Sequence[ScoredToken]) -> bytes:
        """Offsets count from the beginning of the choice's text."""
        return _json.encode(
            {
                "text_offset": [item.offset for item in scored],
                "token_logprobs": [item.logprobs and item.logprobs.logprob for item in scored],
                "tokens": [self._text(item.token) for item in scored],
                "top_logprobs": [item.logprobs and self._top(item.token, item.logprobs) for item in scored],
            }
        )

    def _top(self, chosen: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The chosen token is always among them, as in OpenAI's API."""
        top = {self._text(token): logprob for token, logprob in logprobs.top}
        return top | {self._text(chosen): logprobs.logprob}

    def _text_of(self, token: int) -> str:
        """A part of a character is shown by its bytes, so that no two tokens look the same."""
        if self._record.tokens_as_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_delta(text: str, reasoning: str, calls: Sequence[CallDelta], parsing: Parsing) -> dict[str, Any]:
    """The `delta` of a chunk. A call's id, type and name come once, with its first part."""
    fields: dict[str, Any] = {}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if text:
        fields["content"] = text
    if calls and parsing.legacy:
        fields["function_call"] = _function(calls[0])
    elif calls:
        fields["tool_calls"] = [{"index": call.index, **_called(call)} for call in calls]
    return fields


def chat_message(text: str, reasoning: str, calls: Sequence[CallDelta], parsing: Parsing | None) -> dict[str, Any]:
    """The `message` of a whole response; its content is null where there are calls alone."""
    fields: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls and parsing is not None and parsing.legacy:
        fields["function_call"] = _function(calls[0])
    elif calls:
        fields["tool_calls"] = [_called(call) for call in calls]
    return fields


def _called(call: CallDelta) -> dict[str, Any]:
    kind = "custom" if call.custom else "function"
    named = {"id": call.id, "type": kind} if call.id else {}
    return {**named, kind: _function(call)}


def _function(call: CallDelta) -> dict[str, str]:
    fields = {"name": call.name} if call.name else {}
    return fields | {"input" if call.custom else "arguments": call.arguments}


_PAD = 64  # bytes that the length of a padded chunk is a multiple of, but for what is random
_LETTERS = string.ascii_letters + string.digits


class EchoFormat(ResponseSerializer):
    """`shape` with the prompts and the best candidates, where the request asked for them."""

    def __init__(self, shape: ResponseSerializer, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(shape.outputs)
        self._shape, self._record = shape, answer.record
        self._echoed = cache(lambda number: EchoedPrompt(answer.record.requests[number], tokenizer))

    def usage(self, usage: Usage) -> bytes:
        return self._shape.usage(usage)

    def progress(self, progress: PromptProgress) -> bytes | None:
        return self._shape.progress(progress)

    def first(self, index: int) -> bytes | None:
        prompt = self._prompt_of(index)
        if prompt is None or prompt.has_scores:
            return self._shape.first(index)
        return self._shape.delta(index, OutputDelta(prompt.text, (), begins=True))

    def delta(self, index: int, piece: OutputDelta) -> bytes:
        return self._shape.delta(index, self._behind_prompt(index, piece))

    def last(self, index: int, piece: OutputDelta) -> bytes:
        return self._shape.last(index, self._behind_prompt(index, piece))

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        count, best = self._record.choices, self._record.best
        shown: list[OutputDelta] = []
        for begin in range(0, len(choices), count):
            shown += map(self._as_asked, _best(choices[begin : begin + count], best))
        return self._shape.whole(shown, usage)

    def _prompt_of(self, index: int) -> EchoedPrompt | None:
        """The prompt that is shown before choice `index`."""
        return self._echoed(index // self._record.choices) if self._record.echo else None

    def _behind_prompt(self, index: int, piece: OutputDelta) -> OutputDelta:
        """`piece`, its tokens counted from the prompt's beginning; the first one with the prompt, where that comes with
        log probabilities."""
        prompt = self._prompt_of(index)
        if prompt is None or not (piece.scored or piece.prompt is not None):
            return piece
        text, scored = piece.text, _moved(piece.scored, len(prompt.text))
        if piece.prompt is not None and prompt.has_scores:
            text, scored = prompt.text + text, prompt.scored(piece.prompt) + scored
        return piece._replace(text=text, scored=scored)

    def _as_asked(self, piece: OutputDelta) -> OutputDelta:
        if self._record.hide_logprobs:
            piece = piece._replace(scored=())
        prompt = self._prompt_of(piece.number)
        if prompt is None:
            return piece
        scored = _moved(piece.scored, len(prompt.text))
        if prompt.has_scores:
            scored = prompt.scored(piece.prompt or b"") + scored
        return piece._replace(text=prompt.text + piece.text, scored=scored)


def _moved(scored: Sequence[ScoredToken], by: int) -> list[ScoredToken]:
    """With their texts so many characters later."""
    return [item._replace(offset=item.offset + by) for item in scored]


def _best(choices: Sequence[OutputDelta], count: int) -> Sequence[OutputDelta]:
    """The `count` with the highest mean log probability, the highest first; of equals the earlier."""
    return sorted(choices, key=lambda choice: -choice.mean_logprob)[:count] if count else choices


def with_usage(chunk: bytes, usage: Usage) -> bytes:
    """`chunk`, whose usage is null at its end, with `usage`."""
    return chunk.removesuffix(b"null}") + msgspec.json.encode(usage) + b"}"


def padded(chunk: bytes) -> bytes:
    """`chunk` with random letters in `obfuscation`, so that its length says little of its text."""
    missing = -(len(chunk) + 17) % _PAD  # what is put around them
    letters = "".join(secrets.choice(_LETTERS) for _ in range(missing))
    return chunk[:-1] + b',"obfuscation":"' + letters.encode() + b'"}'


class PredictionTally:
    """How many tokens of a prediction are in an output, each as often as it is in both. Follows the output."""

    def __init__(self, expected: Counter[int]) -> None:
        """`expected`: the prediction's tokens."""
        self._expected = expected
        self._seen: Counter[int] = Counter()
        self._read = 0
        self._came = 0

    def came(self, output: Sequence[int], count: int) -> int:
        """Of the first `count` tokens of `output`, no fewer than at the call before."""
        for token in output[self._read : count]:
            self._seen[token] += 1
            self._came += self._seen[token] <= self._expected[token]
        self._read = max(self._read, count)
        return self._came
