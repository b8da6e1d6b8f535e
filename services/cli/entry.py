"""Entry point of the command `ryzanstein`.

`serve` and `probe` are handled before the command line's own packages are imported: a container installs one
service's extra and nothing else. `up` is handled before the other commands' are: no service starts meanwhile.
"""

import sys
from collections.abc import Callable

from shared.errors import RyzansteinError


def main() -> None:
    """An expected error is one sentence on standard error and exit code 1."""
    try:
        if sys.argv[1:2] == ["serve"]:
            from services.cli.serve import serve

            serve(sys.argv[2:])
        if sys.argv[1:2] == ["probe"]:
            from services.cli.probe import probe

            raise SystemExit(probe(sys.argv[2:]))
        if sys.argv[1:2] == ["up"]:
            from services.cli.up_command import main as command_line
        else:
            from services.cli.main import app as command_line
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
            "pip install 'ryzanstein[cli]'"
        )
    _run(command_line)


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
