"""Questions about long texts whose answers are known, made from seeds. Pure.

    needle      one number hidden in noise, at a given depth                    needle in a haystack
    needles     the same among seven others, under other names                  RULER's multi-key
    values      four numbers under one name: all are asked for                  RULER's multi-value
    variables   X1 = 12345, X2 = X1, ...: which variables have that value?      RULER's variable tracking
    words       a long list of words: which come most often?                    RULER's common words
    facts       people and where they were born: where was this one?            question answering

The kinds of RULER (arXiv:2404.06654), with texts of our own. A text has as many characters as it is told to have; how
many tokens that are depends on the model, and is measured before (`asking.py`).
"""

import re
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from benchmarks.serve.workloads import WORDS

_LISTS = """\
Ada Ben Cleo Dan Eva Finn Greta Hugo Ines Jon Kira Leo Mona Nils Olga Paul Rosa Sam Tara Udo
Adler Berg Costa Duval Ebner Falk Grant Huber Iqbal Jensen Kovac Lund Moser Novak Olsen Price Quist Reyes Stone Tanaka
Lisbon Oslo Cairo Lima Quito Dakar Hanoi Tokyo Perth Delhi Rome Paris Vienna Berlin Madrid Dublin Athens Prague Warsaw
lamp kettle ladder basket violin carpet bottle candle bicycle mirror hammer blanket
"""
NAMES, FAMILIES, PLACES, THINGS = (tuple(line.split()) for line in _LISTS.splitlines())
ACTS = ("bought a new", "lost an old", "repaired the", "painted the", "sold a broken", "borrowed a small")
TIMES = ("On Monday", "In the morning", "Last summer", "Before dinner", "After the rain", "One day")
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
CHAIN = 4
"""Variables of one value."""
COMMON, OFTEN, SELDOM = 3, 30, 3
"""Words that come most often; how often they come, and how often the others do."""


class Sample(msgspec.Struct, frozen=True):
    """One question about one text."""

    task: str
    length: int
    """Tokens that the whole was made for."""
    depth: float | None
    """Where in the text the answer stands, 0 to 1; None: in several places."""
    text: str
    question: str
    begin: str
    """How the answer begins, for models that only continue texts."""
    expected: list[str]
    """What the answer has, in any order."""
    max_tokens: int

    def score(self, answer: str) -> float:
        """Which part of what was expected is in `answer`, 0 to 1; in whole words."""
        said = set(re.findall(r"\w+", answer.casefold()))
        return len({one.casefold() for one in self.expected} & said) / len(self.expected)


Parts = tuple[str, str, str, list[str]]
"""Text, question, begin of the answer, what is expected."""


def make(task: str, length: int, characters: int, depth: float | None, seed: int) -> Sample:
    """A question of `task` about a text of about so many characters, for a prompt of `length` tokens. The same
    arguments make the same one."""
    random = Random(f"{task}/{length}/{depth}/{seed}")
    text, question, begin, expected = TASKS[task](random, characters, 0.5 if depth is None else depth)
    return Sample(
        task, length, depth if task in PLACED else None, text, question, begin, expected, _MOST.get(task, 32)
    )


def noise(random: Random, characters: int) -> list[str]:
    """Sentences of about so many characters that say nothing of any question."""
    found, size = list[str](), 0
    while size < characters:
        sentence = (
            f"{random.choice(TIMES)} {random.choice(NAMES)} {random.choice(ACTS)} {random.choice(THINGS)}."
        )
        found.append(sentence)
        size += len(sentence) + 1
    return found


