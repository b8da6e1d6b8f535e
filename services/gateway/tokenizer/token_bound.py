"""How many tokens a text has at least, by its size alone: so what cannot fit is refused before it is tokenized."""

from collections.abc import Sequence
from typing import Any

import msgspec
import tokenizers

# Characters that a normalizer of the name makes one of, at most (canonical compositions of Unicode 16).
_RESHAPING = {"NFC": 4, "NFD": 1, "Lowercase": 1}
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class _Part(msgspec.Struct):
    """A normalizer or pre-tokenizer of tokenizer.json."""

    type: str
    normalizers: list["_Part"] = []
    pretokenizers: list["_Part"] = []
    behavior: str = ""
    pattern: dict[str, str] = {}
    content: str = ""


class _Model(msgspec.Struct, frozen=True):
    type: Any = None
    byte_fallback: Any = None


class TokenizerJson(msgspec.Struct):
    """The parts of tokenizer.json that are looked at; its vocabulary is skipped."""

    model: _Model = _Model()
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class TokenBound:
    """Pure."""

    def __init__(self, file: TokenizerJson, tokenizer: tokenizers.Tokenizer) -> None:
        try:
            normalizers, splits = (
                _flat(msgspec.convert(part, _Part | None)) for part in (file.normalizer, file.pre_tokenizer)
            )
        except msgspec.ValidationError:  # parts of a kind that is not known here
            normalizers, splits = [_Part("unknown")], []
        self._known = _keeps_all(file.model, splits, tokenizer) and all(map(_is_bounded, normalizers))
        # A normalizer may make a character of many bytes one of few.
        self._in_characters = any(part.type in _RESHAPING for part in normalizers)
        self._spaces_vanish = any(
            entry.lstrip or entry.rstrip for entry in tokenizer.get_added_tokens_decoder().values()
        )
        # Bytes or characters of text for one token.
        self._most = _longest_token(tokenizer, byte_level=any(part.type == "ByteLevel" for part in splits))
        for part in normalizers:
            self._most *= _RESHAPING.get(part.type, 1)

    def fewest_tokens(self, text: str) -> int:
        """No fewer than so many; 0: that is not known of this tokenizer."""
        if not self._known:
            return 0
        if self._spaces_vanish:
            text = "".join(text.split())
        size = len(text) if self._in_characters or text.isascii() else len(text.encode(errors="replace"))
        return -(-size // self._most)


def _flat(part: _Part | None) -> list[_Part]:
    if part is None:
        return []
    inner = [*part.normalizers, *part.pretokenizers]
    return [found for each in inner for found in _flat(each)] if inner else [part]


def _longest_token(tokenizer: tokenizers.Tokenizer, *, byte_level: bool) -> int:
    """Bytes of text that one token stands for, at most."""
    added = [entry.content for entry in tokenizer.get_added_tokens_decoder().values()]
    longest = max((len(content.encode()) for content in added), default=1)
    for token in map(tokenizer.id_to_token, range(tokenizer.get_vocab_size(with_added_tokens=False))):
        if token and len(token) > longest // 4:  # else it is shorter in UTF-8 too
            size = len(token) if byte_level else len(token.replace("\u2581", " ").encode())
            longest = max(longest, size)
    return longest


def _is_bounded(part: _Part) -> bool:
    """Whether it is known how much shorter a normalizer can make a text."""
    if part.type == "Replace":
        old, new = part.pattern.get("String", ""), part.content
        return bool(old) and len(new) >= len(old) and len(new.encode()) >= len(old.encode())
    return part.type == "Prepend" or part.type in _RESHAPING


def _keeps_all(model: _Model, splits: Sequence[_Part], tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether no character goes without a token: every byte has one, and no splitter removes anything."""
    if model.type != "BPE" or not tokenizer.get_vocab_size():
        return False
    kinds = {part.type for part in splits}
    if not kinds <= {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"}:
        return False
    if any(part.behavior == "Removed" for part in splits):
        return False
    if "ByteLevel" in kinds:
        return all(tokenizer.token_to_id(char) is not None for char in byte_alphabet())
    return model.byte_fallback is True and all(tokenizer.token_to_id(token) is not None for token in _BYTES)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (Radford et al. 2019), backwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
