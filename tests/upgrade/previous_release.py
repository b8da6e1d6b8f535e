"""The previous release in an environment of its own, below build/upgrade: its tree as git has it, its packages as its
own constraints say. Made once."""

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.docs.pages import ROOT

NAME = (Path(__file__).parent / "PREVIOUS").read_text().strip()
_DIRECTORY = ROOT / "build/upgrade" / NAME
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def installed() -> Path:
    """Its Python, with all that services need. Raises `subprocess.CalledProcessError`, `RuntimeError`."""
    python = _DIRECTORY / "venv/bin/python"
    done = _DIRECTORY / "installed"
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (_DIRECTORY / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _export()
            _install(python)
            done.touch()
    return python


def _export() -> None:
    if subprocess.run(
        ["git", "cat-file", "-e", f"{NAME}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    ).returncode:
        raise RuntimeError(
            f"This checkout lacks the previous release, {NAME}; fetch its history: git fetch --unshallow --tags."
        )
    tree = _DIRECTORY / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", NAME], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)


def _install(python: Path) -> None:
    """Packages of this environment serve where both releases ask for the same ones."""
    tree, environment = _DIRECTORY / "tree", _DIRECTORY / "venv"
    if (tree / "constraints.txt").read_bytes() != (ROOT / "constraints.txt").read_bytes():
        subprocess.run(["make", "-C", str(tree), "install", f"VENV={environment}"], check=True)
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(environment)], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    borrowed = environment / "lib" / _VERSION / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, str(tree)], check=True)
