"""Attention's cases, divided among processes: `python -m benchmarks.on_gpu.kernel_shard PART PARTS SECONDS`.

Each case compiles kernels of its own, which takes seconds of one core; and one whose kernel writes where it must not
ends all work of its process on the GPU, and so costs the cases of one part alone.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.on_gpu.bench import Row, append_row, read_rows, told
from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from benchmarks.on_gpu.kernel_cases import Case

TINY_CASES = 3
LAST_WAIT = 5.0  # seconds in which a part ends that has been asked to begin no new case; then it is killed


class Found(NamedTuple):
    """By all parts."""

    checked: list[Row]  # of each case its error, in parts of what is allowed, and why it is wrong where it is
    ended: list[str]  # of parts that have not come to the end of their cases, why


def run_shards(parts: int, tiny: bool, seconds: float) -> Found:
    """All cases, in `parts` processes, as far as they come in `seconds`. A part that dies leaves what it had."""
    end = time.monotonic() + seconds
    with TemporaryDirectory() as name:
        outs = [Path(name, f"{part}.jsonl") for part in range(parts)]
        processes = []
        for part, out in enumerate(outs):
            command = [sys.executable, "-m", "benchmarks.on_gpu.kernel_shard", str(part), str(parts)]
            command += [f"{seconds:.1f}", str(out), *["--tiny"] * tiny]
            processes.append(subprocess.Popen(command, cwd=ROOT))
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end + LAST_WAIT - time.monotonic()))
        for process in processes:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WAIT)
        codes = [process.returncode for process in processes]
        ended = [f"part {part} ended with {code}" for part, code in enumerate(codes) if code != 0]
        return Found([row for out in outs for row in read_rows(out)], ended)


def chosen(tiny: bool) -> "list[Case]":
    from benchmarks.on_gpu.kernel_cases import cases

    return list(cases(large=not tiny))[: TINY_CASES if tiny else None]


def main() -> None:
    part, parts, seconds, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    tiny = "--tiny" in sys.argv
    end = time.monotonic() + seconds
    import torch

    from benchmarks.on_gpu.kernel_cases import check
    from benchmarks.on_gpu.machine import release
    from services.executor.core.gpu_errors import is_gpu_error

    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    for case in chosen(tiny)[part::parts]:
        if time.monotonic() > end:
            raise SystemExit("no time was left")
        try:
            row = Row(str(case), "", check(case, device), "error")
        except Exception as failed:
            wrong = str(failed) if isinstance(failed, AssertionError) else told(failed)
            append_row(out, Row(str(case), "", None, note=wrong, ok=False))
            if is_gpu_error(failed):
                raise  # nothing more can be computed in this process
        else:
            append_row(out, row)
        release(device)  # other parts want what this case has held


if __name__ == "__main__":
    main()
