"""Prompts that begin alike are tokenized once: a system prompt, the earlier turns of a conversation.

A tokenizer of the `tokenizers` library first cuts a text at its special tokens; normalizer, pre-tokenizer and model
then see each part alone. So the tokens of a text are those of its segments, each from one special token to another,
one behind the other, and the tokens of segments are kept:

    <|start|>system\\nYou are ...   <|end|>\\n<|start|>user\\nWhat is ...   <|end|>\\n<|start|>assistant\\n
    kept from the request before   tokenized, and kept                   kept from the request before

Long ones, documents and earlier turns, are forgotten when others were used later. Of short ones nearly all are new
and never come again; a few, a short system prompt and the header of the answer, come with every request. So they are
kept apart, and forgotten all at once: that a few are tokenized again then costs less than an order of their use.

The library looks for the leftmost of its added tokens, and of those that begin there for the longest, in the text as it
came, but for tokens that are looked for in the normalized parts. A token that takes spaces around it along, or counts
between words alone, would join segments: a tokenizer with such a one has none.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import tokenizers

from shared.limits import TOKENIZED_SEGMENTS

SHORTEST = 32  # characters of a segment, but for the last one: what is shorter goes with what follows
LONG = 256  # characters of a segment that is kept by its digest, in the order of use
# Shorter segments that are kept: their texts and tokens take a few hundred bytes each, at most 2 KiB.
MOST_SHORT = 512
_EACH = 200  # bytes that a long segment takes beside its tokens


class Segments:
    """Tokenizes for one model, from any thread; keeps the tokens of segments."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, most_bytes: int = TOKENIZED_SEGMENTS.value) -> None:
        """`most_bytes`: of long segments."""
        self._tokenizer = tokenizer
        self._most = most_bytes
        self._short: dict[str, array[int]] = {}
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        added = [entry for entry in tokenizer.get_added_tokens_decoder().values() if not entry.normalized]
        self._begins = frozenset(entry.content for entry in added if entry.special)
        joins = any(entry.lstrip or entry.rstrip or entry.single_word for entry in added)
        self._pattern = None if joins or not self._begins else longest_of(entry.content for entry in added)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, nothing put around it."""
        if self._pattern is None or len(text) < SHORTEST:
            return self._encoded([text])[0]
        segments = self._cut(self._pattern, text)
        known = [self._known(segment) for segment in segments]
        new = iter(self._encoded([one for one, tokens in zip(segments, known, strict=True) if tokens is None]))
        found = list[int]()
        for segment, tokens in zip(segments, known, strict=True):
            if tokens is None:
                ids = next(new)
                found += ids
                self._keep(segment, array("I", ids))
            else:
                found += tokens
        return found

    def _cut(self, pattern: "re.Pattern[str]", text: str) -> list[str]:
        """One behind the other, so that texts which begin alike are cut alike there."""
        found, begin = list[str](), 0
        for match in pattern.finditer(text):
            if match.start() - begin >= SHORTEST and match[0] in self._begins:
                found.append(text[begin : match.start()])
                begin = match.start()
        found.append(text[begin:])
        return found

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        """In a batch even alone: so the library lets go of the interpreter meanwhile, and leaves out offsets."""
        if not texts:
            return []
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _known(self, segment: str) -> "array[int] | None":
        if len(segment) < LONG:
            return self._short.get(segment)
        name = _name(segment)
        with self._lock:
            tokens = self._kept.get(name)
            if tokens is not None:
                self._kept.move_to_end(name)
        return tokens

    def _keep(self, segment: str, tokens: "array[int]") -> None:
        if len(segment) < LONG:
            if len(self._short) >= MOST_SHORT:
                self._short.clear()
            self._short[segment] = tokens
            return
        name = _name(segment)
        with self._lock:
            if name in self._kept:
                return
            self._kept[name] = tokens
            self._bytes += _size(tokens)
            while self._bytes > self._most:
                self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(tokens: "array[int]") -> int:
    return _EACH + tokens.itemsize * len(tokens)


def _name(segment: str) -> bytes:
    """Nobody finds two segments of one name. Empty for a text that has no UTF-8: the library says so itself."""
    try:
        return blake2b(segment.encode(), digest_size=16).digest()
    except UnicodeEncodeError:
        return b""


def longest_of(texts: Iterable[str]) -> "re.Pattern[str]":
    """Finds the leftmost of `texts`, and there the longest, in time that does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(tree) if tree else r"(?!)")


def _alternatives(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _alternatives(inner) for char, inner in node.items() if char]
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
