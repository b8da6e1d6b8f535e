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

from services.gateway.core.asgi import StreamChunk
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.formats import Usage
from services.gateway.streams.numbered_reader import NumberedReader
from services.gateway.streams.output import OutputDelta, StopReason, arguments_of
from services.gateway.streams.progress import PromptProgress
from services.gateway.streams.stream_reader import Write
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import TokenEntry
from shared.messages.records import GenerationRecord

_encode = msgspec.json.Encoder().encode
# By the type of a block.
_DELTAS = {
    "text": b'{"type":"text_delta","text":%b}',
    "thinking": b'{"type":"thinking_delta","thinking":%b}',
    "tool_use": b'{"type":"input_json_delta","partial_json":%b}',
}


def usage_of(usage: Usage, thinking_tokens: int = 0) -> dict[str, Any]:
    """Anthropic counts what was found in the cache apart from the rest of the input."""
    cached = usage.prompt_tokens_details["cached_tokens"]
    of_input: dict[str, int] = {}
    of_output = {"thinking_tokens": thinking_tokens}
    usage.add_sparse(of_input, of_output)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": of_output,
        **({"input_tokens_details": of_input} if of_input else {}),
    }


class MessageEvents:
    """One message, from its beginning. Pure."""

    def __init__(self, identity: str, record: GenerationRecord) -> None:
        self._head = {"id": identity, "type": "message", "role": "assistant", "model": record.model_shown}
        self._tier = "batch" if record.requests[0].lane == "batch" else "standard"
        self._at_length = "model_context_window_exceeded" if record.capped else "max_tokens"
        self.count = 0  # events so far
        self.new: list[StreamChunk] = []  # those that nobody has taken yet
        self._done: list[dict[str, Any]] = []  # blocks that have ended
        # The one that is being written, without its text; empty: there is none.
        self._block: dict[str, Any] = {}
        self.kind = ""  # its type
        self._template = b""
        self._texts: list[str] = []
        self.thinking_tokens = 0  # output tokens up to the last one of the thinking
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def start(self, usage: Usage) -> None:
        """The first token has come, or an end."""
        self._event("message_start", message=self.message(usage))

    def add(self, piece: OutputDelta, tokens: int) -> None:
        """What one token, the last of so many, has made clear: more of a call that has begun, then the rest."""
        for call in piece.calls:
            if not call.id:
                self._delta(call.arguments)
        if piece.reasoning:
            self.thinking_tokens = tokens
            if self.kind != "thinking":
                self._begin("thinking", {"thinking": "", "signature": ""})
            self._delta(piece.reasoning)
        if piece.text:
            if self.kind != "text":
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
            self._end["stop_reason"] = self._at_length
        else:
            called = any(block["type"] == "tool_use" for block in self._done)
            self._end["stop_reason"] = "tool_use" if called else "end_turn"
        self._event("message_delta", delta=self._end, usage=usage_of(usage, self.thinking_tokens))
        self._event("message_stop")

    def text(self, text: str) -> StreamChunk:
        """More of the block that is being written: an event that nobody else takes."""
        self._texts.append(text)
        self.count += 1
        return StreamChunk(self._template % _encode(text), b"%d" % (self.count - 1), b"content_block_delta")

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
        self.kind, self._block = kind, {"type": kind, **fields}
        self._template = b'{"type":"content_block_delta","index":%d,"delta":' % index + _DELTAS[kind] + b"}"
        self._event("content_block_start", index=index, content_block=self._block)
        if not index:
            self._event("ping")

    def _delta(self, text: str) -> None:
        if text:
            self.new.append(self.text(text))

    def _close(self) -> None:
        if not self._block:
            return
        index = len(self._done)
        if self.kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            self._event("content_block_delta", index=index, delta=signature)
        self._event("content_block_stop", index=index)
        self._done.append(self._whole())
        self._block, self.kind, self._texts = {}, "", []

    def _whole(self) -> dict[str, Any]:
        if self.kind == "tool_use":
            return self._block | {"input": arguments_of("".join(self._texts)) or {}}
        return self._block | {self.kind: "".join(self._texts)}

    def _event(self, kind: str, **fields: Any) -> None:
        self.new.append(StreamChunk(_encode({"type": kind, **fields}), b"%d" % self.count, kind.encode()))
        self.count += 1


class MessageEventReader(NumberedReader):
    """As `Run`; a position is the number of an event."""

    _events: MessageEvents
    text_is_event = True

    def _begun_events(self, answer: RequestState, tokenizer: Tokenizer) -> MessageEvents:
        return MessageEvents(answer.public_id, answer.record)

    def collect(self) -> Coroutine[Any, Any, bytes]:
        """As `Run.collect`. A whole message of text alone is made without events."""
        self._told = self.answer.record.parsing is not None
        return super().collect()

    def _progress_chunk(self, progress: PromptProgress) -> StreamChunk:
        """In a ping, which Anthropic's clients pass over: a message has not begun before its first token."""
        return StreamChunk(_encode({"type": "ping", "prompt_progress": progress}), b"", b"ping")

    def _show(self, piece: OutputDelta) -> None:
        events, output = self._events, self._output
        if not events.count and self._told:
            events.start(self._usage())
        if piece.text or piece.reasoning or piece.calls:
            events.add(piece, output.tokens)
        if output.finish:
            events.finish(output.finish, output.stop_reason, self._usage())

    def _write_text(self, write: Write) -> bool:
        """As of any run, where a block of text has begun; of one token, for each is taken by itself."""
        _, entry = self._news[0]
        events = self._events
        if events.kind != "text" or events.new or events.count <= self._known:
            return False
        if not isinstance(entry, TokenEntry) or len(entry.tokens) != 1 or entry.tokens[0] in self._stop_token_ids:
            return False
        return super()._write_text(write)

    def _text_chunk(self, text: str) -> StreamChunk:
        return self._events.text(text)

    def _append(self, batch: list[StreamChunk], index: int) -> None:
        """The new events that the client does not have."""
        events = self._events
        new, events.new = events.new, []
        if self._known >= 0:
            new = [one for one in new if int(one.position) > self._known]
            if not self._open:
                self._check_known()
        batch += new

    def _whole(self) -> bytes:
        if not self._told:
            self._show(self._output.take())
        return _encode(self._events.message(self._usage()))
