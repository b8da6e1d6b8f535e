"""Load client for any server with OpenAI's chat completions: `python -m benchmarks.serve --help`.

Runs the named workloads (see `benchmarks.serve.workloads`), or a closed loop of your own, and prints throughput, time
to first token, gaps between tokens and errors. Answers are streamed, greedy and of a fixed length (end of sequence
ignored); tokens are counted by the server's usage field.

How requests are sent and timed is told in `benchmarks.serve.sse`, how figures are computed in `benchmarks.serve.stats`,
how prompts get an exact size in `benchmarks.serve.workloads`.
"""

import asyncio
import importlib
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Markdown, Rounds, about, progress_bars, publish
from benchmarks.harness import run as run_program
from benchmarks.report import ServeReport, Setting, markdown, parts
from benchmarks.serve.runner import Between, Target, choose_model, run_round, server_measure, warm_up
from benchmarks.serve.sse import Client
from benchmarks.serve.stats import Sample, Summary, median_round
from benchmarks.serve.workloads import WORKLOADS, PromptSource, Vocabulary, Workload, calibrate, sessions

_REQUESTS = 64  # of a loop of the user's own without --requests


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run against which server.

    `vocabulary`: how to build prompts, where that is known already; None asks the server. `needs_done`
    and `keep_alive`: see `benchmarks.serve.sse.Client`.
    """

    url: str
    workloads: Sequence[Workload]
    seed: int
    model: str | None = None
    api_key: str | None = None
    extra: dict[str, object] = field(default_factory=dict)
    rounds: int = 1
    timeout: float = 600.0
    command: str = ""
    vocabulary: Vocabulary | None = None
    needs_done: bool = True
    keep_alive: bool = True
    between: Between | None = None


def choose_workloads(
    names: Iterable[str], own: Workload | None = None, *, requests: int | None = None, clients: int | None = None
) -> list[Workload]:
    """The workloads that the options ask for: the user's `own` where there is one, else those of these names, without
    any, all. `requests` and `clients` replace those of named workloads. Raises BenchError if the options contradict."""
    wanted = list(names)
    if own is None:
        return [each.resized(requests=requests, clients=clients) for each in named_workloads(wanted)]
    if clients is not None or wanted:
        raise BenchError("--workload and --clients are for named workloads: leave them out, or --concurrency.")
    return [own]


def named_workloads(wanted: Sequence[str]) -> list[Workload]:
    """The workloads of these names, in their order; all for none or `all`. Raises BenchError."""
    if not wanted or "all" in (name.lower() for name in wanted):
        return list(WORKLOADS.values())
    known = {name.lower(): workload for name, workload in WORKLOADS.items()}
    if unknown := [name for name in wanted if name.lower() not in known]:
        raise BenchError(f"There is no workload {unknown[0]!r}: choose from {', '.join(WORKLOADS)}, all.")
    return [known[name.lower()] for name in wanted]


async def run(plan: Plan, progress: Progress) -> ServeReport:
    """Run all rounds of all workloads, interleaved. Raises BenchError if the server cannot be measured."""
    client = Client(
        plan.url, api_key=plan.api_key, timeout=plan.timeout, needs_done=plan.needs_done, keep_alive=plan.keep_alive
    )
    try:
        target = Target(client, await choose_model(client, plan.model), plan.extra)
        vocabulary = plan.vocabulary or await _calibrate(plan, target, progress)
        rounds = await _run_rounds(plan, target, PromptSource(vocabulary, plan.seed), progress)
    finally:
        client.close()
    where = about() | {"command": plan.command}
    setting = Setting(**where, url=client.url, model=target.model, seed=plan.seed)
    return ServeReport(setting=setting, summaries=[median_round(each) for each in rounds], rounds=rounds)


async def _calibrate(plan: Plan, target: Target, progress: Progress) -> Vocabulary:
    task = progress.add_task("calibrating prompts", total=None)
    turns = any(workload.turns > 1 for workload in plan.workloads)
    vocabulary = await calibrate(server_measure(target), turns=turns)
    progress.remove_task(task)
    return vocabulary


async def _run_rounds(plan: Plan, target: Target, source: PromptSource, progress: Progress) -> list[list[Summary]]:
    """The summaries of each workload, round by round."""
    # All prompts are made before the first request, so that a size that does not fit is told at once.
    loads = [
        [sessions(workload, source, f"bench-{plan.seed:x}-{at}-{workload.name}") for at in range(plan.rounds)]
        for workload in plan.workloads
    ]
    warm = [source.prompt(workload.prompt_tokens) for workload in plan.workloads]
    found: list[list[Summary]] = [[] for _ in plan.workloads]
    for at in range(plan.rounds):
        for index, workload in enumerate(plan.workloads):
            if at == 0:
                await warm_up(target, warm[index], workload.output_tokens)
            name = f"{workload.name}, round {at + 1} of {plan.rounds}"
            task = progress.add_task(name, total=workload.requests)
            found[index].append(
                await run_round(
                    target, workload, loads[index][at], on_request=_advance(progress, task), between=plan.between
                )
            )
    return found


def _advance(progress: Progress, task: object) -> Callable[[Sample], None]:
    return lambda sample: progress.advance(task)  # type: ignore[arg-type]


def _parse_extra(text: str | None) -> dict[str, object]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise BenchError(f"--extra is no JSON object ({error}): write it like '{{\"top_k\": 1}}'.") from None


def _command_line(arguments: Sequence[str], api_key: str | None) -> str:
    """How the run was started, for the report; without the key."""
    hidden = {api_key: "KEY", f"--api-key={api_key}": "--api-key=KEY"}
    words = [hidden.get(word, word) for word in arguments]
    return shlex.join(["python", "-m", "benchmarks.serve", *words])


def run_to_end(plan: Plan, progress: Progress) -> ServeReport:
    """`run` on an event loop of its own, uvloop's where it is installed."""
    try:
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
        loop_factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        loop_factory = None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run(plan, progress))


