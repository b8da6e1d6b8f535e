"""Models' files are inspected and converted by the executor's code, in a process that ends with this one."""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec

from services.cli.models.downloads import Progress, program
from shared.errors import ModelLoadError


class _Line(msgspec.Struct, frozen=True):
    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
    result: dict[str, Any] | None = None


def run(arguments: Sequence[str], progress: Progress) -> dict[str, Any]:
    """What the executor's `model.conversion` results in. Raises `ModelLoadError`."""
    command = [sys.executable, "-m", "services.executor.model.conversion", *arguments]
    last = _Line()
    with tempfile.TemporaryFile("w+") as complaints:
        with program(command, complaints) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = msgspec.json.decode(line, type=_Line)
                if last.stage:
                    progress(last.stage, last.done, last.total)
        if last.result is not None and process.returncode == 0:
            return last.result
        complaints.seek(0)
        said = (complaints.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    raise ModelLoadError(last.error or f"The files could not be converted or read ({said}).")
