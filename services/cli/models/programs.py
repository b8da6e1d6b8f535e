"""Programs that models are fetched and converted with: read line by line, and never left behind.

GGUF files become model directories by the executor's code, in a process of its own.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from shared.errors import ModelLoadError
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


class _Report(msgspec.Struct, frozen=True):
    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


def convert_gguf(gguf: Path, directory: Path, progress: Callable[[str, int, int], None]) -> None:
    """Dequantises a GGUF file into a directory of bf16 safetensors.

    Raises `ModelLoadError`, and `OSError` when there is no room for it.
    """
    command = [sys.executable, "-m", "services.executor.model.convert", str(gguf), str(directory)]
    error = ""
    with tempfile.TemporaryFile("w+") as complaints:
        with program(command, complaints) as process:
            assert process.stdout is not None
            for line in process.stdout:
                report = msgspec.json.decode(line, type=_Report)
                error = report.error or error
                if report.stage not in ("", "done"):
                    progress(report.stage, report.done, report.total)
        if process.returncode == 0:
            return
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if "No space left on device" in error + last:
        raise OSError("No space left on device")
    raise ModelLoadError(error or f"The GGUF file {gguf} could not be converted ({last}).")
