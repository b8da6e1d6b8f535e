"""`ryzanstein doctor`: one row for each thing that serving depends on, and what to do about it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.doctor import engine, hardware, software
from services.cli.commands.doctor.check import Check, report_of, show
from services.cli.target import DataDir, LocalSettings, find_stack, is_locked
from services.cli.ui import console, print_json
from shared.config import load_settings

_API, _GRPC = 8000, 8001


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, as issue reports ask for.")] = False,
    engine_python: Annotated[
        Path | None, typer.Option(help="Check the vLLM of this Python too, as `up --engine-python` has it.")
    ] = None,
    model: Annotated[str, typer.Option(help="With --engine-python: whether that vLLM can serve it.")] = "",
    data_dir: DataDir = None,
) -> None:
    """Check this machine: processor, kernels, memory, disk, ports, NATS, GPU, clock, proxies. Exits with 1 where
    serving would fail."""
    settings = load_settings(LocalSettings, data_dir=data_dir)
    if model and engine_python is None:
        raise typer.BadParameter("--model is checked for a vLLM: name its Python with --engine-python.")
    found = list(_checks(settings))
    if engine_python is not None:
        found += engine.checks(engine_python.expanduser(), model, settings.store.cache, hardware.free_memory())
    report = report_of(found)
    if json:
        print_json(report)
    else:
        show(report, console())
    raise typer.Exit(1 if report.failed else 0)


def _checks(settings: LocalSettings) -> Iterable[Check]:
    plain: tuple[Callable[[], Check], ...] = (
        hardware.processor,
        hardware.kernels,
        hardware.memory,
        hardware.bandwidth,
        hardware.huge_pages,
        hardware.shared_memory,
        hardware.gpus,
        software.packages,
        software.nats,
        software.compiler,
        software.open_files,
        software.clock,
        software.proxies,
    )
    yield from (check() for check in plain)
    yield software.disk("disk for models", settings.store.cache)
    yield software.disk("disk for logs", settings.data_dir.expanduser())
    yield from _stack(settings)


def _stack(settings: LocalSettings) -> Iterable[Check]:
    """The stack that runs here, or the ports that one would have."""
    directory = settings.data_dir.expanduser()
    if (stack := find_stack(directory)) is not None:
        yield Check("stack", "ok", f"{stack.model} at {stack.gateway_url}")
    elif is_locked(directory):
        yield Check("stack", "ok", "starting")
    else:
        yield Check("stack", "ok", "none runs; `ryzanstein up` starts one")
        yield software.port(_API, "API")
        yield software.port(_GRPC, "gRPC API")


def add_to(app: typer.Typer) -> None:
    app.command()(doctor)
    app.callback()(lambda: None)
