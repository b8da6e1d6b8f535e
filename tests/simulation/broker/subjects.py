"""Subjects, and who has subscribed to which. Pure.

a.b.c    literal: three tokens        a.*.c    any one token there        a.>    any one or more that follow
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_CACHED = 8192  # subjects whose subscribers are remembered: most are inboxes, which are asked for once


def is_valid(subject: str, *, wildcards: bool) -> bool:
    """Whether one may publish to it, or with `wildcards` subscribe to it."""
    tokens = subject.split(".")
    for at, token in enumerate(tokens):
        if not token or " " in token:
            return False
        if token == ">" and (not wildcards or at != len(tokens) - 1):
            return False
        if token == "*" and not wildcards:
            return False
    return True


def is_literal(subject: str) -> bool:
    return "*" not in subject and ">" not in subject


def matches(pattern: str, subject: str) -> bool:
    """Whether every subject of `subject`, which may be a pattern too, is one of `pattern`."""
    if pattern == subject or pattern == ">":
        return True
    wanted, given = pattern.split("."), subject.split(".")
    for at, token in enumerate(wanted):
        if token == ">":
            return len(given) > at
        if at >= len(given) or given[at] == ">" or token not in ("*", given[at]):
            return False
    return len(given) == len(wanted)


def overlaps(one: str, other: str) -> bool:
    """Whether some subject is one of both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


class Filter:
    """One or more patterns; none: everything. It remembers what it was asked."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = [] if ">" in patterns else patterns
        # The only subject that it takes; None: it takes others too.
        self.literal = patterns[0] if len(patterns) == 1 and is_literal(patterns[0]) else None
        self._known: dict[str, bool] = {}

    def takes(self, subject: str) -> bool:
        if not self.patterns:
            return True
        if self.literal is not None:
            return subject == self.literal
        known = self._known.get(subject)
        if known is None:
            if len(self._known) >= MOST_CACHED:
                self._known.clear()
            known = self._known[subject] = any(matches(pattern, subject) for pattern in self.patterns)
        return known


class _Node(Generic[T]):
    __slots__ = ("children", "here")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.here: list[T] = []


class Sublist(Generic[T]):
    """What is kept under patterns, found by subject, in the order in which it was put there."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._cache: dict[str, list[T]] = {}
        self._order: dict[int, int] = {}
        self._number = 0

    def insert(self, pattern: str, item: T) -> None:
        node = self._root
        for token in pattern.split("."):
            node = node.children.setdefault(token, _Node())
        node.here.append(item)
        self._number += 1
        self._order[id(item)] = self._number
        self._forget(pattern)

    def remove(self, pattern: str, item: T) -> None:
        """No error where it is not there."""
        path, node = [], self._root
        for token in pattern.split("."):
            if token not in node.children:
                return
            path.append((node, token))
            node = node.children[token]
        if item not in node.here:
            return
        node.here.remove(item)
        self._order.pop(id(item), None)
        self._forget(pattern)
        for parent, token in reversed(path):
            child = parent.children[token]
            if child.here or child.children:
                return
            del parent.children[token]

    def _forget(self, pattern: str) -> None:
        if is_literal(pattern):
            self._cache.pop(pattern, None)
        else:
            self._cache.clear()

    def match(self, subject: str) -> list[T]:
        """Those under patterns that take `subject`. The list is not to be changed."""
        found = self._cache.get(subject)
        if found is None:
            found = sorted(self._walk(self._root, subject.split("."), 0), key=self._place)
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            self._cache[subject] = found
        return found

    def _place(self, item: T) -> int:
        return self._order[id(item)]

    def _walk(self, node: _Node[T], tokens: list[str], at: int) -> Iterator[T]:
        rest = node.children.get(">")
        if at == len(tokens):
            yield from node.here
            return
        if rest is not None:
            yield from rest.here
        for token in (tokens[at], "*"):
            child = node.children.get(token)
            if child is not None:
                yield from self._walk(child, tokens, at + 1)
