"""`python -m services.executor.model.convert FILE.gguf OUT_DIR`: a GGUF file into a model directory.

Prints JSON lines on stdout: `{"stage": ..., "done": n, "total": m}` as it goes. On failure the last line
is `{"error": ...}` and the exit code 1.
"""

import argparse
import json
import sys
from pathlib import Path

from transformers.utils import logging

from services.executor.model.loading.checkpoints import convert_gguf
from shared.errors import RyzansteinError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="convert", description="Converts a GGUF file to a model directory.")
    parser.add_argument("file", type=Path, help="the .gguf file")
    parser.add_argument("directory", type=Path, help="the model directory to make")
    parser.add_argument(
        "--unpack", action="store_true", help="write bf16 weights, for readers of safetensors"
    )
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if not options.directory.is_dir():
            convert_gguf(options.file, options.directory, _report, unpack=options.unpack)
    except RyzansteinError as error:
        _print({"error": str(error)})
        return 1
    except OSError as error:
        _print(
            {"error": f"{options.directory} cannot be written ({error.strerror}); check space and rights."}
        )
        return 1
    return 0


def _report(stage: str, done: int, total: int) -> None:
    _print({"stage": stage, "done": done, "total": total})


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
