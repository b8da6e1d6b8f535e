"""Entry point of the command `ryzanstein`.

`serve` and `probe` are handled before the command line's own packages are imported: a container installs one
service's extra and nothing else. `up` is handled before the other commands' are: no service starts meanwhile.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

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
            from services.cli.serve import serve

            serve(sys.argv[2:])
        if command == "probe":
            from services.cli.serve import probe

            raise SystemExit(probe(sys.argv[2:]))
        if command == "up":
            from services.cli.supervision.early_executor import start_early

            start_early(sys.argv[2:])  # before the imports below, which run beside its own
            from services.cli.commands.up import main as command_line
        else:
            from services.cli.commands.main import app as command_line
    except RyzansteinError as error:
        _end(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("services", "shared"):
            raise
        _end(
            f"The command line needs the package {package}, which is not installed here; install it with: "
            f"pip install 'ryzanstein[{'all' if command == 'up' else 'cli'}]'"
        )
    _run(command_line)


def _ignore_working_directory() -> None:
    """Processes are started with `python -m`, which looks into the working directory first: a user's own `services`
    or `shared` there would be taken for ours. In our own tree they are ours, installed or not."""
    try:
        ours = Path.cwd() == Path(__file__).parents[2]
    except OSError:  # it was removed
        ours = False
    if not ours:
        os.environ["PYTHONSAFEPATH"] = "1"


def _run(command_line: Callable[[], object]) -> None:
    from shared.service.logs import configure_logging

    configure_logging("cli", "cli", level="error", fmt="console", whole_process=False)
    try:
        command_line()
    except RyzansteinError as error:
        _end(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)  # noqa: T201
    raise SystemExit(1)
