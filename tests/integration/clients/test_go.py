"""The Go client: its own tests, and its README against real gateways. The example `resume` is in `test_examples.py`."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.integration.clients.programs import ROOT, Command, blocks, run, tool
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying

MODULE = ROOT / "clients" / "go"
TEXT = "Once upon a time, a connection was lost, and nobody who listened noticed."


async def run_go(directory: Path, *arguments: str) -> str:
    """What the command prints; fails with it when it does not end well."""
    done = await asyncio.to_thread(
        subprocess.run, [tool("go"), *arguments], cwd=directory, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.slow
async def test_its_own_tests() -> None:
    await run_go(MODULE, "vet", "./...")
    assert "ok" in await run_go(MODULE, "test", "-count=1", "./...")


async def example(number: int, directory: Path, *gateways: str) -> Command:
    """A program of the README, for these gateways."""
    tool("go")
    source = blocks(MODULE, "go")[number]
    for port, url in zip(("8000", "8001"), gateways, strict=False):
        source = source.replace(f"http://127.0.0.1:{port}", url)
    (directory / "main.go").write_text(source.replace("SmolLM2-135M-Instruct", MODEL))
    (directory / "go.mod").write_text(
        f"module example\n\ngo 1.19\n\nrequire ryzanstein-client v0.1.0\n\nreplace ryzanstein-client => {MODULE}\n"
    )
    await run_go(directory, "build", "-o", "example", ".")
    return [str(directory / "example")]


async def test_the_stream_of_the_readme(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = saying(TEXT)
    command = await example(0, tmp_path, gateway.url, other.url)
    assert await run(command, gateway.url) == f"{TEXT}\n"
    assert len(ring.requests) == 1
