"""The workloads, as data, and what they expand to: sessions of user messages.

| name | clients | requests | prompt | output | note |
| --- | --- | --- | --- | --- | --- |
| W1 | 1 | 5 | 128 | 128 | one at a time |
| W2 | 16 | 48 | 256, all distinct | 128 | |
| W3 | 64 | 128 | 64, all distinct | 64 | |
| W4 | 8 sessions at once | 4 turns each | +100 tokens a turn | 64 | answers stay in the history |
| W4s | 8 sessions one after another | 4 turns each | +100 tokens a turn | 64 | |

A single request is a session of one turn, so that one load loop serves all of them. Prompt sizes are
in tokens of the rendered chat template. The same seed gives the same load.

A prompt is a chain of words that are one token each, so its size is the template's overhead plus the
number of its words. Which words are single tokens is asked of the server: a group of candidates is sent
in one tiny request, and its `usage.prompt_tokens` tells whether each cost one token; a group that does
not fit is halved. With a tokenizer at hand the same questions are answered locally.

The prompts of a load are never sent beforehand, so that calibration fills no prefix cache with them.
Every prompt opens with another pair of words: no two share more than their first word beyond the chat
template, and none of those that follow each other closely shares even that.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.errors import BenchError

# How many tokens the server counts for a conversation: user and assistant messages in turn.
Measure = Callable[[Sequence[str]], Awaitable[int]]

_FOLDER = Path(__file__).parent / "words"
# Candidates that open a message, so that no space comes before them, and plain English for the rest.
STARTS = tuple((_FOLDER / "starts.txt").read_text().split())
WORDS = tuple((_FOLDER / "words.txt").read_text().split())
_CHUNK = 32
_ENOUGH_STARTS = 128
_ENOUGH_WORDS = 96


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What calibration finds out about a tokenizer and its chat template."""

    starts: tuple[str, ...]  # one token each where a message begins
    words: tuple[str, ...]  # one token each after a space
    overhead: int  # tokens that the template puts around a single user message
    turn_overhead: int  # tokens that the template adds around an answer and the next user message


class PromptSource:
    """An endless supply of distinct messages. The same vocabulary and seed give the same messages."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._starts = self._random.sample(vocabulary.starts, len(vocabulary.starts))
        self._words = self._random.sample(vocabulary.words, len(vocabulary.words))
        self._made = 0

    def prompt(self, tokens: int) -> str:
        """A first user message whose rendered prompt has `tokens` tokens."""
        return self._message(tokens, self._vocabulary.overhead)

    def follow_up(self, tokens: int) -> str:
        """A later user message which, with the template's share, adds `tokens` tokens to the conversation
        (the answer before it is not counted)."""
        return self._message(tokens, self._vocabulary.turn_overhead)

    def _message(self, tokens: int, overhead: int) -> str:
        count = tokens - overhead
        if count < 2:
            raise BenchError(
                f"A prompt of {tokens} tokens is too small: the model's chat template alone takes {overhead};"
                f" ask for at least {overhead + 2}."
            )
        turn, start = divmod(self._made, len(self._starts))
        # Each time round the starts meet the next word, so that pairs repeat only after all were used.
        second = self._words[(start + turn) % len(self._words)]
        self._made += 1
        rest = self._random.choices(self._words, k=count - 2)
        return " ".join([self._starts[start], second, *rest])


async def calibrate(measure: Measure, *, turns: bool = True) -> Vocabulary:
    """Find single-token words and the template's overhead by asking `measure`.

    Without `turns` the question about later turns is left out. Raises BenchError where the tokenizer
    has too few of the candidates as single tokens.
    """
    # A single ASCII letter is one token in every vocabulary in use.
    overhead = await measure(["x"]) - 1
    turn_overhead = await measure(["x", "x", "x"]) - overhead - 3 if turns else overhead

    async def are_starts(candidates: Sequence[str]) -> bool:
        # What follows a line break is split as at the beginning; the line breaks cost one token each.
        return await measure(["\n".join(candidates)]) == overhead + 2 * len(candidates) - 1

    async def are_words(candidates: Sequence[str]) -> bool:
        return await measure([" ".join(["x", *candidates])]) == overhead + 1 + len(candidates)

    starts = await _singles(STARTS, are_starts, _ENOUGH_STARTS)
    words = await _singles(WORDS, are_words, _ENOUGH_WORDS)
    if len(starts) < 16 or len(words) < 16:
        raise BenchError(
            "Prompts of an exact size cannot be built: the server's usage.prompt_tokens does not grow by one"
            " for common English words; check that it counts the rendered prompt."
        )
    return Vocabulary(tuple(starts), tuple(words), overhead, turn_overhead)


async def _singles(
    candidates: Sequence[str], fits: Callable[[Sequence[str]], Awaitable[bool]], enough: int
) -> list[str]:
    """Those of `candidates` that are single tokens, in order, until there are `enough` of them."""
    found: list[str] = []
    for at in range(0, len(candidates), _CHUNK):
        if len(found) >= enough:
            break
        found += await _narrow(list(candidates[at : at + _CHUNK]), fits)
    return found


async def _narrow(group: list[str], fits: Callable[[Sequence[str]], Awaitable[bool]]) -> list[str]:
    if await fits(group):
        return group
    if len(group) == 1:
        return []
    half = len(group) // 2
    return await _narrow(group[:half], fits) + await _narrow(group[half:], fits)


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load: `clients` clients each start their next session when the last has ended."""

    name: str
    clients: int
    requests: int
    prompt_tokens: int  # tokens that each turn adds: the whole rendered prompt in a first turn
    output_tokens: int
    turns: int = 1

    @property
    def sessions(self) -> int:
        return self.requests // self.turns

    def resized(self, *, requests: int | None = None, clients: int | None = None) -> "Workload":
        """The same kind of load with other numbers; requests are rounded up to whole sessions."""
        sessions = self.sessions if requests is None else -(-requests // self.turns)
        return replace(self, requests=sessions * self.turns, clients=clients or self.clients)


@dataclass(frozen=True, slots=True)
class Session:
    """User messages to be sent in order, each after the answer to the one before."""

    session_id: str | None  # sent as X-Session-ID; None for a session of one turn
    messages: tuple[str, ...]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W1", clients=1, requests=5, prompt_tokens=128, output_tokens=128),
        Workload("W2", clients=16, requests=48, prompt_tokens=256, output_tokens=128),
        Workload("W3", clients=64, requests=128, prompt_tokens=64, output_tokens=64),
        Workload("W4", clients=8, requests=32, prompt_tokens=100, output_tokens=64, turns=4),
        Workload("W4s", clients=1, requests=32, prompt_tokens=100, output_tokens=64, turns=4),
    )
}


def sessions(workload: Workload, source: PromptSource, label: str) -> list[Session]:
    """The sessions of one round; `label` makes their ids unique across rounds and runs."""
    return [_session(workload, source, f"{label}-{index}") for index in range(workload.sessions)]


def _session(workload: Workload, source: PromptSource, session_id: str) -> Session:
    first = source.prompt(workload.prompt_tokens)
    later = [source.follow_up(workload.prompt_tokens) for _ in range(workload.turns - 1)]
    return Session(session_id if later else None, (first, *later))
