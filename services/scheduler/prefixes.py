"""Names for the beginning of a prompt, so that prompts that begin alike meet the same cache.

A chain of hashes, as the ring's own prefix index has: the name of a longer beginning covers the shorter ones.

    64 tokens ──▶ 256 tokens ──▶ 1024 tokens ──▶ 4096 tokens
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

LENGTHS = (64, 256, 1024, 4096)
"""Tokens. What is shorter than the first is computed sooner than it is looked for."""


class Prefix(NamedTuple):
    """A prompt's beginning."""

    key: int
    tokens: int


def prefixes(model: str, prompt: Sequence[int], salt: str = "") -> tuple[Prefix, ...]:
    """The named beginnings of `prompt`, longest first; none for a short one, or one that no model could take.
    Prompts of different `salt` share no cache, hence no name."""
    found: list[Prefix] = []
    digest, start = (f"{model}\0{salt}" if salt else model).encode(), 0
    for length in LENGTHS:
        if len(prompt) < length:
            break
        try:
            tokens = array("i", prompt[start:length]).tobytes()
        except OverflowError:  # the ring will say so
            break
        digest = blake2b(digest + tokens, digest_size=16).digest()
        found.append(Prefix(int.from_bytes(digest[:8], "little"), length))
        start = length
    return tuple(reversed(found))
