"""`make lock`: constraints.txt anew, each version of pyproject.toml's packages with the hashes of all its files.

Versions stay unless uv is told otherwise: make lock ARGS="--upgrade-package NAME".
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = """\
# What `make install` and the images install, and no other file: exact versions for all platforms and Pythons, each
# with the SHA-256 of its files. `make lock` makes it; the supported ranges stand in pyproject.toml.
--only-binary :all:
"""
# The same versions of torch as PyPI's, without CUDA: other files, whose hashes uv does not find there.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PIN = re.compile(r"^([\w.-]+)==[^\\\n]+(?:\\\n +--hash=sha256:[0-9a-f]{64} ?)*$", re.MULTILINE)


class Pin:
    """One version of a package, with the hashes of its files."""

    def __init__(self, text: str) -> None:
        line, *hashes = (part.strip() for part in text.split("\\\n"))
        self.requirement = Requirement(line)
        self.hashes = sorted({one.removeprefix("--hash=sha256:") for one in hashes})

    @property
    def version(self) -> str:
        (specifier,) = self.requirement.specifier
        return specifier.version

    def __str__(self) -> str:
        return " \\\n    --hash=sha256:".join([str(self.requirement), *self.hashes])


def pins(text: str) -> list[Pin]:
    """All pins of a constraints file, in its order."""
    return [Pin(one.group()) for one in _PIN.finditer(text)]


def resolved(*arguments: str, stdin: str = "") -> str:
    """What uv's resolver says."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--generate-hashes", "--no-annotate", "--no-header"]
    return subprocess.run(
        [*command, "--quiet", *arguments], input=stdin, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def with_builds_for_cpus(now: list[Pin], before: list[Pin]) -> list[Pin]:
    """torch's line with the hashes of PyTorch's own builds besides PyPI's: those that stand, while the version does."""
    for torch in (pin for pin in now if pin.requirement.name == "torch"):
        kept = [pin for pin in before if pin.requirement == torch.requirement]
        if not kept:
            kept = pins(resolved("--no-deps", "--index-url", TORCH_CPU_INDEX, "-", stdin=str(torch.requirement)))
        torch.hashes = sorted({*torch.hashes, *(one for pin in kept for one in pin.hashes)})
    return now


def main(arguments: list[str]) -> None:
    before = pins(CONSTRAINTS.read_text())
    extras = [word for extra in ("all", "dev", "docs") for word in ("--extra", extra)]
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as file:
        file.writelines(f"{pin.requirement}\n" for pin in before)  # without the hashes, which uv would keep
        file.flush()
        resolved("pyproject.toml", *extras, "--universal", "--output-file", file.name, *arguments)
        now = with_builds_for_cpus(pins(Path(file.name).read_text()), before)
    CONSTRAINTS.write_text(HEADER + "".join(f"{pin}\n" for pin in now))


if __name__ == "__main__":
    main(sys.argv[1:])
