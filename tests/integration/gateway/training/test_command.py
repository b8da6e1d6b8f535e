"""`ryzanstein fine-tune` against a gateway, with a host that writes what it is told."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from services.cli.commands.fine_tune.client import FineTuningClient
from services.cli.gateway_client import RequestRefused, connected
from services.cli.target import Gateway
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL
from tests.integration.gateway.training.fake_trainer import LINE, FakeTrainer


async def fine_tune(gateway: RunningGateway, *arguments: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "fine-tune", *arguments, "--url", gateway.url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    shown, _ = await process.communicate()
    assert process.returncode == code, shown.decode()
    return shown.decode()


@pytest.mark.slow
async def test_a_job_from_the_command_line(gateway: RunningGateway, trainer: FakeTrainer, tmp_path: Path) -> None:
    source, out = tmp_path / "examples.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(LINE) + "\n" for _ in range(4)))
    settings = ["--epochs", "2", "--batch-size", "4", "--suffix", "mine", "--rank", "8", "--target", "q_proj"]
    job = (await fine_tune(gateway, "create", str(source), "--model", MODEL, *settings)).strip()
    name = f"ft:{MODEL}::mine:{job.removeprefix('ftjob-')[:12]}"
    following = asyncio.create_task(fine_tune(gateway, "follow", job))

    await trainer.take(job)
    await trainer.step(job, 1)
    await trainer.checkpoint(job, 1, 1)
    await trainer.until(job, lambda one: bool(one.adapters and one.adapters[0].name))
    await trainer.step(job, 2)
    await trainer.finish(job, 2)

    told = (await following).splitlines()
    assert told[0] == f"Created fine-tuning job: {job}"
    assert told[-1] == f"{name} is served: ask for it by this name."
    assert any(line.startswith("Step ") for line in told)

    await fine_tune(gateway, "export", f"{name}:ckpt-step-1", "--output", str(out))
    assert (out / "adapter_model.safetensors").read_bytes() == (1).to_bytes(4, "little") * 100
    assert (out / "adapter_config.json").read_text() == '{"r": 8}'


async def test_the_client_of_the_command_line_reads_what_a_gateway_says(
    gateway: RunningGateway, trainer: FakeTrainer, tmp_path: Path
) -> None:
    source = tmp_path / "examples.jsonl"
    source.write_text("".join(json.dumps(LINE) + "\n" for _ in range(4)))
    async with connected(Gateway(gateway.url), "") as client:
        jobs = FineTuningClient(client)
        made = await jobs.create({"model": MODEL, "training_file": await jobs.file(str(source), None)})
        job = made["id"]
        await trainer.take(job)
        assert (await jobs.act(job, "pause"))["wanted"] == "pause"
        assert (await jobs.act(job, "resume"))["wanted"] == "run"
        for number in range(1, 4):
            await trainer.checkpoint(job, number, number)
        named = await trainer.until(job, lambda one: all(adapter.name for adapter in one.adapters))
        assert [one["step_number"] for one in await jobs.checkpoints(job)] == [1, 2, 3]
        found, step = await jobs.find(named.adapters[1].name)
        assert (found["id"], step) == (job, 2)
        assert [one["id"] for one in await jobs.listed(5)] == [job]
        await jobs.act(job, "cancel")
        await trainer.write(job, host="", status="cancelled")
        followed = [event["message"] async for event in jobs.follow(job)]
        assert followed[0] == f"Created fine-tuning job: {job}"
        assert set(followed) == {event["message"] for event in await jobs.events(job, 1000)}
        with pytest.raises(RequestRefused, match="it is over"):
            await jobs.act(job, "pause")


@pytest.mark.slow
async def test_what_is_wrong_with_a_file_is_told_with_its_line(gateway: RunningGateway, tmp_path: Path) -> None:
    source = tmp_path / "examples.jsonl"
    source.write_text(f'{json.dumps(LINE)}\n{{"messages": []}}\n')
    shown = await fine_tune(gateway, "create", str(source), "--model", MODEL, "--follow", code=1)
    assert "is failed: The job failed due to an invalid training file. Line 2: " in shown
