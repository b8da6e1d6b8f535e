"""GGUF files into model directories: the executor's code does it, in a process of its own."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.cli.subprocesses import program
from shared.errors import ModelLoadError


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
