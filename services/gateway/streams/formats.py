"""Answers in OpenAI's shape: JSON chunks put together from prepared pieces, and whole responses.

A chunk differs from the next in its text alone, so everything around the text is encoded once. `reasoning_content` is
DeepSeek's extension, which vLLM has too. `Shown` is an answer as its fields ask for it: with its prompt before it, or
the best candidates alone.

    candidates of a prompt   mean log probability      best_of 4, n 2
    0  "a cat"               -0.9                      shown: 2, 0
    1  "a dog"               -1.4
    2  "the cat"             -0.3
    3  "cats"                -2.0
"""

import secrets
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from services.gateway.streams.output import Piece, ScoredToken, StopReason
from services.gateway.streams.prompt_logprobs import EchoedPrompt, PromptList
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import GenerationRequest, TokenLogprobs
from shared.messages.records import Parsing

_json = msgspec.json.Encoder()
PROMPT_IDS = "prompt_token_ids"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; `cached_tokens` of the prompt were found in the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] = {}

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, predicted: int = 0, rejected: int = 0) -> "Usage":
        """`predicted`: tokens of the request's prediction that came; `rejected`: those that did not."""
        details = {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": predicted,
            "rejected_prediction_tokens": rejected,
        }
        return cls(
            prompt, completion, prompt + completion, {"cached_tokens": cached, "audio_tokens": 0}, details
        )


class Choice(msgspec.Struct, frozen=True):
    """A choice of a response that is not streamed."""

    text: str
    finish_reason: str | None
    """None while it goes on."""
    scored: Sequence[ScoredToken]
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    tokens: Sequence[int] = ()
    """Where token ids are shown instead of text."""
    mean_logprob: float = 0.0
    """Of its tokens, where they have log probabilities."""
    prompt: bytes = b""
    """Log probabilities of its prompt's tokens, where they are shown."""
    number: int = 0
    """Of the candidate that it is."""
    ids: Sequence[int] = ()
    """Of its tokens, where they are shown beside the text."""
    stop_reason: StopReason = None


