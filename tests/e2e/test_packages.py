"""What is installed and what is not: services start with their own packages alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from shared.process import VERSION
from tests.e2e.stack import run_cli
from tests.processes import service_process

pytestmark = pytest.mark.e2e

BLOCKER = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
OTHERS = {"torch", "transformers", "typer", "rich", "httpx", "huggingface_hub", "psutil", "accelerate", "gguf"}


def without(directory: Path, packages: set[str]) -> dict[str, str]:
    """Environment in which `packages` cannot be imported by any Python that is started."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(BLOCKER.format(blocked=packages))
    return {"PYTHONPATH": f"{directory}:{Path.cwd()}"}


@pytest.mark.slow
@pytest.mark.parametrize("service", ["gateway", "scheduler", "health-monitor"])
async def test_a_service_starts_without_the_packages_of_others(
    service: str, tmp_path: Path, bus: Bus, nats_settings: CommonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in without(tmp_path / "site", OTHERS).items():
        monkeypatch.setenv(name, value)
    port = ("--port", "0") if service == "gateway" else ()
    arguments = ("serve", service, *port)
    async with service_process(bus, nats_settings, "services.cli", tmp_path, *arguments, instance="one") as process:
        beat = await process.wait_ready()
        assert beat.pid == process.process.pid, "`serve` has become the service"
        assert await process.end() == 0


def test_the_blocker_blocks(tmp_path: Path) -> None:
    environment = {**os.environ, **without(tmp_path, {"torch"})}
    command = [sys.executable, "-c", "import torch"]
    blocked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "No module named 'torch'" in blocked.stderr


def test_the_command_line_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    result = run_cli("status", **without(tmp_path, {"typer"}))
    assert result.returncode == 1
    assert result.stderr == (
        "error: The command line needs the package typer, which is not installed here; install it with: "
        "pip install 'ryzanstein[cli]'\n"
    )


@pytest.mark.slow
def test_up_says_what_installs_the_whole_stack(tmp_path: Path) -> None:
    for package, needs in (("typer", "The command line"), ("torch", "The executor"), ("starlette", "The gateway")):
        result = run_cli("up", "--port", "0", "--data-dir", str(tmp_path), **without(tmp_path / package, {package}))
        assert result.returncode == 1
        assert result.stderr.startswith(f"error: {needs} needs")
        assert package in result.stderr
        assert result.stderr.endswith("pip install 'ryzanstein[all]'\n")


def test_the_version_needs_no_more_than_the_core(tmp_path: Path) -> None:
    assert run_cli("--version", **without(tmp_path, OTHERS)).stdout == f"ryzanstein {VERSION}\n"


def test_a_service_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    for service, package in (("gateway", "starlette"), ("executor", "torch")):
        result = run_cli("serve", service, **without(tmp_path, {package}))
        assert result.returncode == 1
        assert result.stderr.startswith(f"error: The {service} needs packages that are not installed here")
        assert f"pip install 'ryzanstein[{service}]'" in result.stderr


def test_a_service_that_is_none_is_said() -> None:
    result = run_cli("serve", "everything")
    assert result.returncode == 1
    assert result.stderr.startswith("error: There is no service 'everything' to serve; it is one of executor,")
