"""What a model says as an Anthropic message: content blocks, and the numbered events that tell of them.

    token     0                1        2                  3            (end)
    events    0 message_start  3 delta  (no text)          4 block_stop 7 block_stop
              1 block_start                                5 block_start  8 message_delta
              2 ping, 3 delta                              6 delta        9 message_stop

Invariant: the events are a function of the log alone, for each token is taken by itself, however the frames were cut
that brought it. So event n is the same for every reader on every gateway, and a stream goes on exactly behind it.
"""

from collections.abc import Coroutine
from typing import Any

import msgspec

from services.gateway.lifecycle.answer import Answer
from services.gateway.streams.formats import Usage
from services.gateway.streams.numbered_run import NumberedRun
from services.gateway.streams.output import Piece, StopReason
from services.gateway.streams.run import Chunk
from services.gateway.tokenizer.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_PING = b'{"type":"ping"}'
_STOP = b'{"type":"message_stop"}'
_SIGNATURE = b'{"type":"signature_delta","signature":""}'
_DELTAS = {
    "text": b'{"type":"text_delta","text":%b}',
    "thinking": b'{"type":"thinking_delta","thinking":%b}',
    "tool_use": b'{"type":"input_json_delta","partial_json":%b}',
}
"""By the type of a block."""


def usage_of(usage: Usage, thinking_tokens: int = 0) -> dict[str, Any]:
    """Anthropic counts what was found in the cache apart from the rest of the input."""
    cached = usage.prompt_tokens_details["cached_tokens"]
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


class MessageEvents:
    """One message, from its beginning. Pure."""

    def __init__(self, head: dict[str, Any], tier: str, *, capped: bool) -> None:
        """`head`: what of the message does not change. `capped`: at the most tokens the context is full."""
        self._head = head | {"type": "message", "role": "assistant"}
        self._tier = tier
        self._capped = capped
        self.count = 0
        """Events so far."""
        self.new: list[Chunk] = []
        """Those that nobody has taken yet."""
        self._done: list[dict[str, Any]] = []
        """Blocks that have ended."""
        self._block: dict[str, Any] = {}
        """The one that is being written, without its text; empty: there is none."""
        self._kind = ""
        self._template = b""
        self._texts: list[str] = []
        self.thinking_tokens = 0
        """Output tokens up to the last one of the thinking."""
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def start(self, usage: Usage) -> None:
        """The first token has come, or an end."""
        self._event(b"message_start", _encode({"type": "message_start", "message": self.message(usage)}))

    def add(self, piece: Piece, tokens: int) -> None:
        """What one token, the last of so many, has made clear: more of a call that has begun, then the rest."""
        if piece.calls:
            for call in piece.calls:
                if not call.id:
                    self._delta(call.arguments)
        if piece.reasoning:
            self.thinking_tokens = tokens
            if self._kind != "thinking":
                self._begin("thinking", {"thinking": "", "signature": ""})
            self._delta(piece.reasoning)
        if piece.text:
            if self._kind != "text":
                self._begin("text", {"text": ""})
            self._delta(piece.text)
        for call in piece.calls:
            if call.id:
                identity = call.id.replace("call_", "toolu_")
                self._begin("tool_use", {"id": identity, "name": call.name, "input": {}})
                self._delta(call.arguments)

    def finish(self, reason: str, stop: StopReason, usage: Usage) -> None:
        """The model has ended: with OpenAI's finish reason, perhaps at a stop string."""
        self._close()
        if isinstance(stop, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif reason == "length":
            self._end["stop_reason"] = "model_context_window_exceeded" if self._capped else "max_tokens"
        else:
            called = any(block["type"] == "tool_use" for block in self._done)
            self._end["stop_reason"] = "tool_use" if called else "end_turn"
        shown = usage_of(usage, self.thinking_tokens)
        self._event(b"message_delta", _encode({"type": "message_delta", "delta": self._end, "usage": shown}))
        self._event(b"message_stop", _STOP)

    def message(self, usage: Usage) -> dict[str, Any]:
        """As far as it has come; one that goes on has no stop reason."""
        content = [*self._done, self._whole()] if self._block else self._done
        shown = usage_of(usage, self.thinking_tokens) | {"service_tier": self._tier}
        return self._head | {"content": content, **self._end, "usage": shown}

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, kind: str, fields: dict[str, Any]) -> None:
        """What was being written is done."""
        self._close()
        index = len(self._done)
        self._kind, self._block = kind, {"type": kind, **fields}
        self._template = b'{"type":"content_block_delta","index":%d,"delta":' % index + _DELTAS[kind] + b"}"
        begin = {"type": "content_block_start", "index": index, "content_block": self._block}
        self._event(b"content_block_start", _encode(begin))
        if not index:
            self._event(b"ping", _PING)

    def _delta(self, text: str) -> None:
        if text:
            self._texts.append(text)
            data = self._template % _encode(text)
            self.new.append(Chunk(data, b"%d" % self.count, b"content_block_delta"))
            self.count += 1

    def _close(self) -> None:
        if not self._block:
            return
        index = len(self._done)
        if self._kind == "thinking":
            delta = b'{"type":"content_block_delta","index":%d,"delta":%b}' % (index, _SIGNATURE)
            self._event(b"content_block_delta", delta)
        self._event(b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % index)
        self._done.append(self._whole())
        self._block, self._kind, self._texts = {}, "", []

    def _whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return self._block | ({"input": input_of(text)} if self._kind == "tool_use" else {self._kind: text})

    def _event(self, kind: bytes, data: bytes) -> None:
        self.new.append(Chunk(data, b"%d" % self.count, kind))
        self.count += 1


def input_of(arguments: str) -> Any:
    """A call's arguments; empty where they were cut off by the end of the answer, which its stop reason says."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}


class MessageRun(NumberedRun):
    """As `Run`; a position is the number of an event."""

    _events: MessageEvents

    def _begun_events(self, answer: Answer, tokenizer: Tokenizer) -> MessageEvents:
        record = answer.record
        tier = "batch" if record.requests[0].lane == "batch" else "standard"
        head = {"id": answer.public_id, "model": record.model_shown}
        return MessageEvents(head, tier, capped=record.capped)

    def collect(self) -> Coroutine[Any, Any, bytes]:
        """As `Run.collect`. A whole message of text alone is made without events."""
        self._told = self.answer.record.parsing is not None
        return super().collect()

    def _show(self, piece: Piece) -> None:
        events = self._events
        if not events.count:
            events.start(self._usage())
        if piece.text or piece.reasoning or piece.calls:
            events.add(piece, self._output.tokens)

    def _finish(self) -> None:
        self._events.finish(self._output.finish, self._output.stop_reason, self._usage())

    def _append(self, batch: list[Chunk], index: int) -> None:
        """The new events that the client does not have."""
        events = self._events
        new, events.new = events.new, []
        batch += new if self._known < 0 else [one for one in new if int(one.position) > self._known]
        if not self._open:
            self._check_known()

    def _whole(self) -> bytes:
        events = self._events
        if not self._told:
            events.add(self._output.take(), self._output.tokens)
            self._finish()
        return _encode(events.message(self._usage()))
