"""`ryzanstein batch`, by HTTP and by the queue."""

import asyncio
import json
import os
import sys
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from services.cli.groups import app
from shared.config import CommonSettings
from shared.errors import RyzansteinError
from tests.integration.gateway.batches.helpers import custom_ids, jsonl, line, requests
from tests.integration.gateway.conftest import RunningGateway
from tests.processes import nats_address


async def batch(*arguments: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "batch", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    shown, _ = await process.communicate()
    assert process.returncode == code, shown.decode()
    return shown.decode()


def ways(gateway: RunningGateway, nats: CommonSettings) -> list[list[str]]:
    return [["--url", gateway.url], ["--nats", "--nats-url", nats_address(nats)]]


@pytest.mark.slow
async def test_both_ways_do_the_same(
    gateway: RunningGateway, nats_settings: CommonSettings, served: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(requests(20))
    for way in ways(gateway, nats_settings):
        shown = await batch("submit", str(source), "--metadata", "a=b", "--output", str(out), *way)
        assert "20 completed, 0 failed, 20 in all" in shown
        assert custom_ids([json.loads(each) for each in out.read_text().splitlines()]) == sorted(
            f"c{number}" for number in range(20)
        )
        out.unlink()
        name = (await batch("submit", str(source), *way)).strip()
        assert "completed" in await batch("status", name, "--wait", *way)
        assert name in await batch("list", *way)
        await batch("download", name, "--output", str(out), *way)
        assert len(out.read_text().splitlines()) == 20
        assert "Cannot cancel" in await batch("cancel", name, *way, code=1)
        assert "No batch found" in await batch("status", "batch_none", *way, code=1)


async def test_what_is_wrong_is_said_and_in_the_exit_code(
    gateway: RunningGateway, served: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line("a"), line("a")]))
    shown = await batch("submit", str(source), "--wait", "--url", gateway.url, code=1)
    assert "line 2: The custom_id 'a'" in shown
    for arguments, words in (
        (["submit", str(tmp_path / "none"), "--url", gateway.url], "cannot be read"),
        (["submit", str(source), "--metadata", "x", "--url", gateway.url], "KEY=VALUE"),
        (["list", "--url", "http://127.0.0.1:1"], "did not answer"),
        (["list", "--url", "x", "--nats"], "give one"),
    ):
        result = await asyncio.to_thread(CliRunner().invoke, app, ["batch", *arguments])
        assert isinstance(result.exception, RyzansteinError)
        assert words in str(result.exception)
