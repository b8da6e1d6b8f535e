"""An answer as its fields ask for it: with its prompt before it, the best candidates alone, padded chunks. Pure.

candidates of a prompt   mean log probability      best_of 4, n 2
0  "a cat"               -0.9                      shown: 2, 0
1  "a dog"               -1.4
2  "the cat"             -0.3
3  "cats"                -2.0
"""

import secrets
import string
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from services.gateway.text.formats import Choice, Format, Usage
from services.gateway.text.prompt_scores import EchoedPrompt
from services.gateway.text.text_output import Piece, ScoredToken

_PAD = 64
"""Bytes that the length of a padded chunk is a multiple of, but for what is random."""
_LETTERS = string.ascii_letters + string.digits


class Shown:
    """A format that shows choices of `choices` candidates per prompt as they were asked for."""

    def __init__(
        self,
        shape: Format,
        choices: int,
        best: int,
        hide_logprobs: bool,
        prompt: Callable[[int], EchoedPrompt] | None,
    ) -> None:
        """`best`: choices that are shown of each prompt, 0: all; `prompt`: a prompt by its number, where it is shown
        before each of its choices."""
        self._shape = shape
        self._choices = choices
        self._best = best
        self._hide_logprobs = hide_logprobs
        self._prompt = prompt

    def first(self, index: int) -> bytes | None:
        prompt = self._prompt_of(index)
        if prompt is None or prompt.has_scores:
            return self._shape.first(index)
        return self._shape.delta(index, Piece(prompt.text, (), begins=True))

    def delta(self, index: int, piece: Piece) -> bytes:
        return self._shape.delta(index, self._behind_prompt(index, piece))

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return self._shape.last(index, finish_reason, self._behind_prompt(index, piece))

    def _prompt_of(self, index: int) -> EchoedPrompt | None:
        return None if self._prompt is None else self._prompt(index // self._choices)

    def _behind_prompt(self, index: int, piece: Piece) -> Piece:
        """`piece`, its tokens counted from the prompt's beginning; the first one with the prompt, where that comes with
        log probabilities."""
        prompt = self._prompt_of(index)
        if prompt is None or not (piece.scored or piece.prompt is not None):
            return piece
        text, scored = piece.text, _moved(piece.scored, len(prompt.text))
        if piece.prompt is not None and prompt.has_scores:
            text, scored = prompt.text + text, prompt.scored(piece.prompt) + scored
        return piece._replace(text=text, scored=scored)

    def usage(self, usage: Usage) -> bytes:
        return self._shape.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown: list[Choice] = []
        for prompt in range(len(choices) // self._choices):
            of_prompt = choices[prompt * self._choices : (prompt + 1) * self._choices]
            shown += [self._as_asked(prompt, choice) for choice in _best(of_prompt, self._best)]
        return self._shape.whole(shown, usage)

    def _as_asked(self, prompt: int, choice: Choice) -> Choice:
        if self._hide_logprobs:
            choice = msgspec.structs.replace(choice, scored=())
        if self._prompt is None:
            return choice
        shown = self._prompt(prompt)
        scored = _moved(choice.scored, len(shown.text))
        if shown.has_scores:
            scored = shown.scored(choice.prompt) + scored
        return msgspec.structs.replace(choice, text=shown.text + choice.text, scored=scored)


def _moved(scored: Sequence[ScoredToken], by: int) -> list[ScoredToken]:
    """With their texts so many characters later."""
    return [item._replace(offset=item.offset + by) for item in scored]


def _best(choices: Sequence[Choice], count: int) -> Sequence[Choice]:
    """The `count` with the highest mean log probability, the highest first; of equals the earlier."""
    return sorted(choices, key=lambda choice: -choice.mean_logprob)[:count] if count else choices


def with_usage(chunk: bytes, usage: Usage) -> bytes:
    """`chunk`, whose usage is null at its end, with `usage`."""
    return chunk.removesuffix(b"null}") + msgspec.json.encode(usage) + b"}"


def padded(chunk: bytes) -> bytes:
    """`chunk` with random letters in `obfuscation`, so that its length says little of its text."""
    missing = -(len(chunk) + 17) % _PAD  # what is put around them
    letters = "".join(secrets.choice(_LETTERS) for _ in range(missing))
    return chunk[:-1] + b',"obfuscation":"' + letters.encode() + b'"}'


class PredictionTally:
    """How many tokens of a prediction are in an output, each as often as it is in both. Follows the output."""

    def __init__(self, expected: Counter[int]) -> None:
        """`expected`: the prediction's tokens."""
        self._expected = expected
        self._seen: Counter[int] = Counter()
        self._read = 0
        self._came = 0

    def came(self, output: Sequence[int], count: int) -> int:
        """Of the first `count` tokens of `output`, no fewer than at the call before."""
        for token in output[self._read : count]:
            self._seen[token] += 1
            self._came += self._seen[token] <= self._expected[token]
        self._read = max(self._read, count)
        return self._came
