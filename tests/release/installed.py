"""What a release's files do where they are installed: `python -m tests.release.installed dist PYTHON...`.

The wheel goes into an empty environment of each Python, the sdist into one of the first, with the versions of
constraints.txt; `ryzanstein up` serves there and answers, from a directory that has nothing of ours. Pip refuses the
wheel for a Python and a libc that it is not for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.e2e.stack import Stack
from tests.release.lock import CONSTRAINTS, ROOT, pins

DIRECTORY = ROOT / "build/release/installed"
QUESTION = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
# What pip says of the wheel, by what is asked of it.
REFUSED = {
    ("--python-version", "3.10"): "is not a supported wheel on this platform",
    ("--platform", "musllinux_1_2_x86_64"): "is not a supported wheel on this platform",
}


def install(file: Path, python: str) -> Path:
    """An environment with all that `ryzanstein up` needs; gives its programs' folder. Raises `CalledProcessError`."""
    environment = DIRECTORY / f"{Path(python).name}-{'wheel' if file.suffix == '.whl' else 'sdist'}"
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = DIRECTORY / "constraints.txt"
    versions = [str(pin.requirement) for pin in pins(CONSTRAINTS.read_text())]  # hashes are checked by `make install`
    constraints.write_text("".join(f"{line}\n" for line in versions))
    torch = ["--no-deps", *(["--index-url", index] if (index := os.environ.get("TORCH_INDEX")) else []), "torch"]
    subprocess.run([*pip, "--constraint", str(constraints), *torch], check=True)
    subprocess.run([*pip, "--constraint", str(constraints), f"ryzanstein[all] @ {file.resolve().as_uri()}"], check=True)
    return environment / "bin"


def serve(programs: Path) -> str:
    """What the built-in model says there."""
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [str(programs / "ryzanstein")]
        with Stack(Path(elsewhere, "data"), command=command, cwd=Path(elsewhere), PYTHONPATH="") as stack:
            answer = httpx.post(f"{stack.url}/v1/chat/completions", json=QUESTION, timeout=120, trust_env=False)
            text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def refusal(wheel: Path, *asked: str) -> str:
    """What pip says to whoever installs `wheel` where it is not for."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", *asked]
        told = subprocess.run([*command, "--target", target, str(wheel)], capture_output=True, text=True, check=False)
    if told.returncode == 0:
        raise RuntimeError(f"pip takes {wheel.name} with {' '.join(asked)}, for which it is not made")
    return next(line for line in told.stderr.splitlines() if line.startswith("ERROR"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("pythons", nargs="+")
    given = parser.parse_args()
    (wheel,), (sdist,) = given.directory.glob("*.whl"), given.directory.glob("*.tar.gz")
    for asked, words in REFUSED.items():
        said = refusal(wheel, *asked)
        if words not in said:
            raise SystemExit(f"error: with {' '.join(asked)} pip says of the wheel: {said}")
        print(f"{' '.join(asked)}: {said}")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for file, python in [*((wheel, python) for python in given.pythons), (sdist, given.pythons[0])]:
        print(f"{file.name}, {python}: {serve(install(file, python))!r}", flush=True)


if __name__ == "__main__":
    main()
