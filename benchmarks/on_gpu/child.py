"""The process of one section: `python -m benchmarks.on_gpu.child SECTION ...`, started by `running.py`."""

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.budget import Section, soft_limit
from benchmarks.on_gpu.rows import Report
from benchmarks.on_gpu.sections import section_of

BEFORE_END = 2.0
"""Seconds before its limit at which a section that still runs says where it stands."""


def command_of(section: Section, rows: Path, limit: float, report: Report) -> list[str]:
    """What starts it."""
    known = {
        row.key: row.figure
        for result in report.sections
        for row in result.rows
        if row.figure is not None and row.key.startswith("machine/")
    }
    command = [sys.executable, "-m", "benchmarks.on_gpu.running", section.name, "--rows", str(rows)]
    command += ["--limit", f"{limit:.1f}", "--known", json.dumps(known)]
    return [*command, "--tiny"] if report.dry_run else command


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("section", type=section_of)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--known", type=json.loads, default={})
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    # Where it hangs is what has to be known of a section that is ended at its limit.
    faulthandler.dump_traceback_later(max(options.limit - BEFORE_END, 0.5 * options.limit), exit=False)
    _prepare(options.tiny)
    import torch

    torch.set_grad_enabled(False)
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    if options.tiny:
        torch.set_num_threads(1)
    deadline = began + soft_limit(options.limit)
    bench = Bench(device, options.tiny, options.rows, deadline, options.known)
    module, _, function = options.section.code.partition(":")
    getattr(importlib.import_module(module), function)(bench)
    # What threads or libraries still hold must not keep a section that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _prepare(tiny: bool) -> None:
    """What libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["TRITON_INTERPRET"] = "1" if tiny else "0"


if __name__ == "__main__":
    main()
