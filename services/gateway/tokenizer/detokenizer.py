"""Output tokens to text, piece by piece: a function of the tokens alone."""

import re
from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from services.gateway.tokenizer.token_bound import byte_alphabet

# Output tokens that may wait for the rest of a character; more of them are none, and are shown as U+FFFD.
MOST_PENDING = 8
# Tokens of an incomplete character at most: UTF-8 has up to four bytes, and a token one or more.
_LONGEST_TAIL = 3
# Tokens of the prompt that the first output token is decoded after: they decide on leading spaces.
CONTEXT_TOKENS = 6
KNOWN_TEXTS = 1 << 16  # tokens of a tokenizer whose texts are kept; of others they are found anew


class Detokenizer(Protocol):
    """Output tokens to text, piece by piece."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became complete with `tokens`; never half a character."""
        ...

    def flush(self) -> str:
        """The text that is left at the end; what is no whole character becomes U+FFFD."""
        ...


class TokenTexts(dict[int, str | None]):
    """The text of each token of a byte-level tokenizer, whose texts are the sums of their tokens' bytes; None where a
    token is not whole characters. Kept as they are asked for, and shared by all streams: a step of a decoder of each
    stream's own was an eighth of what a streamed token costs."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token: int) -> str | None:
        decoded = self._tokenizer.decode([token], skip_special_tokens=self._skip)
        text = None if "\ufffd" in decoded else decoded
        if len(self) < KNOWN_TEXTS:
            self[token] = text
        return text


class StreamDetokenizer:
    """Token by token, so that the text does not depend on how the tokens arrive. What is held back is bounded:
    some characters' bytes never come, and a stream decodes all that it holds at each step."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        context: list[int],
        skip_special_tokens: bool,
        texts: TokenTexts | None = None,
    ) -> None:
        """`texts`: where tokens have texts of their own; None: what stands before them decides, too."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._texts = texts
        self._pending: list[int] = []
        if texts is None:
            self._begin(context)

    def feed(self, tokens: Sequence[int]) -> str:
        if len(tokens) != 1:
            return "".join([self.feed((token,)) for token in tokens])
        if self._texts is not None and not self._pending:
            if (text := self._texts[tokens[0]]) is not None:
                return text
            self._begin([])
        return self._step(tokens[0])

    def _begin(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)
        self._context = context[-CONTEXT_TOKENS:]  # the last tokens whose text has been returned

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # a decoder that rewrites what it has shown: begin anew behind it
            self._begin([])
            text = self._stream.step(self._tokenizer, self._pending)
        if text:
            self._forget_pending(len(self._pending))
            return text
        return self._overflow() if len(self._pending) > MOST_PENDING else ""

    def _overflow(self) -> str:
        """Shows all that is pending but for what may be the beginning of a character; the stream begins anew."""
        context = list(self._context)
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
        self._context += self._pending[:count]
        del self._context[:-CONTEXT_TOKENS], self._pending[:count]


class FilteredDetokenizer:
    """Leaves out some tokens."""

    def __init__(self, detokenizer: Detokenizer, hidden: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden

    def feed(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in self._hidden]
        return self._detokenizer.feed(shown) if shown else ""

    def flush(self) -> str:
        return self._detokenizer.flush()


class TokenBytes:
    """Bytes of single tokens, for logprobs."""

    _BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet() if byte_level else {}
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
