"""Builds one program of a repository that has no packages, at a fixed commit: a step of a peer's environment.

Runs in that environment, where nothing of this repository is installed: a script, not a module. git and a C++ compiler
are the machine's, cmake and ninja the environment's.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def commands(url: str, commit: str, folder: Path, target: str, options: list[str]) -> list[list[str]]:
    """What is run, in order. `folder` is the repository's root; `options` are cmake's."""
    git, tools, build = ["git", "-C", str(folder)], Path(sys.executable).parent, str(folder / "build")
    configure = ["-S", str(folder), "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    return [
        ["git", "init", "--quiet", str(folder)],
        [*git, "fetch", "--quiet", "--depth", "1", url, commit],
        [*git, "checkout", "--quiet", "--detach", "FETCH_HEAD"],
        [str(tools / "cmake"), *configure, "-DCMAKE_BUILD_TYPE=Release", *options],
        [str(tools / "cmake"), "--build", build, "--target", target],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("url", "commit", "folder", "target"):
        parser.add_argument(name, help="" if name != "folder" else "in the virtual environment")
    known, options = parser.parse_known_args()
    folder = Path(sys.prefix) / known.folder
    for command in commands(known.url, known.commit, folder, known.target, options):
        print(" ".join(command), flush=True)
        if code := subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{command[0]} ended with code {code}")


if __name__ == "__main__":
    main()
