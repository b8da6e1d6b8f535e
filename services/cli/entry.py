"""Entry point of the command `ryzanstein`.

`serve` and `probe` are handled before the command line's own packages are imported: a container installs one
service's extra and nothing else. Of the other commands it knows the list alone (`groups.py`).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from services.cli.serve import packages_of, probe, serve
from shared.errors import RyzansteinError


def main() -> None:
    """An expected error is one sentence on standard error and exit code 1."""
    _ignore_working_directory()
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "--version":
        from shared.process import VERSION

        print(f"ryzanstein {VERSION}")  # noqa: T201
        raise SystemExit(0)
    try:
        if command == "serve":
            serve(sys.argv[2:])
        if command == "probe":
            raise SystemExit(probe(sys.argv[2:]))
        with packages_of("all" if command == "up" else "cli"):
            if command == "up":
                from services.cli.supervision.early_executor import start_early

                start_early(sys.argv[2:])  # before the imports below, which run beside its own
            from services.cli.groups import app
        _run(app)
    except RyzansteinError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _ignore_working_directory() -> None:
    """Processes are started with `python -m`, which looks into the working directory first: a user's own `services`
    or `shared` there would be taken for ours. In our own tree they are ours, installed or not."""
    try:
        ours = Path.cwd() == Path(__file__).parents[2]
    except OSError:  # it was removed
        ours = False
    if not ours:
        os.environ["PYTHONSAFEPATH"] = "1"


def _run(command_line: Callable[..., object]) -> None:
    from shared.service.logs import configure_logging

    configure_logging("cli", "cli", level="error", fmt="console", whole_process=False)
    command_line(prog_name="ryzanstein")
