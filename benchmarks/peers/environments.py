"""Virtual environments of the peers, made once and kept.

<work dir>/<environment>/venv          what is installed
<work dir>/<environment>/installed.json    how it was; written last, so that half an environment is none
<work dir>/<environment>/install.log   what the installer said
"""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks.errors import BenchError
from benchmarks.peers.catalog import Environment
from shared.process import die_with_parent

Report = Callable[[str], None]

_VERSIONS = (
    "import importlib.metadata, json, platform; print(json.dumps({'python': platform.python_version(),"
    " **{each.name: each.version for each in importlib.metadata.distributions()}}))"
)


class InstallError(BenchError):
    """A peer cannot be installed; the others can go on."""


def ensure(environment: Environment, root: Path, report: Report) -> Path:
    """The environment's folder below `root`, filled if it is not yet. `report` is told what is going on.

    Raises InstallError with the installer's reason.
    """
    home = root / environment.name
    stamp = home / "installed.json"
    folder = home / "venv"
    if stamp.exists() and stamp.read_bytes() == fingerprint(environment):
        return folder
    report("making the virtual environment")
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        home.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True, symlinks=True)
        with (home / "install.log").open("w") as log:
            for step in environment.steps:
                _run([str(folder / "bin" / "python"), *step], environment, log.write, report)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"The environment {folder} cannot be made: {error}.") from None
    stamp.write_bytes(fingerprint(environment))
    return folder


def fingerprint(environment: Environment) -> bytes:
    """Changes when another environment would come out."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return msgspec.json.encode({"python": python, "steps": environment.steps})


def _run(command: list[str], environment: Environment, log: Callable[[str], object], report: Report) -> None:
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**_clean(os.environ.items()), **environment.variables},
        preexec_fn=die_with_parent(),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log(line)
                if line.strip():
                    last = line.strip()
                    report(last)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise InstallError(
            f"{' '.join(command[1:])} ended with code {process.returncode}: {last[:300].rstrip('.')}."
        )


def _clean(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Without what would have another environment's Python import our packages."""
    return {name: value for name, value in variables if name not in ("PYTHONPATH", "PYTHONHOME")}


def versions(python: str) -> dict[str, str]:
    """Every package of the environment of `python`, and its Python. Raises InstallError."""
    try:
        answer = subprocess.run(
            [python, "-c", _VERSIONS],
            capture_output=True,
            check=True,
            timeout=60,
            env=_clean(os.environ.items()),
        )
        found: dict[str, str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InstallError(f"The packages of {python} cannot be listed: {error}.") from None
    return found


def preloads(root: Path, folder: Path, report: Report) -> tuple[Path, ...]:
    """tcmalloc and libiomp, as far as they can be had.

    libiomp comes with the package intel-openmp in `folder`; tcmalloc is the system's, or Debian's package
    unpacked below `root`.
    """
    found = [path for path in [_tcmalloc(root, report)] if path is not None]
    found += sorted((folder / "lib").glob("libiomp5.so"))[:1]
    return tuple(found)


def _tcmalloc(root: Path, report: Report) -> Path | None:
    if name := ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc"):
        return Path(name)  # the dynamic linker finds it by its name
    folder = root / "tcmalloc"
    if not folder.exists():
        report("fetching tcmalloc")
        _unpack_debian("libtcmalloc-minimal4", folder)
    return next(iter(sorted(folder.rglob("libtcmalloc_minimal.so.4"))), None)


def _unpack_debian(package: str, folder: Path) -> None:
    """Unpacks a Debian package without installing it; leaves an empty folder where that is not possible."""
    fetch, unpack = shutil.which("apt-get"), shutil.which("dpkg-deb")
    folder.mkdir(parents=True, exist_ok=True)
    if fetch is None or unpack is None:
        return
    try:
        _call([fetch, "download", package], folder)
        for file in folder.glob("*.deb"):
            _call([unpack, "-x", str(file), "."], folder)
    except (OSError, subprocess.SubprocessError):
        return


def _call(command: list[str], folder: Path) -> None:
    subprocess.run(command, check=True, cwd=folder, capture_output=True, timeout=120)
