"""Scores of answers by task, length, depth and choice, as tables. Pure.

task     length   dense   pages   window
needle      8k    100%     97%     21%
depth 0.5   8k    100%     95%      0%
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from benchmarks.harness import Sheet
from benchmarks.long_context.asking import Answer


class Cell(msgspec.Struct, frozen=True):
    """What came of all questions of one row, asked in one way."""

    row: tuple[str, int]
    """Task, or depth, and length."""
    choice: str
    score: float
    """Mean, 0 to 1; of those that were answered."""
    answered: int
    failed: int
    prompt_tokens: float
    """Mean."""
    sparse: float
    """Part of all tokens that have not read everything."""
    seconds: float
    """Mean."""


class Tables(NamedTuple):
    tasks: list[Cell]
    depths: list[Cell]
    """Of the tasks whose answer stands in one place."""


def tables(answers: Sequence[Answer]) -> Tables:
    placed = [answer for answer in answers if answer.sample.depth is not None]
    return Tables(
        _cells(answers, lambda answer: answer.sample.task),
        _cells(placed, lambda answer: f"depth {answer.sample.depth:g}"),
    )


def _cells(answers: Iterable[Answer], name: Callable[[Answer], str]) -> list[Cell]:
    groups: dict[tuple[tuple[str, int], str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault(((name(answer), answer.sample.length), answer.choice), []).append(answer)
    return [_cell(row, choice, found) for (row, choice), found in groups.items()]


def _cell(row: tuple[str, int], choice: str, answers: Sequence[Answer]) -> Cell:
    good = [answer for answer in answers if not answer.error]
    count = max(1, len(good))
    prompts = sum(answer.prompt_tokens for answer in good)
    return Cell(
        row,
        choice,
        sum(answer.score for answer in good) / count,
        len(good),
        len(answers) - len(good),
        prompts / count,
        sum(answer.sparse_tokens for answer in good) / max(1, prompts),
        sum(answer.seconds for answer in good) / count,
    )


def sheet(cells: Sequence[Cell], first: str) -> Sheet:
    """A row for each task, or depth, and length; a column for each choice."""
    choices = list(dict.fromkeys(cell.choice for cell in cells))
    found = {(cell.row, cell.choice): cell for cell in cells}
    rows = []
    for row in dict.fromkeys(cell.row for cell in cells):
        of_row = [found[row, choice] for choice in choices]
        prompt = max(cell.prompt_tokens for cell in of_row)
        rows.append((row[0], length_name(row[1]), f"{prompt:.0f}", *map(_shown, of_row)))
    return Sheet((first, "length", "prompt tokens", *choices), rows)


def _shown(cell: Cell) -> str:
    if not cell.answered:
        return "-"
    sparse = f" ({cell.sparse:.0%} sparse)" if cell.sparse else ""
    return f"{cell.score:.0%}{sparse}"


def length_name(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def errors(answers: Sequence[Answer]) -> list[str]:
    """Each kind of error once, with how many answers it has cost."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return [f"{count} x {text}" for text, count in counts.items()]
