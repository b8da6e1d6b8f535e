"""Text to tokens and back, for one model."""

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jinja2
import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from services.gateway.errors import InvalidParameter
from services.gateway.text.chat_template import ChatTemplate, TemplateOptions, special_tokens, template_source
from services.gateway.tools.traits import Traits, traits_of
from shared.errors import InternalError

LONG_TEXT = 16_384
"""Characters from which encoding leaves the event loop (the library lets go of the interpreter)."""
MOST_PENDING = 8
"""Output tokens that may wait for the rest of a character; more of them are none, and are shown as U+FFFD."""
_LONGEST_TAIL = 3
"""Tokens of an incomplete character at most: UTF-8 has up to four bytes, and a token one or more."""
CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first output token is decoded after: they decide on leading spaces."""


class Detokenizer(Protocol):
    """Output tokens to text, piece by piece."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became complete with `tokens`; never half a character."""
        ...

    def flush(self) -> str:
        """The text that is left at the end; what is no whole character becomes U+FFFD."""
        ...


class Tokenizer(Protocol):
    """What the endpoints need of a model's tokenizer."""

    @property
    def traits(self) -> Traits:
        """What the chat template can do."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """The conversation as the text of a prompt. Raises `InvalidParameter`."""
        ...

    async def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a rendered conversation."""
        ...

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A plain text as a prompt, with the special tokens that the model wants around it where `special`."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `tokens`, all at once."""
        ...

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """What the vocabulary calls each of `tokens`; empty for one that it does not have."""
        ...

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """For an output that follows `prompt` (empty: that begins a new text). `keep`: special tokens that are
        shown in any case."""
        ...

    def specials(self, texts: Collection[str]) -> dict[str, int]:
        """Those of `texts` that are special tokens, with their ids."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; part of a character, perhaps."""
        ...


class ModelTokenizer:
    """A tokenizer of the `tokenizers` library with a chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """From the files of a `TokenizerBundle`. Raises `InternalError` when they are unusable."""
        try:
            config = _read(files, "special_tokens_map.json") | _read(files, "tokenizer_config.json")
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            source = template_source(files, config)
            self._template = ChatTemplate(source, special_tokens(config)) if source else None
            source = template_source(files, config, "tool_use")
            self._tool_template = ChatTemplate(source, special_tokens(config)) if source else self._template
        except KeyError:
            raise InternalError("The tokenizer bundle of the model lacks tokenizer.json.") from None
        except (jinja2.TemplateError, ValueError) as error:
            raise InternalError(f"The tokenizer files of the model cannot be used: {error}.") from error
        except Exception as error:  # what the library raises for a file that is not one
            raise InternalError(f"The model's tokenizer.json cannot be used: {error}.") from error
        self.traits = traits_of(self._tool_template) if self._tool_template else Traits()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = {entry.content: token for token, entry in added if entry.special}
        decoder = msgspec.json.decode(files["tokenizer.json"], type=dict[str, Any]).get("decoder")
        self._bytes = _TokenBytes(self._tokenizer, byte_level="ByteLevel" in str(decoder))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise InvalidParameter(
                "This model has no chat template: it goes on with texts, and knows no conversations. Send a prompt to "
                "/v1/completions, or put a chat_template.jinja beside the model's files and serve it again.",
                param="messages",
                reason="no_chat_template",
            )
        return template.render(messages, tools, options)

    async def encode_rendered(self, text: str) -> list[int]:
        return await self._encode(text, False)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        return await self._encode(text, special)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        encoding = await asyncio.to_thread(
            self._tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> Detokenizer:
        if skip_special_tokens and keep & self._special.keys():
            hidden = frozenset(token for text, token in self._special.items() if text not in keep)
            return _FilteredDetokenizer(self.detokenizer([], skip_special_tokens=False), hidden)
        context = list(prompt[-CONTEXT_TOKENS:])
        if self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens).endswith("\ufffd"):
            context = []  # it ends within a character: the decoder could not tell it from the output
        return _StreamDetokenizer(self._tokenizer, context, skip_special_tokens)

    def specials(self, texts: Collection[str]) -> dict[str, int]:
        return {text: self._special[text] for text in texts if text in self._special}

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.of(token)


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])


class _StreamDetokenizer:
    """Token by token, so that the text does not depend on how the tokens arrive. What is held back is bounded:
    some characters' bytes never come, and a stream decodes all that it holds at each step."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, context: list[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._begin(context)
        self._pending: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        return self._step(tokens[0]) if len(tokens) == 1 else "".join(map(self._step, tokens))

    def _begin(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)
        self._context = context
        """The last tokens whose text has been returned."""

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, [token]) or ""
        except Exception:  # a decoder that rewrites what it has shown: begin anew behind it
            self._begin([])
            text = self._stream.step(self._tokenizer, self._pending) or ""
        if text:
            self._forget_pending(len(self._pending))
        return text or (self._overflow() if len(self._pending) > MOST_PENDING else "")

    def _overflow(self) -> str:
        """Shows all that is pending but for what may be the beginning of a character; the stream begins anew."""
        context = self._context
        text = self._take(len(self._pending) - _LONGEST_TAIL)
        if not text:  # hidden tokens: the text goes on where it was
            self._begin(context)
        else:
            self._begin([] if self._decode(self._context).endswith("\ufffd") else self._context)
        more = self._stream.step(self._tokenizer, self._pending) or ""
        if more:
            self._forget_pending(len(self._pending))
        return text + more

    def flush(self) -> str:
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        """The text of the first `count` pending tokens, whole or not; they are pending no longer."""
        if not count:
            return ""
        shown, tokens = self._decode(self._context), self._pending[:count]
        text = self._decode(self._context + tokens)
        text = text[len(shown) :] if text.startswith(shown) else self._decode(tokens)
        self._forget_pending(count)
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _forget_pending(self, count: int) -> None:
        self._context = (self._context + self._pending[:count])[-CONTEXT_TOKENS:]
        self._pending = self._pending[count:]


class _FilteredDetokenizer:
    """Leaves out some tokens."""

    def __init__(self, detokenizer: Detokenizer, hidden: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden

    def feed(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in self._hidden]
        return self._detokenizer.feed(shown) if shown else ""

    def flush(self) -> str:
        return self._detokenizer.flush()


class _TokenBytes:
    """Bytes of single tokens, for logprobs."""

    _BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if byte_level else {}
        self._added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}

    def of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet:
            return bytes(self._alphabet[char] for char in piece if char in self._alphabet)
        if match := self._BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()  # SentencePiece's sign for a space


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (Radford et al. 2019), backwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


class StubTokenizer:
    """For the stub engine: a token is a byte, text is Latin-1, a conversation its contents line by line."""

    traits = Traits()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        text = "".join(f"{message['content']}\n" for message in messages)
        return text[:-1] if options is not None and options.continue_final else text

    async def encode_rendered(self, text: str) -> list[int]:
        return await self.encode(text)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode("latin-1", errors="replace"))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token & 0xFF for token in tokens).decode("latin-1")

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token & 0xFF) for token in tokens]

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> Detokenizer:
        return _StubDetokenizer()

    def specials(self, texts: Collection[str]) -> dict[str, int]:
        return {}

    def token_bytes(self, token: int) -> bytes:
        return chr(token & 0xFF).encode()


class _StubDetokenizer:
    def flush(self) -> str:
        return ""

    def feed(self, tokens: Sequence[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode("latin-1")
