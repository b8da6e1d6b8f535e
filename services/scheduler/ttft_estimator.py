"""When a group would give the first token of one more request: what placement compares groups by.

    seconds = round trip                                  dispatch, as seen lately
            + one step                                    the one that gives the token,
               x (1 + sequences / places)                 longer the fuller the batch
            + (queued + uncached tokens                   prompts before it, and its own
               + 64 x sequences) / speed                  what runs slows prompts down
            + steps of an answer x sequences beyond       with no place free, or no memory,
              the places / places                         somebody must end first

Speeds are the group's own, measured in its ring. A group that has not measured any yet is reckoned with those
of its peers, or with constants, divided by its weight: 1, and less where the health monitor has found it slow.
What it has measured says that by itself. Wrong figures cost time and nothing else: the group's leader has
the last word.
"""

from dataclasses import dataclass

from services.scheduler.request import EXPECTED_OUTPUT
from shared.messages import GroupLoad

SEQUENCE_TOKENS = 64  # waiting prompt tokens that weigh as much as one more sequence in a group's batch
SCARCE_SHARE = 20  # blocks are scarce when fewer than one in so many can be had at once
UNKNOWN_STEP = 0.02  # seconds of a step where none was measured
UNKNOWN_SPEED = 4000.0  # prompt tokens per second where none were measured
UNKNOWN_SLOTS = 64  # sequences that a group computes at once where it has not said
LEAST_WEIGHT = 0.1  # a degraded group is reckoned with this weight at least: what is left of it is still used
_MEMORY = 0.2  # weight of the newest round trip in the average
# A round trip counts for so many times the average at most, or for so many seconds: a group that was held up
# once would otherwise look slow for good, since nobody would ask it again.
_OUTLIER, _ORDINARY = 4.0, 0.05


@dataclass(slots=True)
class Usual:
    """Of the groups of one model, what was told last: a group that has not measured its own speed is reckoned with
    it. So a ring that is new or has rested is given the work that shows what it can do."""

    step: float = UNKNOWN_STEP  # seconds
    speed: float = UNKNOWN_SPEED  # prompt tokens per second

    def hear(self, load: GroupLoad) -> None:
        self.step = load.step_seconds or self.step
        self.speed = load.prompt_tokens_per_second or self.speed


@dataclass(slots=True)
class TtftEstimator:
    """One group's figures, put together once per change and not per request."""

    latency: float = 0.0  # running average of the round trips, in seconds
    slots: int = UNKNOWN_SLOTS
    seconds: float = 0.0  # until the first token of a request all of whose tokens are cached
    seconds_per_token: float = 1 / UNKNOWN_SPEED  # what each token of its own adds that is not cached
    queue_seconds: float = 0.0  # work on prompts that lies before it

    def answered(self, seconds: float) -> None:
        """A dispatch was answered after `seconds`. Takes effect with the next `update`."""
        counted = min(seconds, max(_OUTLIER * self.latency, _ORDINARY))
        self.latency += _MEMORY * (counted - self.latency) if self.latency else counted

    def rested(self) -> None:
        """Nothing was asked of the group for a while: what was seen counts less, from the next `update` on."""
        self.latency *= 1 - _MEMORY

    def update(self, load: GroupLoad, sent_requests: int, sent_tokens: int, weight: float, usual: Usual) -> None:
        """`load` is the last report; requests of `sent_tokens` tokens were sent since. `weight`: how fast the
        group is, against what is usual (1)."""
        factor = 1 / min(max(weight, LEAST_WEIGHT), 1.0)
        step = load.step_seconds or factor * usual.step
        per_token = 1 / load.prompt_tokens_per_second if load.prompt_tokens_per_second else factor / usual.speed
        self.slots = load.slots or UNKNOWN_SLOTS
        sequences = load.running + load.waiting + sent_requests
        queued = load.waiting_tokens + sent_tokens
        beyond = max(0, sequences + 1 - self.slots)
        if load.free_blocks * SCARCE_SHARE < load.total_blocks:
            beyond = max(beyond, 1) + self.slots // SCARCE_SHARE
        self.queue_seconds = queued * per_token
        self.seconds_per_token = per_token
        self.seconds = (
            self.latency
            + step * (1 + sequences / self.slots)
            + (queued + SEQUENCE_TOKENS * sequences) * per_token
            + EXPECTED_OUTPUT * step * beyond / self.slots
        )

    def first_token(self, uncached: int) -> float:
        """Seconds until the first token of a request with `uncached` tokens to compute."""
        return self.seconds + uncached * self.seconds_per_token
