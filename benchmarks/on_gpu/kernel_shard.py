"""Attention's cases, divided among processes: `python -m benchmarks.on_gpu.kernel_shard PART PARTS SECONDS`.

Each case compiles kernels of its own, which takes seconds of one core; and one whose kernel writes where it must not
ends all work of its process on the GPU, and so costs the cases of one part alone.
"""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.on_gpu.bench import told

ROOT = Path(__file__).parents[2]
TINY_CASES = 3
LAST_WAIT = 5.0
"""Seconds in which a part ends that has been asked to begin no new case; then it is killed."""


class Checked(NamedTuple):
    """One case."""

    case: str
    error: float
    """In parts of what is allowed."""
    wrong: str
    """Why it is wrong; empty where it is right."""


class Found(NamedTuple):
    """By all parts."""

    wanted: int
    checked: list[Checked]
    ended: list[str]
    """Of parts that have not come to the end of their cases, why."""


def run_shards(parts: int, tiny: bool, seconds: float) -> Found:
    """All cases, in `parts` processes, as far as they come in `seconds`. A part that dies leaves what it had."""
    end = time.monotonic() + seconds
    with TemporaryDirectory() as name:
        outs = [Path(name, f"{part}.jsonl") for part in range(parts)]
        processes = []
        for part, out in enumerate(outs):
            command = [sys.executable, "-m", "benchmarks.on_gpu.kernel_shard", str(part), str(parts)]
            command += [f"{seconds:.1f}", "--tiny"] if tiny else [f"{seconds:.1f}"]
            with out.open("wb") as file:
                processes.append(subprocess.Popen(command, stdout=file, cwd=ROOT))
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end + LAST_WAIT - time.monotonic()))
        for process in processes:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WAIT)
        return _gathered(outs, [process.returncode for process in processes])


def _gathered(outs: list[Path], codes: list[int | None]) -> Found:
    lines = [line for out in outs for line in out.read_text(encoding="utf-8", errors="replace").splitlines()]
    wanted, checked = 0, []
    for line in lines:
        with suppress(ValueError, TypeError):  # cut off, or printed by a library
            content = json.loads(line)
            if "wanted" in content:
                wanted += content["wanted"]
            else:
                checked.append(Checked(**content))
    ended = [f"part {part} ended with {code}" for part, code in enumerate(codes) if code != 0]
    return Found(wanted, checked, ended)


def main() -> None:
    part, parts, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tiny = "--tiny" in sys.argv
    end = time.monotonic() + seconds
    import torch

    from benchmarks.on_gpu.kernel_cases import cases, check
    from services.executor.core.gpu_errors import is_gpu_error

    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    mine = list(cases(large=not tiny))[: TINY_CASES if tiny else None][part::parts]
    print(json.dumps({"wanted": len(mine)}), flush=True)
    for case in mine:
        if time.monotonic() > end:
            raise SystemExit("no time was left")
        error, wrong = 0.0, ""
        try:
            error = check(case, device)
        except Exception as failed:
            wrong = str(failed) if isinstance(failed, AssertionError) else told(failed)
            if is_gpu_error(failed):
                raise  # nothing more can be computed in this process
        finally:
            print(json.dumps(Checked(str(case), error, wrong)._asdict()), flush=True)


if __name__ == "__main__":
    main()
