"""The commands of `ryzanstein debug`."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli.debug import fetch_dump, fetch_profile
from services.cli.debug_print import print_dump, print_plans, print_profile
from services.cli.terminal import console
from services.cli.where import DataDir, NatsUrl, nats_of_stack
from shared.errors import ConfigurationError
from shared.messages.debugging import Dump, ProfileCommand

debug_app = typer.Typer(
    help="Look into a group's ring: what its ranks do, also when it is hung (docs/debugging.md).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Group = Annotated[
    str, typer.Argument(help="The group, as `ryzanstein status` names it. Default: the one that there is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="All of it, for machines.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=1, max=600)]


@debug_app.command()
def dump(
    group: Group = "",
    output: Annotated[
        Path | None, typer.Option(help="Write all of it there, as JSON.", dir_okay=False, metavar="FILE")
    ] = None,
    json: AsJson = False,
    wait: Annotated[
        float, typer.Option(help="Seconds for which ranks that do not answer are waited for.", min=0, max=30)
    ] = 1.0,
    timeout: Timeout = 30.0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show what every rank does: stacks, step and collective under way, queues, KV blocks, last plans.

    The executor's orchestrator tells, so it works for a ring that is hung, loading or lost. The first line names the
    rank that is behind, if one is. Neither prompts nor tokens are shown. Nothing is stopped by it.
    """
    found = asyncio.run(fetch_dump(nats_of_stack(data_dir, nats_url), group, wait, timeout))
    if output is not None:
        _write(output, found)
    if json:
        print(msgspec.json.encode(found).decode())  # noqa: T201
    elif output is None:
        print_dump(found, console())
    else:
        screen = console()
        screen.print(found.verdict, markup=False, highlight=False, soft_wrap=True)
        screen.print(f"All of it is in {output}.", markup=False, highlight=False, soft_wrap=True)


@debug_app.command()
def plans(
    group: Group = "",
    json: AsJson = False,
    timeout: Timeout = 30.0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show the last step plans: tokens, sequences and KV blocks of each step, and how long it took."""
    found = asyncio.run(fetch_dump(nats_of_stack(data_dir, nats_url), group, 0.0, timeout))
    if json:
        print(msgspec.json.encode(found.plans).decode())  # noqa: T201
    else:
        print_plans(found, console())


@debug_app.command()
def profile(
    group: Group = "",
    steps: Annotated[
        int | None, typer.Option(help="Steps to profile.", min=1, max=500, show_default="20")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Profile for so long, instead of --steps.", min=0.1, max=60)
    ] = None,
    ranks: Annotated[str, typer.Option(help="Which ranks: all, or numbers with commas.")] = "all",
    memory: Annotated[bool, typer.Option("--memory", help="Also what is allocated; slower.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the traces.",
            file_okay=False,
            metavar="DIR",
            show_default="./profile-GROUP-TIME",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds within which the steps must be over.", min=1, max=600)
    ] = 60.0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Profile the next steps with torch's profiler while the group serves; the traces are for ui.perfetto.dev.

    Requests must be running: a ring without work computes no steps. The group is slower meanwhile.
    """
    if steps is not None and seconds is not None:
        raise ConfigurationError("--steps and --seconds exclude each other; give one of them.")
    command = ProfileCommand(
        steps=0 if seconds is not None else steps or 20,
        seconds=seconds or 0.0,
        ranks=_numbers(ranks),
        memory=memory,
        timeout=timeout,
    )
    directory = output or Path(f"profile-{group}-{time.strftime('%Y%m%dT%H%M%S')}".replace("/", "_"))
    screen = console()
    with screen.status(f"{group}: profiling") as progress:
        found = asyncio.run(
            fetch_profile(nats_of_stack(data_dir, nats_url), group, command, directory, progress.update)
        )
    print_profile(found, screen)
    for summary in found:
        if summary.trace:
            screen.print(f"{directory / summary.trace}", markup=False, highlight=False, soft_wrap=True)


def _numbers(ranks: str) -> list[int]:
    if ranks == "all":
        return []
    numbers = [part.strip() for part in ranks.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ConfigurationError(
            f"--ranks cannot be {ranks!r}; it is all, or numbers with commas such as 0,1."
        )
    return [int(number) for number in numbers]


def _write(path: Path, found: Dump) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    except OSError as error:
        raise ConfigurationError(
            f"The dump cannot be written to {path} ({error.strerror}); name another file with --output."
        ) from None
