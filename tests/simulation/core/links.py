"""How long bytes take from one host to another, and whether they pass at all. Pure: randomness is passed in.

usual: 50 to 500 µs ── 1 of 500: up to 40 ms ── 1 of 20,000: lost once, sent again after 0.2 s
slow, lossy, cut: as faults have it, for one direction
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

LATENCY = (0.00005, 0.0005)  # seconds that bytes take between two hosts, from and to
HERE = (0.00001, 0.00006)  # the same within a host
# At most so many seconds for this share of segments: somebody else's burst in a switch, a scheduler's slice.
LONG, LONG_SHARE = 0.04, 1 / 500
LOST_SHARE = 1 / 20_000  # of segments are lost on a line that is well
RESEND_AFTER = 0.2  # TCP's first time-out for sending a segment again; each further one is twice as long
# A line that is whole again is noticed at the latest after so long, for time-outs have grown while it was cut.
RESEND_MOST = 30.0


@dataclass(eq=False)
class Link:
    """One direction between two hosts."""

    near: bool = False  # within a host
    cut: bool = False
    slow: float = 0.0  # seconds that everything takes longer, one half more or less
    loss: float = 0.0  # the share of segments that are lost, besides the usual one

    def delay(self, draw: random.Random) -> float:
        """Seconds until a segment arrives, what is sent again after losses included."""
        least, most = HERE if self.near else LATENCY
        drawn = draw.random()
        delay = least + drawn * (most - least)
        if not self.near and drawn < LONG_SHARE:
            delay += draw.random() * LONG + (RESEND_AFTER if drawn < LOST_SHARE else 0.0)
        if self.slow:
            delay += self.slow * (0.5 + draw.random())
        if self.loss:
            delay += self._resent(draw)
        return delay

    def _resent(self, draw: random.Random) -> float:
        delay, pause = 0.0, RESEND_AFTER
        while pause < RESEND_MOST and draw.random() < self.loss:
            delay += pause
            pause *= 2
        return delay


class Links:
    """Between all hosts, by their names."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = {}
        # Hosts that nobody reaches, and that reach nobody: isolated, or without power.
        self._apart: set[str] = set()

    def between(self, one: str, other: str) -> Link:
        """From one to the other. It stays the same object."""
        link = self._links.get((one, other))
        if link is None:
            link = self._links[one, other] = Link(near=one == other)
        return link

    def passes(self, one: str, other: str) -> bool:
        if one == other:
            return True
        if self._apart and (one in self._apart or other in self._apart):
            return False
        link = self._links.get((one, other))
        return link is None or not link.cut

    def cut(self, pairs: Iterable[tuple[str, str]], cut: bool) -> None:
        for one, other in pairs:
            self.between(one, other).cut = cut

    def part(self, host: str) -> None:
        self._apart.add(host)

    def join(self, host: str) -> None:
        self._apart.discard(host)


def noticed(draw: random.Random, seconds: float) -> float:
    """After how many seconds TCP sends again over a line that was cut for `seconds` and is whole now."""
    return draw.random() * min(RESEND_MOST, RESEND_AFTER + seconds / 2)
