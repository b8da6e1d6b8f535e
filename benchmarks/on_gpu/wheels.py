"""What a machine must have for the sections, and how it gets there without a network. Standard library alone: it is
asked before anything else is imported.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

_SAME = "msgspec structlog platformdirs llguidance safetensors accelerate gguf transformers rich typer"
NEEDED = {name: name for name in _SAME.split()} | {
    # module: distribution. torch, triton and numpy are expected to be there, in versions that fit the driver.
    "pydantic_settings": "pydantic-settings",
    "nats": "nats-py",
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
}
BASE = {"torch": "torch", "numpy": "numpy"}
# Beginnings of distributions that are never brought along: hundreds of megabytes, and bound to the driver.
LEFT_OUT = ("torch", "triton", "numpy", "nvidia-", "cuda-")
# What runs where glibc is 2.39 or newer, as in Ubuntu 24.04.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64")

# What makes them importable there, without touching what is installed there.
INSTALL = (
    "python3 -m pip install --no-index --no-deps --target /tmp/site {directory}/*.whl && export PYTHONPATH=/tmp/site"
)


def missing(needed: dict[str, str]) -> list[str]:
    """Distributions whose modules cannot be found."""
    return [name for module, name in needed.items() if importlib.util.find_spec(module) is None]


def sentence(absent: list[str]) -> str:
    """What is missing, and how to bring it."""
    names = " ".join(absent)
    return (
        f"Missing here: {', '.join(absent)}; with a network run `pip install {names}`, without one run "
        "`python -m benchmarks.gpu --wheels wheels` where there is one, carry that directory here and run "
        f"`{INSTALL.format(directory='wheels')}`."
    )


def closure(names: list[str], environment: dict[str, str]) -> dict[str, str]:
    """{distribution: version} of `names` and all that they need in `environment` (of markers), as installed here;
    without what is `LEFT_OUT`."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        key = name.lower().replace("_", "-")
        if key in found or key.startswith(LEFT_OUT):
            continue
        distribution = importlib.metadata.distribution(name)
        found[key] = distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": "", **environment}):
                waiting.append(requirement.name)
    return found


def download_command(directory: Path, pinned: dict[str, str], python: str) -> list[str]:
    """pip's, for another machine's Python (like "3.12") on Linux x86-64."""
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"),
        *("--implementation", "cp", "--python-version", python, "--dest", str(directory)),
        *(option for platform in PLATFORMS for option in ("--platform", platform)),
        *(f"{name}=={number}" for name, number in sorted(pinned.items())),
    ]


def download(directory: Path, python: str) -> int:
    """Puts the wheels into `directory`; how many bytes they are. Raises `BenchError`."""
    from benchmarks.errors import BenchError

    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    pinned = closure(list(NEEDED.values()), environment)
    if subprocess.run(download_command(directory, pinned, python), check=False).returncode:
        raise BenchError("pip could not download the wheels; what it has said above says which, and why.")
    return sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))
