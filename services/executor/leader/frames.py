"""Entries on their way into frames: what follows within a moment travels together.

    step        1    2    3    4    5    6                steps of 0.4 ms
    frame       1         2 3       4 5 ...               at most one per FRAME_INTERVAL
    entry       [t1]      [t2 t3]   [t4 t5]

Each frame costs the broker, the journal and every reader the same, however many tokens it has. A ring whose
steps take longer than the interval publishes each step at once; a faster one publishes steps together.
Time (seconds, monotonic) comes in as an argument.

Frames published lately are kept as they went out, to be published again after the connection was lost. A core publish
that was on its way when the broker died is lost without an error, and a lost last frame leaves no gap that a reader
could see. Positions make a repeat harmless. While the broker is away the newest are kept, in bounded number and size;
readers see the gap before those, and their gateways have what is missing computed again.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from services.executor.scheduler.batcher import Entries
from shared import limits
from shared.messages import GenerationRequest, TokenEntry

FRAME_INTERVAL = 0.002  # seconds between two frames, at least: the longest that a token may wait here
# Vectors and log probabilities of prompts that one frame holds: a message of NATS has 1 MiB by default.
FRAME_BYTES = 256 << 10


class Gathering:
    """Entries by consumer, in order. A generation's consecutive entries become one."""

    def __init__(self) -> None:
        self._entries: Entries = {}
        # Of consumers with entries of more than one step: where each generation's last entry stands in the list.
        self._last: dict[str, dict[str, int]] = {}
        self._taken_at = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entries: Entries) -> None:
        """Takes entries over; their lists are this object's from now on."""
        for consumer, news in entries.items():
            known = self._entries.setdefault(consumer, news)
            if known is not news:  # a fast ring, or a first entry that only says who has the request
                self._join(consumer, known, news)

    def _join(self, consumer: str, known: list[TokenEntry], news: list[TokenEntry]) -> None:
        last = self._last.get(consumer)
        if last is None:
            last = self._last[consumer] = {entry.generation_id: at for at, entry in enumerate(known)}
        for entry in news:
            at = last.get(entry.generation_id, -1)
            if at >= 0 and (joined := _joined(known[at], entry)) is not None:
                known[at] = joined
            else:
                last[entry.generation_id] = len(known)
                known.append(entry)

    def wait(self, now: float) -> float:
        """Seconds until what is here should go; 0: now."""
        return max(0.0, self._taken_at + FRAME_INTERVAL - now)

    def take(self, now: float) -> Entries:
        """Everything, once; those first that begin an answer, since a reader takes one after the other and a
        first token is waited for most."""
        entries, self._entries = self._entries, {}
        for news in entries.values():
            begin = [entry for entry in news if not entry.position]
            if begin:
                news[:] = begin + [entry for entry in news if entry.position]
        self._last.clear()
        self._taken_at = now
        return entries


def _joined(first: TokenEntry, then: TokenEntry) -> TokenEntry | None:
    """Both as one entry; None where `then` does not simply go on."""
    if (
        first.finish
        or first.attempt != then.attempt
        or first.position + len(first.tokens) != then.position
        or (first.logprobs is None) != (then.logprobs is None)
        or (then.cached_tokens and not first.cached_tokens)
        or then.prompt_scores
        or first.computed
        or then.computed
    ):
        return None
    first.tokens.extend(then.tokens)
    if first.logprobs is not None and then.logprobs is not None:
        first.logprobs.extend(then.logprobs)
    if not then.finish:
        return first
    ending = {name: getattr(then, name) for name in ("finish", "error_code", "error", "retryable", "vector")}
    return msgspec.structs.replace(first, **ending)


def in_frames(entries: list[TokenEntry]) -> Iterator[list[TokenEntry]]:
    """`entries` in order, in as many frames as keep what they hold beside tokens within `FRAME_BYTES` each; one entry
    may hold more alone."""
    if not [entry for entry in entries if entry.vector or entry.prompt_scores]:  # nearly always
        yield entries
        return
    sizes = [len(entry.vector) + len(entry.prompt_scores) for entry in entries]
    frame: list[TokenEntry] = []
    held = 0
    for entry, size in zip(entries, sizes, strict=True):
        if frame and held + size > FRAME_BYTES:
            yield frame
            frame, held = [], 0
        frame.append(entry)
        held += size
    yield frame


def output_tokens(entries: Entries) -> int:
    """New tokens in the entries of a step."""
    return sum([len(entry.tokens) for of_consumer in entries.values() for entry in of_consumer])


def acknowledgements(requests: list[GenerationRequest], accepted: set[str], fingerprint: str = "") -> Entries:
    """Empty entries that tell each consumer which group has its generation, before there is a token: should the ring
    be lost now, it knows at once that the request must be handed in again. `fingerprint`: of the ring."""
    entries: Entries = {}
    for request in requests:
        if request.generation_id in accepted:
            position = len(request.generated)
            entry = TokenEntry(
                request.generation_id,
                request.attempt,
                position,
                [],
                suspected=request.suspected,
                fingerprint=fingerprint,
            )
            entries.setdefault(request.consumer, []).append(entry)
    return entries


KEPT_SECONDS = 15.0
KEPT_FRAMES = limits.RECENT_FRAMES.value
KEPT_BYTES = limits.RECENT_FRAME_BYTES.value


class RecentFrames:
    """Encoded frames. Pure: time (seconds, monotonic) comes in as an argument."""

    def __init__(self) -> None:
        self._frames: deque[tuple[float, str, bytes]] = deque()
        self._bytes = 0

    def add(self, consumer: str, frame: bytes, now: float, connected: bool) -> None:
        """Keeps `frame`. While the connection is away nothing grows old."""
        frames = self._frames
        frames.append((now, consumer, frame))
        self._bytes += len(frame)
        while (
            (connected and frames[0][0] < now - KEPT_SECONDS)
            or len(frames) > KEPT_FRAMES
            or (self._bytes > KEPT_BYTES and len(frames) > 1)
        ):
            _, _, oldest = frames.popleft()
            self._bytes -= len(oldest)

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """(consumer, frame), the oldest first."""
        return iter([(consumer, frame) for _, consumer, frame in self._frames])
