"""What stops a benchmark, and how it ends then. What fails a single request is a figure of the report instead."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer


class BenchError(Exception):
    """The run cannot start or go on; `str(error)` is one sentence for the user."""


@contextlib.contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Ends the program with 2 and a sentence where the run stops, with 130 after Ctrl-C."""
    try:
        yield
    except BenchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"error: {error.filename or 'the system'}: {error.strerror or error}.", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing is reported.", err=True)
        raise typer.Exit(130) from None


def write_json(file: Path | None, report: Any) -> None:
    """Writes `report`, indented, where a file is wanted. Raises `BenchError`."""
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise BenchError(f"The report cannot be written to {file}: {error.strerror}.") from None
