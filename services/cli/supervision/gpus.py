"""The GPUs of this machine, shared out among executor groups. Found without torch."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigurationError

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT = 20.0


async def find_gpus(visible: str | None) -> list[str]:
    """GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; `visible` is that variable's value."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return among(_listed_by_driver(), visible)
    return among(parse_listing(await _output(program, "-L")), visible)


def parse_listing(listing: str) -> list[str]:
    """The devices in the output of `nvidia-smi -L`: GPUs by index, slices of a divided GPU by their UUID."""
    devices: list[str] = []
    whole = ""
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            whole = gpu[1]
            devices.append(whole)
        elif slice_ := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if devices and devices[-1] == whole:
                devices.pop()
            devices.append(slice_[1])
    return devices


def among(present: Sequence[str], visible: str | None) -> list[str]:
    """Those of `present` that CUDA_VISIBLE_DEVICES names, in its order, up to its first wrong entry, as CUDA
    itself reads it; all of them when it is not set."""
    if visible is None or not present:
        return list(present)
    chosen: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        known = int(name) < len(present) if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not known:
            break
        chosen.append(name)
    return chosen


def assign_gpus(gpus: Sequence[str], *, tp: int, replicas: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each group: `tp` GPUs of its own; empty without GPUs.

    Raises `ConfigurationError` when there are GPUs, and too few.
    """
    if not gpus:
        return []
    if len(gpus) < tp * replicas:
        wanted = f"{replicas} group{'s' * (replicas > 1)} of {tp} rank{'s' * (tp > 1)}"
        raise ConfigurationError(
            f"{wanted} need {tp * replicas} GPUs, and {len(gpus)} can be used here; ask for less with --tp or "
            "--replicas, let CUDA_VISIBLE_DEVICES name more, or set RYZANSTEIN_DEVICE=cpu."
        )
    return [",".join(gpus[first : first + tp]) for first in range(0, tp * replicas, tp)]


def _listed_by_driver() -> list[str]:
    return [str(number) for number, _ in enumerate(_DRIVER.glob("*"))]


async def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing when it fails (as without its driver) or hangs."""
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output.decode(errors="replace") if process.returncode == 0 else ""
