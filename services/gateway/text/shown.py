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
from services.gateway.text.text_output import Piece

_PAD = 64
"""Bytes that the length of a padded chunk is a multiple of, but for what is random."""
_LETTERS = string.ascii_letters + string.digits


class Shown:
    """A format that shows choices of `choices` candidates per prompt as they were asked for."""

    def __init__(
        self, shape: Format, choices: int, best: int, hide_logprobs: bool, prompt: Callable[[int], str] | None
    ) -> None:
        """`best`: choices that are shown of each prompt, 0: all; `prompt`: the text of a prompt by its number,
        where it is shown before each of its choices."""
        self._shape = shape
        self._choices = choices
        self._best = best
        self._hide_logprobs = hide_logprobs
        self._prompt = prompt

    def first(self, index: int) -> bytes | None:
        if self._prompt is None:
            return self._shape.first(index)
        return self._shape.delta(index, Piece(self._prompt(index // self._choices), ()))

    def delta(self, index: int, piece: Piece) -> bytes:
        return self._shape.delta(index, piece)

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return self._shape.last(index, finish_reason, piece)

    def usage(self, usage: Usage) -> bytes:
        return self._shape.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shown: list[Choice] = []
        for prompt in range(len(choices) // self._choices):
            of_prompt = choices[prompt * self._choices : (prompt + 1) * self._choices]
            shown += [self._as_asked(prompt, choice) for choice in _best(of_prompt, self._best)]
        return self._shape.whole(shown, usage)

    def _as_asked(self, prompt: int, choice: Choice) -> Choice:
        text = choice.text if self._prompt is None else self._prompt(prompt) + choice.text
        return msgspec.structs.replace(choice, text=text, scored=() if self._hide_logprobs else choice.scored)


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


def predicted(prediction: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of `prediction` are in `output`, each as often as it is in both."""
    return (Counter(prediction) & Counter(output)).total()
