"""`python -m benchmarks.long_context MODEL`: a stack of its own; with `--url`: any OpenAI-compatible endpoint.

Every question is asked in each way that `--sparse` names, the same question, one way after the other.
"""

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Report, about, one_of, publish, run
from benchmarks.long_context.asking import DENSE, Answer, Api, Endpoint, Ruler, field_of
from benchmarks.long_context.scores import Cell, errors, sheet, tables
from benchmarks.long_context.tasks import PLACED, TASKS, Sample, make
from benchmarks.start import stack_of

_LENGTH = re.compile(r"(\d{1,7})(k?)")
LEAST = 256
"""Tokens: a shorter text has no depth."""


class LongContextReport(Report, frozen=True, kw_only=True):
    model: str
    ruler: Ruler
    tasks: list[Cell]
    depths: list[Cell]
    answers: list[Answer]


def lengths_of(text: str) -> list[int]:
    """Tokens, of `2k,4096`. Raises `BenchError`."""
    found = []
    for part in text.split(","):
        match = _LENGTH.fullmatch(part.strip().lower())
        length = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if length < LEAST:
            raise BenchError(
                f"--lengths {part.strip()!r} is no number of tokens from {LEAST} on, such as 8k or 8192."
            )
        found.append(length)
    return found


def samples_of(
    tasks: Sequence[str], lengths: Sequence[int], depths: int, count: int, ruler: Ruler
) -> list[Sample]:
    """`count` questions of each task and length, and at each of so many depths where the answer stands in one."""
    places = [0.5] if depths == 1 else [index / (depths - 1) for index in range(depths)]
    return [
        make(task, length, ruler.characters(length, 96), depth, seed)
        for length in lengths
        for task in tasks
        for depth in (places if task in PLACED else [None])
        for seed in range(count)
    ]


@contextmanager
def _served(model: str, url: str) -> Iterator[tuple[str, str]]:
    """Address and model of an endpoint: `url`, or of a stack that is started for it, with summaries of pages."""
    if url:
        yield url, model
        return
    with (
        TemporaryDirectory(prefix="ryzanstein-bench-") as scratch,
        stack_of(Path(scratch), model, None, [], {"RYZANSTEIN_SPARSE_ATTENTION": "true"}) as stack,
    ):
        stack.wait_ready()
        yield stack.url, stack.model


def main(
    model: Annotated[
        str, typer.Argument(help="As `ryzanstein up --model` takes it; with --url the model's name there.")
    ] = "",
    url: Annotated[str, typer.Option(help="Of an endpoint that runs already.")] = "",
    lengths: Annotated[
        str, typer.Option(help="Tokens of prompt and answer, with commas: 2k,8k.")
    ] = "2k,4k,8k",
    sparse: Annotated[
        list[str] | None,
        typer.Option(
            help="A way of asking, several times: dense, pages, window, or with fields as in pages,budget=4096."
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Only these; may be given several times: {', '.join(TASKS)}.")
    ] = None,
    depths: Annotated[int, typer.Option(help="Places of an answer in the text.", min=1, max=101)] = 5,
    samples: Annotated[int, typer.Option(help="Questions of each task, length and depth.", min=1)] = 2,
    concurrency: Annotated[int, typer.Option(help="Questions at a time.", min=1, max=256)] = 1,
    completions: Annotated[
        bool,
        typer.Option(
            "--completions", help="Have the model continue the text, as base models do; else chats."
        ),
    ] = False,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables to this file.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Needle in a haystack and RULER's kinds of tasks, with dense attention and sparse beside each other."""
    choices = list(dict.fromkeys(sparse or [DENSE, "pages", "window"]))
    for choice in choices:
        field_of(choice)
    wanted = one_of("--task", dict.fromkeys(task or TASKS), TASKS)
    if not (model or url):
        raise BenchError("Name a model, or an endpoint with --url.")
    sizes = lengths_of(lengths)
    api: Api = "completions" if completions else "chat"
    key = os.environ.get("OPENAI_API_KEY", "") if url else ""

    async def asked(address: str, named: str) -> tuple[Ruler, list[Answer], str]:
        async with Endpoint(address, named, api, key) as endpoint:
            ruler = await endpoint.measure()
            questions = samples_of(wanted, sizes, depths, samples, ruler)
            answers = await endpoint.ask_all(questions, choices, concurrency, tell=choices != [DENSE])
            return ruler, answers, endpoint.model

    with _served(model, url) as (address, named):
        ruler, answers, served = asyncio.run(asked(address, named))
    found = tables(answers)
    report = LongContextReport(
        **about(),
        model=served,
        ruler=ruler,
        tasks=found.tasks,
        depths=found.depths,
        answers=answers,
    )
    sheets = [sheet(cells, name) for cells, name in ((found.tasks, "task"), (found.depths, "depth")) if cells]
    publish(report, *sheets, *errors(answers), f"Model {served}.", json=json)
    if markdown_file is not None:
        markdown_file.write_text("\n".join([f"`{report.command}`\n", *(one.markdown() for one in sheets)]))


if __name__ == "__main__":
    run(main)