def main(
    url: Annotated[str, typer.Option(help="The server's root.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="W1, W2, W3, W4, W4s or all; may be repeated. Default: all.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="A load of your own: clients at once.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Clients at once, instead of those of the named workloads.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Requests of each workload. Default: its own; of a loop of your own {_REQUESTS}."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt size, chat template included.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 128,
    rounds: Rounds = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts and arrivals. Default: random, for a server that has seen the same prompts before"
            " answers them from its prefix cache.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer key.")] = None,
    extra: Annotated[
        str | None, typer.Option(help="JSON object merged into every request; null takes a field out.")
    ] = None,
    think: Annotated[
        float, typer.Option(min=0, help="Seconds between an answer and the session's next turn (W4, W4s).")
    ] = 0.0,
    prefill_ahead: Annotated[
        bool,
        typer.Option("--prefill-ahead", help="Have the conversation computed ahead while a user thinks: with --think."),
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take in all.")] = 600.0,
    json: JsonFile = None,
    as_markdown: Markdown = False,
) -> None:
    """Measure a server with OpenAI's chat completions: throughput, time to first token, gaps, errors.

    Without --concurrency the named workloads are run. Exits with 1 if any request failed.
    """
    own = None
    if concurrency is not None:
        name = f"{concurrency} clients"
        own = Workload(name, concurrency, requests or _REQUESTS, prompt_tokens, output_tokens)
    plan = Plan(
        url=url,
        model=model,
        api_key=api_key,
        extra=_parse_extra(extra),
        workloads=choose_workloads(workload or (), own, requests=requests, clients=clients),
        rounds=rounds,
        seed=secrets.randbits(32) if seed is None else seed,
        timeout=timeout,
        command=_command_line(sys.argv[1:], api_key),
        between=Between(think, prefill_ahead) if think or prefill_ahead else None,
    )
    with progress_bars() as progress:
        report = run_to_end(plan, progress)
    publish(report, *([markdown(report)] if as_markdown else parts(report)), json=json)
    if any(summary.errors for summary in report.summaries):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_program(main)
