"""Processor, kernels, memory and GPUs of this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from services.cli.commands.doctor.check import Check
from services.cli.machine import cores, memory_left, read_rate
from services.cli.ui import megabytes

_TIMEOUT = 20.0  # seconds for a program that is asked
_FEWEST_BYTES = 2_000_000_000  # of free memory, for the built-in model with its services
_SHARED_BYTES = 256_000_000
_KERNELS = ("-m", "services.executor.native")
_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def processor() -> Check:
    count = cores()
    found = f"{_processor_name()}, {count} of {os.cpu_count()} cores"
    if count > 1:
        return Check("processor", "ok", found)
    return Check("processor", "note", found, "Give it a second core: the gateway and the model share one now.")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")


def kernels() -> Check:
    """Which level of instructions the native kernels compute at."""
    told = json.loads(output_of(sys.executable, *_KERNELS) or "{}")
    if not told:
        return Check("kernels", "warning", "not known", "Install the executor: pip install 'ryzanstein[all]'.")
    if told["chosen"]:
        others = [level for level in told["levels"] if level != told["chosen"]]
        return Check("kernels", "ok", f"native {told['chosen']}" + (f" (also {', '.join(others)})" if others else ""))
    reason = told["reason"]
    advice = f"{reason[:1].upper()}{reason[1:].rstrip('.')}."
    if "setting" in told:
        return Check("kernels", "error", "none", advice)
    return Check("kernels", "warning", "PyTorch's alone", advice)


def free_memory() -> int:
    """Bytes, of the host or of the container that this is."""
    return min(psutil.virtual_memory().available, memory_left())


def memory() -> Check:
    held, swap, free = psutil.virtual_memory(), psutil.swap_memory(), free_memory()
    found = f"{megabytes(held.total)}, {megabytes(free)} free" + (f", {megabytes(swap.used)} swapped" * (swap.used > 0))
    if free >= _FEWEST_BYTES:
        return Check("memory", "ok", found)
    return Check(
        "memory", "warning", found, "Free some, or raise the container's limit: 2 GB serve the built-in model."
    )


def bandwidth() -> Check:
    """What all cores together read of memory in a second: decoding a token reads the weights once."""
    rate = read_rate(cores())
    return Check(
        "memory bandwidth", "ok", f"{rate / 1e9:.0f} GB/s: {rate / 1e9:.0f} tokens/s of a model of 1 GB at most"
    )


def huge_pages() -> Check:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Check("huge pages", "note", "not known", "")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Check("huge pages", "ok", chosen)
    advice = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled: weights are read faster."
    return Check("huge pages", "note", chosen or "never", advice)


def shared_memory(place: str = "/dev/shm") -> Check:  # noqa: S108  # ranks of a ring share memory there
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        advice = "Mount it, or serve with --tp 1: ranks talk over it."
        return Check("shared memory", "warning", f"no {place}", advice)
    found = f"{megabytes(free)} free in {place}"
    if free >= _SHARED_BYTES:
        return Check("shared memory", "ok", found)
    return Check("shared memory", "warning", found, "Give the container more: docker run --shm-size 1g.")


def gpus() -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check("GPU", "ok", "none: the processor computes")
    listed = output_of("nvidia-smi", *_SMI).strip().splitlines()
    if not listed:
        return Check("GPU", "warning", "the driver does not answer", "Run nvidia-smi, and follow what it says.")
    return Check("GPU", "ok", "; ".join(", ".join(part.strip() for part in line.split(",")) for line in listed))


def output_of(*command: str) -> str:
    """What a program prints; empty where it fails, hangs or is not there."""
    try:
        done = subprocess.run(  # noqa: S603  # our own words
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
