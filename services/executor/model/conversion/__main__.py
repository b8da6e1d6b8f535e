"""What the command line's `models inspect`, `models convert` and `models pull` run:
`python -m services.executor.model.conversion`.

Prints JSON lines: `{"stage": ..., "done": n, "total": m}` as it goes, and one at the end: `{"result": ...}`, or
`{"error": ...}` with the exit code 1. A GGUF file that is damaged or cut short is refused before torch and transformers
are imported, which takes seconds.
"""

import shared.lean_imports  # noqa: F401  # isort: skip  # before all others

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from services.executor.model.loading.gguf_errors import told_of_file
from services.executor.model.loading.gguf_file import open_parts
from services.executor.model.loading.gguf_metadata import check_described
from shared.errors import RyzansteinError
from shared.process import VERSION

_SECONDS_BETWEEN = 0.1  # reports; those of whole stages come always


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # it may never be imported
    # Standard output is for our lines alone.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        for path in (getattr(options, name, None) for name in ("path", "source")):
            if path is not None and path.suffix == ".gguf" and not path.is_dir():
                files = open_parts(path)
                if getattr(options, "to", "") == "safetensors":
                    with told_of_file(path):
                        check_described(files)
        result: object = options.run(options)
    except RyzansteinError as error:
        _print({"error": str(error)})
        return 1
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        _print({"error": f"The files cannot be read or written ({reason}); check space and rights."})
        return 1
    _print({"result": result})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="conversion", description=f"Ryzanstein {VERSION}: models' files.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("inspect", help="what a file or directory holds")
    one.set_defaults(run=_inspect)
    one.add_argument("path", type=Path)
    one = commands.add_parser("check", help="whether the model of a directory's config.json is served")
    one.set_defaults(run=_check)
    one.add_argument("directory", type=Path)
    one = commands.add_parser("directory", help="a model directory of a GGUF file, unless there is one")
    one.set_defaults(run=_make_directory)
    one.add_argument("file", type=Path)
    one.add_argument("directory", type=Path)
    one = commands.add_parser("adapter", help="a LoRA adapter, checked against the model in a directory")
    one.set_defaults(run=_inspect_adapter)
    one.add_argument("directory", type=Path)
    one.add_argument("model", type=Path)
    one.add_argument("max_rank", type=int)
    other = commands.add_parser("convert", help="one format into another")
    other.set_defaults(run=_convert)
    other.add_argument("source", type=Path)
    other.add_argument("target", type=Path)
    other.add_argument("--to", choices=("gguf", "safetensors"), required=True)
    other.add_argument("--dtype", help="that of the source's weights where it is left out; codes become bf16")
    other.add_argument("--adapter", type=Path, help="directory of a LoRA adapter to merge into the weights")
    other.add_argument("--calibrate", type=Path, help="a text by which codes of 4 bits are chosen")
    other.add_argument("--check", action="store_true", help="compare logits before and after")
    return parser


def _inspect(options: argparse.Namespace) -> object:
    from services.executor.model.conversion.inspection import inspect

    return inspect(options.path)


def _check(options: argparse.Namespace) -> object:
    from services.executor.model.conversion.inspection import verdict_on

    return verdict_on(options.directory)


def _inspect_adapter(options: argparse.Namespace) -> object:
    from services.executor.model.adapters.files import inspect_adapter
    from services.executor.model.loading.config_file import load_config

    return inspect_adapter(options.directory, load_config(options.model), options.max_rank)


def _convert(options: argparse.Namespace) -> dict[str, object]:
    from services.executor.model.conversion.check import compare
    from services.executor.model.conversion.convert import convert
    from services.executor.model.conversion.merging import dtype_of

    report = _reporter()
    dtype, codes = (options.dtype, "") if options.dtype else dtype_of(options.source)
    size = convert(
        options.source, options.target, options.to, dtype, report, calibrate=options.calibrate, adapter=options.adapter
    )
    checked = compare(options.source, options.target, report) if options.check else None
    return {"bytes": size, "check": checked, "dtype": dtype, "codes": codes}


def _make_directory(options: argparse.Namespace) -> dict[str, object]:
    from services.executor.model.loading.checkpoints import convert_gguf

    if not options.directory.is_dir():
        convert_gguf(options.file, options.directory, _reporter())
    return {}


def _reporter() -> Callable[[str, int, int], None]:
    told = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done == total or now - told >= _SECONDS_BETWEEN:
            told = now
            _print({"stage": stage, "done": done, "total": total})

    return report


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