class PromptIds:
    """Token ids of the prompts of an answer, as JSON; those of each are put together once."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        """`requests`: of each candidate."""
        self._requests = requests
        self._known: dict[int, bytes] = {}

    def of(self, candidate: int) -> bytes:
        prompt = self._requests[candidate].prompt
        known = self._known.get(id(prompt))
        if known is None:
            known = self._known[id(prompt)] = _json.encode(prompt)
        return known

    def field(self, candidate: int) -> bytes:
        """As a member of an object."""
        return b'"%b":%b' % (PROMPT_IDS.encode(), self.of(candidate))


def _ids(ids: Sequence[int]) -> bytes:
    return b',"token_ids":' + _json.encode(ids)


def _end(finish_reason: str, stop_reason: StopReason) -> bytes:
    return b'"finish_reason":"%b","stop_reason":%b' % (finish_reason.encode(), _json.encode(stop_reason))


class Format(Protocol):
    """How one endpoint shows its answer. Chunks are JSON texts without framing, or parts of protobuf messages."""

    def first(self, index: int) -> bytes | None:
        """What precedes the first text of choice `index`, if anything does."""
        ...

    def delta(self, index: int, piece: Piece) -> bytes: ...

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        """The end of choice `index`; `piece` has no text, but may have log probabilities and token ids."""
        ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


class Computed(Protocol):
    """What tells the fingerprints of the rings that compute a choice. Read for every chunk, so attributes."""

    @property
    def fingerprint(self) -> str: ...  # empty: it is not known


class Fingerprints(Protocol):
    """Of the rings that compute an answer."""

    @property
    def first_fingerprint(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def generations(self) -> Sequence[Computed]: ...


class _Frame:
    """The part of every chunk that does not change."""

    def __init__(self, head: dict[str, Any], rings: Fingerprints | None, *, include_usage: bool) -> None:
        self._head = head
        self._rings = rings
        self._choices = rings.generations if rings else ()
        self._first = rings.first_fingerprint if rings else ""
        self._after = b'],"usage":null}' if include_usage else b"]}"
        self._show("")

    def _show(self, fingerprint: str) -> None:
        """Those of chunks from now on."""
        self._fingerprint = fingerprint
        self._head["system_fingerprint"] = fingerprint or None
        self._before = _json.encode(self._head)[:-1] + b',"choices":['

    def chunk(self, index: int, choice: bytes, beside: bytes = b"") -> bytes:
        """`beside`: a field beside the choice."""
        if self._choices and (shown := self._choices[index].fingerprint or self._first) != self._fingerprint:
            self._show(shown)
        return self._before + choice + (b"]," + beside + self._after[1:] if beside else self._after)

    def usage(self, usage: Usage) -> bytes:
        self._show(self._rings.fingerprint if self._rings else "")
        return self._before + b'],"usage":' + _json.encode(usage) + b"}"

    def whole(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        usage: Usage,
        beside: Mapping[str, object] = MappingProxyType({}),
    ) -> bytes:
        self._show(self._rings.fingerprint if self._rings else "")
        return _json.encode({**self._head, "object": kind, "choices": choices, "usage": usage, **beside})


def _head(public_id: str, kind: str, created: int, model: str, service_tier: str) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": public_id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": None,
    }
    return head | {"service_tier": service_tier} if service_tier else head


class ChatFormat:
    """Chat completions."""

    def __init__(
        self,
        identity: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        rings: Fingerprints | None = None,
        service_tier: str = "",
        parsing: Parsing | None = None,
        logprobs: bool = False,
        prompts: PromptList | None = None,
        tokens_as_ids: bool = False,
        ids: PromptIds | None = None,
    ) -> None:
        """`logprobs`: whether they were asked for; `prompts`: where those of the prompt were; `tokens_as_ids`: tokens
        are named by their ids; `ids`: where those of prompt and output are shown."""
        self._tokens_as_ids, self._ids = tokens_as_ids, ids
        head = _head(f"chatcmpl-{identity}", "chat.completion.chunk", created, model, service_tier)
        self._frame = _Frame(head, rings, include_usage=include_usage)
        self._tokenizer = tokenizer
        self._parsing = parsing
        self._tools = parsing is not None and bool(parsing.tools)
        self._asked, self._prompts = logprobs, prompts

    def first(self, index: int) -> bytes | None:
        role = (
            b'{"index":%d,"delta":{"role":"assistant","content":%b,"refusal":null},'
            b'"logprobs":null,"finish_reason":null}' % (index, b"null" if self._tools else b'""')
        )
        return self._frame.chunk(index, role, b"" if self._ids is None else self._ids.field(index))

    def delta(self, index: int, piece: Piece) -> bytes:
        if self._parsing is not None:
            delta = _json.encode(chat_delta(piece.text, piece.reasoning, piece.calls, self._parsing))
        else:
            delta = b'{"content":%b}' % _json.encode(piece.text)
        return self._frame.chunk(
            index,
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}'
            % (index, delta, self._logprobs(piece.scored), b"" if self._ids is None else _ids(piece.ids)),
        )

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return self._frame.chunk(
            index,
            b'{"index":%d,"delta":{},"logprobs":%b,%b%b}'
            % (
                index,
                self._logprobs(piece.scored),
                _end(finish_reason, piece.stop_reason),
                b"" if self._ids is None else _ids(piece.ids),
            ),
        )

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown = [
            {
                "index": index,
                "message": chat_message(choice.text, choice.reasoning, choice.calls, self._parsing),
                "logprobs": msgspec.Raw(self._logprobs(choice.scored, whole=True)),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            | ({} if self._ids is None else {"token_ids": choice.ids})
            for index, choice in enumerate(choices)
        ]
        beside: dict[str, object] = {}
        if self._prompts is not None:
            beside["prompt_logprobs"] = self._prompts.of(0, choices[0].prompt)
        if self._ids is not None:
            beside[PROMPT_IDS] = msgspec.Raw(self._ids.of(0))
        return self._frame.whole("chat.completion", shown, usage, beside)

    def _logprobs(self, scored: Sequence[ScoredToken], *, whole: bool = False) -> bytes:
        """`whole`: of a whole answer, which says that there are none where they were asked for."""
        if not scored and not (whole and self._asked):
            return b"null"
        content = [
            self._token(item.token, item.known.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in item.known.top]}
            for item in scored
        ]
        return _json.encode({"content": content, "refusal": None})

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = f"token_id:{token}" if self._tokens_as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}


class CompletionFormat:
    """Completions."""

    def __init__(
        self,
        identity: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        rings: Fingerprints | None = None,
        service_tier: str = "",
        logprobs: bool = False,
        prompts: PromptList | None = None,
        tokens_as_ids: bool = False,
        ids: PromptIds | None = None,
    ) -> None:
        """`logprobs`: whether they were asked for; `prompts`: where those of the prompt were; `tokens_as_ids`: tokens
        are named by their ids; `ids`: where those of prompt and output are shown."""
        self._tokens_as_ids, self._ids = tokens_as_ids, ids
        head = _head(f"cmpl-{identity}", "text_completion", created, model, service_tier)
        self._frame = _Frame(head, rings, include_usage=include_usage)
        self._tokenizer = tokenizer
        self._asked, self._prompts = logprobs, prompts
        self._texts: dict[int, str] = {}

    def first(self, index: int) -> bytes | None:
        return None if self._ids is None else self.delta(index, Piece("", (), begins=True))

    def delta(self, index: int, piece: Piece) -> bytes:
        ids = b""
        if self._ids is not None:
            ids = b"%b%b" % (_ids(piece.ids), b"," + self._ids.field(index) if piece.begins else b"")
        return self._frame.chunk(
            index,
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}'
            % (index, _json.encode(piece.text), self._logprobs(piece.scored), ids),
        )

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return self._frame.chunk(
            index,
            b'{"index":%d,"text":"","logprobs":%b,%b%b}'
            % (
                index,
                self._logprobs(piece.scored),
                _end(finish_reason, piece.stop_reason),
                b"" if self._ids is None else _ids(piece.ids),
            ),
        )

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": msgspec.Raw(self._logprobs(choice.scored, whole=True)),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            | self._beside(choice)
            for index, choice in enumerate(choices)
        ]
        return self._frame.whole("text_completion", shown, usage)

    def _beside(self, choice: Choice) -> dict[str, Any]:
        """What is shown of its prompt and its tokens beside the text."""
        fields: dict[str, Any] = {}
        if self._prompts is not None:
            fields["prompt_logprobs"] = self._prompts.of(choice.number, choice.prompt)
        if self._ids is not None:
            fields |= {PROMPT_IDS: msgspec.Raw(self._ids.of(choice.number)), "token_ids": choice.ids}
        return fields

    def _logprobs(self, scored: Sequence[ScoredToken], *, whole: bool = False) -> bytes:
        """Offsets count from the beginning of the choice's text. `whole`: of a whole answer, which says that there
        are none where they were asked for."""
        if not scored and not (whole and self._asked):
            return b"null"
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

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._text_of(token)
        return text

    def _text_of(self, token: int) -> str:
        """A part of a character is shown by its bytes, so that no two tokens look the same."""
        if self._tokens_as_ids:
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
        fields["tool_calls"] = [_begun(call) if call.id else _more(call) for call in calls]
    return fields


def chat_message(
    text: str, reasoning: str, calls: Sequence[CallDelta], parsing: Parsing | None
) -> dict[str, Any]:
    """The `message` of a whole response; its content is null where there are calls alone."""
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls and parsing is not None and parsing.legacy:
        fields["function_call"] = _function(calls[0])
    elif calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in calls
        ]
    return fields


def _begun(call: CallDelta) -> dict[str, Any]:
    return {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}


def _more(call: CallDelta) -> dict[str, Any]:
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _function(call: CallDelta) -> dict[str, str]:
    fields = {"name": call.name} if call.name else {}
    return fields | {"arguments": call.arguments}


_PAD = 64
"""Bytes that the length of a padded chunk is a multiple of, but for what is random."""
_LETTERS = string.ascii_letters + string.digits


class Shown:
    """A format that shows choices of `choices` candidates per prompt as they were asked for."""

    def __init__(
        self,
        shape: Format,
        choices: int,
        best: int,
        hide_logprobs: bool,
        prompt: Callable[[int], EchoedPrompt] | None,
    ) -> None:
        """`best`: choices that are shown of each prompt, 0: all; `prompt`: a prompt by its number, where it is shown
        before each of its choices."""
        self._shape = shape
        self._choices = choices
        self._best = best
        self._hide_logprobs = hide_logprobs
        self._prompt = prompt

    def first(self, index: int) -> bytes | None:
        prompt = self._prompt_of(index)
        if prompt is None or prompt.has_scores:
            return self._shape.first(index)
        return self._shape.delta(index, Piece(prompt.text, (), begins=True))

    def delta(self, index: int, piece: Piece) -> bytes:
        return self._shape.delta(index, self._behind_prompt(index, piece))

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return self._shape.last(index, finish_reason, self._behind_prompt(index, piece))

    def _prompt_of(self, index: int) -> EchoedPrompt | None:
        return None if self._prompt is None else self._prompt(index // self._choices)

    def _behind_prompt(self, index: int, piece: Piece) -> Piece:
        """`piece`, its tokens counted from the prompt's beginning; the first one with the prompt, where that comes with
        log probabilities."""
        prompt = self._prompt_of(index)
        if prompt is None or not (piece.scored or piece.prompt is not None):
            return piece
        text, scored = piece.text, _moved(piece.scored, len(prompt.text))
        if piece.prompt is not None and prompt.has_scores:
            text, scored = prompt.text + text, prompt.scored(piece.prompt) + scored
        return piece._replace(text=text, scored=scored)

    def usage(self, usage: Usage) -> bytes:
        return self._shape.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown: list[Choice] = []
        for prompt in range(len(choices) // self._choices):
            of_prompt = choices[prompt * self._choices : (prompt + 1) * self._choices]
            shown += [self._as_asked(prompt, choice) for choice in _best(of_prompt, self._best)]
        return self._shape.whole(shown, usage)

    def _as_asked(self, prompt: int, choice: Choice) -> Choice:
        if self._hide_logprobs:
            choice = msgspec.structs.replace(choice, scored=())
        if self._prompt is None:
            return choice
        shown = self._prompt(prompt)
        scored = _moved(choice.scored, len(shown.text))
        if shown.has_scores:
            scored = shown.scored(choice.prompt) + scored
        return msgspec.structs.replace(choice, text=shown.text + choice.text, scored=scored)


def _moved(scored: Sequence[ScoredToken], by: int) -> list[ScoredToken]:
    """With their texts so many characters later."""
    return [item._replace(offset=item.offset + by) for item in scored]


def _best(choices: Sequence[Choice], count: int) -> Sequence[Choice]:
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
