"""Runs a command, at native speed, as on a processor with AVX2 and nothing newer: AVX-512, AMX and AVX-VNNI are hidden
from PyTorch, oneDNN and MKL, from the project's kernels, and from whoever reads /proc/cpuinfo.

It shows which path is taken and whether that is right, not how fast it is. Needs root, for a mount namespace in which
/proc/cpuinfo is another file. What asks nobody, such as a library that was compiled for newer processors, it does not
stop; `--strict` does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
HOOK = Path(__file__).parent / "hook"  # its sitecustomize.py runs in every Python below
NEWER = re.compile(r" (avx512\w*|avx10\w*|amx\w*|avx_vnni\w*|avx_ne_convert|avx_ifma|gfni|vaes|vpclmulqdq)\b")
LIMITS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# Haswell was the first with AVX2; what the emulator has not of it it would warn of.
STRICT = ("qemu-x86_64", "-cpu", "Haswell,-hle,-rtm,-invpcid,-pcid,-x2apic,-tsc-deadline")
# The copy goes as soon as it is mounted; the command takes the shell's place, and with it its signals.
MOUNTED = 'mount --make-rprivate / && mount --bind "$0" /proc/cpuinfo && rm "$0" && exec "$@"'


def as_avx2(cpuinfo: str) -> str:
    """`cpuinfo`, as /proc/cpuinfo has it, without the flags of what is newer than AVX2."""
    return NEWER.sub("", cpuinfo)


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """Of the command: `before`, with what libraries are limited by."""
    path = [str(HOOK), *filter(None, [before.get("PYTHONPATH")])]
    return {**before, **LIMITS, "PYTHONPATH": os.pathsep.join(path)}


def problem(cpuinfo: str, *, root: bool) -> str:
    """Why nothing can be run so, in one sentence; empty: it can."""
    if "avx2" not in cpuinfo.split():
        return "This processor has no AVX2; run this on one that has it."
    if not root:
        return "A mount namespace needs root; run this with sudo or in a container."
    return "" if _may_mount() else "Mount namespaces are not allowed here; give the container CAP_SYS_ADMIN."


def needless(cpuinfo: str) -> str:
    """Why whatever runs here runs so anyway, in one sentence; empty: it does not."""
    return "" if NEWER.search(cpuinfo) else "This processor has nothing newer than AVX2."


@cache
def _may_mount() -> bool:
    try:
        return not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.avx2", description=__doc__)
    parser.add_argument("--if-newer", action="store_true", help="say why in a line where it changes nothing, or cannot")
    told = "in qemu, which refuses newer instructions: the command, not what it starts; tens of times slower"
    parser.add_argument("--strict", action="store_true", help=told)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with its arguments")
    options = parser.parse_args(arguments)
    command = options.command
    if not command:
        parser.error("name a command")
    cpuinfo = CPUINFO.read_text(encoding="utf-8", errors="replace")
    told = problem(cpuinfo, root=os.geteuid() == 0)
    if options.if_newer and (told := told or needless(cpuinfo)):
        parser.exit(0, f"Nothing is run as on AVX2 alone. {told}\n")
    if options.strict:
        told = told or ("" if shutil.which(STRICT[0]) else f"--strict needs {STRICT[0]}; install qemu-user.")
        command = [*STRICT, shutil.which(command[0]) or command[0], *command[1:]]
    if told:
        parser.exit(2, f"{told}\n")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="cpuinfo-", delete=False) as copy:
        copy.write(as_avx2(cpuinfo))
    unshared = ["unshare", "--mount", "bash", "-c", MOUNTED, copy.name, *command]
    return subprocess.run(unshared, env=environment(os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