def hidden(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """A text of `sentences` with each needle at its depth, 0 to 1."""
    places = sorted((round(depth * len(sentences)), number) for number, (depth, _) in enumerate(needles))
    found, at = list[str](), 0
    for place, number in places:
        found += [*sentences[at:place], needles[number][1]]
        at = place
    return " ".join([*found, *sentences[at:]])


# --- tasks ---------------------------------------------------------------------------------------


def _number(random: Random) -> str:
    return str(random.randrange(1_000_000, 10_000_000))


def _says(name: str, number: str) -> str:
    return f"The magic number of {name} is {number}."


def _needle(random: Random, characters: int, depth: float) -> Parts:
    return _keys(random, characters, depth, 1)


def _needles(random: Random, characters: int, depth: float) -> Parts:
    return _keys(random, characters, depth, 8)


def _keys(random: Random, characters: int, depth: float, count: int) -> Parts:
    names = random.sample(PLACES, count)
    numbers = [_number(random) for _ in names]
    depths = [depth, *(random.random() for _ in names[1:])]
    needles = [(at, _says(*pair)) for at, *pair in zip(depths, names, numbers, strict=True)]
    text = hidden(noise(random, characters), needles)
    begin = f"The magic number of {names[0]} is"
    return text, f"What is the magic number of {names[0]}?", begin, [numbers[0]]


def _values(random: Random, characters: int, depth: float) -> Parts:
    name, numbers = random.choice(PLACES), [_number(random) for _ in range(4)]
    text = hidden(noise(random, characters), [(random.random(), _says(name, number)) for number in numbers])
    return text, f"What are all four magic numbers of {name}?", f"The magic numbers of {name} are", numbers


def _variables(random: Random, characters: int, depth: float) -> Parts:
    names = _names_of_variables(random, 2 * CHAIN)
    ours, theirs = names[:CHAIN], names[CHAIN:]
    value, other = _number(random), _number(random)
    needles = _chain(random, ours, value) + _chain(random, theirs, other)
    text = hidden(noise(random, characters), needles)
    question = f"Which {CHAIN} variables have the value {value}, directly or through another variable?"
    return text, question, f"The variables with the value {value} are", ours


def _names_of_variables(random: Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choice(LETTERS) for _ in range(5))] = None
    return list(found)


def _chain(random: Random, names: Sequence[str], value: str) -> list[tuple[float, str]]:
    """Each variable stands behind the one that it is made of."""
    depths = sorted(random.random() for _ in names)
    sources = [value, *(f"VAR {name}" for name in names)]
    said = (f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False))
    return list(zip(depths, said, strict=True))


def _words(random: Random, characters: int, depth: float) -> Parts:
    words = random.sample(WORDS, len(WORDS))
    common, others = words[:COMMON], words[COMMON:]
    found = common * OFTEN
    size, at = sum(len(word) + 2 for word in found), 0
    while size < characters:
        word = others[at % len(others)]
        found += [word] * SELDOM
        size += SELDOM * (len(word) + 2)
        at += 1
    random.shuffle(found)
    question = f"Which {COMMON} words come most often in this list?"
    return ", ".join(found), question, f"The {COMMON} words that come most often are:", common


def _facts(random: Random, characters: int, depth: float) -> Parts:
    people = [f"{first} {last}" for first in NAMES for last in FAMILIES]
    random.shuffle(people)
    sentences = noise(random, characters)
    count = max(1, min(len(people), len(sentences) // 8))
    facts = [f"{person} was born in {random.choice(PLACES)}." for person in people[:count]]
    place = random.choice(PLACES)
    facts[0] = f"{people[0]} was born in {place}."
    depths = [depth, *(random.random() for _ in facts[1:])]
    kept = sentences[: max(0, len(sentences) - count)]
    text = hidden(kept, list(zip(depths, facts, strict=True)))
    return text, f"In which city was {people[0]} born?", f"{people[0]} was born in", [place]


TASKS: dict[str, Callable[[Random, int, float], Parts]] = {
    "needle": _needle,
    "needles": _needles,
    "values": _values,
    "variables": _variables,
    "words": _words,
    "facts": _facts,
}
PLACED = ("needle", "needles", "facts")
"""Tasks whose answer stands in one place."""
_MOST = {"values": 64, "variables": 64, "words": 48}
"""Tokens of an answer."""
