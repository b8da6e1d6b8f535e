"""Programs that models are fetched and converted with: read line by line, and never left behind."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from shared.process import die_with_parent


@contextlib.contextmanager
def program(
    command: Sequence[str], errors: int | IO[str], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Runs `command` with its output in a pipe; ends with it, or kills it when the block is left early."""
    process = subprocess.Popen(  # noqa: S603  # our own words
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with_parent(),
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
        process.wait()
