"""The page of fine-tuning jobs in a real browser: a job is made, followed, changed, and its model is opened."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.messages.training import (
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingError,
    TrainingEvent,
    TrainingJob,
    TrainingMetrics,
)
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents, training_jobs
from tests.adapters import register, store_adapter
from tests.e2e.browser import Browser, Tab
from tests.integration.gateway.api.console.conftest import Proxy, console
from tests.integration.gateway.api.console.test_accessibility import LOW, nameless
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL

pytestmark = pytest.mark.slow
JOB = "ftjob-0123456789abcdef01234567"
HOSTILE = "<img src=x onerror=window.hacked=1>"
ROWS = "[...document.querySelectorAll('#tunings tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
CURVES = "[...document.querySelectorAll('#curves figure:not([hidden]) svg')].map(one => one.getAttribute('aria-label'))"
EVENTS = "[...document.querySelectorAll('#tuning-events li')].map(one => one.lastChild.data)"
STEPS = 8


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


def hidden(name: str) -> str:
    return f"document.getElementById('{name}').hidden"


class Host:
    """Trains by saying so."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._jobs = training_jobs(bus)
        self._events = TrainingEvents(bus)

    async def start(self, **fields: Any) -> None:
        """A job that runs, under `JOB` if nothing else is said."""
        await self._jobs.ensure()
        await self._events.ensure()
        job = TrainingJob(
            id=JOB,
            tenant="",
            model=MODEL,
            method="supervised",
            training_file="file-00000000000000000000000a",
            training_object="none",
            created_at=time.time(),
            seed=7,
            hyperparameters=Hyperparameters(epochs=2, batch_size=4, learning_rate_multiplier=1.0),
            status="running",
            data=TokenizedData("none", examples=16, tokens=400, trained=100, longest=50),
            host="host-1",
            attempt=1,
            steps=STEPS,
        )
        job = msgspec.structs.replace(job, **fields)
        await self._jobs.put("", job.id, job)

    async def job(self) -> TrainingJob:
        entry = await self._jobs.get("", JOB)
        return entry.value

    async def set(self, **fields: Any) -> None:
        """Again where a gateway has written in between."""
        while True:
            entry = await self._jobs.get("", JOB)
            changed = msgspec.structs.replace(entry.value, **fields)
            if await self._jobs.update(entry.key, changed, entry.revision) is not None:
                return

    async def say(self, step: int, message: str, metrics: TrainingMetrics | None = None) -> None:
        kind = "step" if metrics else "told"
        event = TrainingEvent(JOB, step, kind, "info", message, time.time(), metrics)
        await self._events.add("", event)

    async def step(self, number: int) -> None:
        """Its event, and what its record has of it."""
        valid = 1.25 if number % 4 == 0 else None
        metrics = TrainingMetrics(number, 4.0 / number, number / 10, 2e-4, 1.5, 100 * number, 1.0, valid, valid and 0.5)
        await self.say(number, f"Step {number}/{STEPS}", metrics)
        await self.set(metrics=metrics)

    async def adapter(self, folder: Path, step: int, name: str) -> TrainedAdapter:
        """In the object store, and known under its name."""
        digest = await store_adapter(self._bus, folder, step)
        await register(self._bus, name, MODEL, digest, tenant="", job=JOB)
        return TrainedAdapter(step, digest, 8, 400, int(time.time()), TrainingMetrics(step, 0.5), name)


@pytest.fixture
async def host(bus: Bus) -> Host:
    return Host(bus)


@pytest.fixture
async def page(tab: Tab) -> Tab:
    await tab.run(
        "window.confirm = () => true; window.saved = []; const make = URL.createObjectURL;"
        "const keep = blob => blob.arrayBuffer().then(all => saved.push(all.byteLength));"
        "URL.createObjectURL = blob => { keep(blob); return make.call(URL, blob) };"
    )
    await tab.click("#to-fine-tuning")
    return tab


async def write(tab: Tab, **fields: str) -> None:
    for name, value in fields.items():
        await tab.run(f"document.getElementById('{name.replace('_', '-')}').value = {json.dumps(value)}")


async def test_a_job_is_made_of_files_that_are_uploaded_once(
    page: Tab, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    await page.until(f"{ROWS}[0]?.[0] === 'none yet: make one below'")
    await page.until(f"document.getElementById('tune-model').value === '{MODEL}'")
    await page.click("#tune-create")
    await page.until(f"{text('tune-note')}.startsWith('Choose the training file')")
    lines, other, empty = tmp_path / "lines.jsonl", tmp_path / "other.jsonl", tmp_path / "empty.jsonl"
    example = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    for path in (lines, other):
        path.write_text(f"{json.dumps(example)}\n" * 12)
    empty.touch()
    await page.choose_files("#tune-file", empty)
    await page.click("#tune-create")
    await page.until(f"{text('tune-note')} === 'empty.jsonl is empty.'")
    await page.choose_files("#tune-file", lines)
    await page.choose_files("#tune-validation", other)
    await page.click("#tune-options > summary")
    await page.click("#tune-truncate")
    await write(page, tune_method="dpo", tune_suffix="my model!", tune_epochs="2", tune_seed="5", tune_rank="8")
    await page.click("#tune-create")
    note = "document.getElementById('tune-note')"
    await page.until(f"{note}.getAttribute('role') === 'alert' && {note}.textContent.includes('suffix')")
    await write(page, tune_suffix="mine", tune_method="supervised", tune_targets="q_proj, v_proj")
    await page.click("#tune-create")
    await page.until("location.hash.startsWith('#fine-tuning/ftjob-')")
    job = (await http.get(f"/v1/fine_tuning/jobs/{await page.run(text('tuning-name'))}")).json()
    assert (job["model"], job["user_provided_suffix"], job["seed"]) == (MODEL, "mine", 5)
    assert job["method"]["type"] == "supervised"
    assert job["method"]["supervised"]["hyperparameters"]["n_epochs"] == 2
    files = (await http.get("/v1/files?purpose=fine-tune")).json()["data"]
    assert {file["filename"] for file in files} == {"lines.jsonl", "other.jsonl"}
    assert {file["id"] for file in files} == {job["training_file"], job["validation_file"]}
    keys = [one["headers"] for one in page.sent if one["url"].endswith("/v1/fine_tuning/jobs") and "postData" in one]
    assert len({head["idempotency-key"] for head in keys}) == len(keys) == 2
    await page.click("#all-tunings")
    await page.until(f"{ROWS}.length === 1 && {ROWS}[0][0] === '{job['id']}'")
    page.errors.clear()  # Chromium itself writes each refusal to its console


async def test_all_parameters_go_along_and_older_jobs_are_shown(
    page: Tab, host: Host, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    for number in range(11):
        await host.start(id=f"{JOB[:-2]}{number:02}", status="cancelled", created_at=100.0 + number, clean=True)
    await page.until(f"{ROWS}.length === 10 && {ROWS}[0][0].endsWith('10') && {ROWS}[0][1] === 'cancelled'")
    await page.click("#more-tunings")
    await page.until(f"{ROWS}.length === 11 && {hidden('more-tunings')}")
    await page.until(f"document.getElementById('tune-model').value === '{MODEL}'")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("{}")
    await page.choose_files("#tune-file", lines)
    beta = "document.getElementById('tune-beta')"
    assert await page.run(f"{beta}.disabled"), "supervised training has none"
    await page.run(
        "(() => { const field = document.getElementById('tune-method'); field.value = 'dpo';"
        "field.dispatchEvent(new Event('change')); })()"
    )
    assert not await page.run(f"{beta}.disabled")
    await write(page, tune_batch_size="4", tune_rate="0.5", tune_beta="0.2", tune_alpha="24", tune_dropout="0.1")
    await write(page, tune_schedule="linear", tune_warmup="0.1", tune_decay="0.01", tune_norm="2")
    await write(page, tune_longest="512", tune_replicas="2", tune_targets="q_proj, v_proj")
    await page.click("#tune-create")
    await page.until("location.hash.startsWith('#fine-tuning/ftjob-')")
    job = (await http.get(f"/v1/fine_tuning/jobs/{await page.run(text('tuning-name'))}")).json()
    given = {"n_epochs": "auto", "batch_size": 4, "learning_rate_multiplier": 0.5, "beta": 0.2}
    assert job["method"] == {"type": "dpo", "dpo": {"hyperparameters": given}}
    assert job["lora"] == {"rank": 16, "alpha": 24, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    assert job["settings"] == {
        "max_tokens": 512, "truncate": False, "schedule": "linear", "warmup_ratio": 0.1, "weight_decay": 0.01,
        "max_grad_norm": 2, "optimizer": "adamw", "replicas": 2,
    }  # fmt: skip


async def test_an_upload_is_stopped(page: Tab, tmp_path: Path) -> None:
    await page.until(f"document.getElementById('tune-model').value === '{MODEL}'")
    await page.call(
        "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=1000
    )
    lines = tmp_path / "lines.jsonl"
    await asyncio.to_thread(lines.write_bytes, b"x" * (1 << 20))
    await page.choose_files("#tune-file", lines)
    await page.click("#tune-create")
    await page.click("#tune-stop")
    await page.until(f"{text('tune-note')} === 'The upload was stopped; no job was made.'")
    assert await page.run(f"{hidden('tune-progress')} && !document.getElementById('tune-create').disabled")


async def test_a_job_is_followed_paused_resumed_and_its_model_opened(page: Tab, host: Host, tmp_path: Path) -> None:
    await host.start(waiting_for="No host has room.")
    await page.until(f"{ROWS}.some(row => row[0] === '{JOB}' && row[1] === 'running')")
    await page.click(f'a[href="#fine-tuning/{JOB}"]')
    await page.until(f"{text('tuning-waiting')} === 'No host has room.'")
    assert await page.run("document.activeElement.id") == "tuning-name", "what had the focus is hidden"
    assert await page.run(f"{hidden('tuning-chat')} && {hidden('tuning-resume')}")
    await host.set(waiting_for="")
    await host.say(0, f"Line 3 says {HOSTILE}")
    for number in range(1, 6):
        await host.step(number)
    await page.until(f"{EVENTS}.some(said => said.includes({json.dumps(HOSTILE)}))")
    await page.until(f"{CURVES}.some(said => said === 'Loss over 8 steps: training 0.8, validation 1.25')")
    assert len(await page.run(CURVES)) == 3, "no margin but of DPO"
    await page.until(f"{text('tuning-state')}.includes('step 5 of 8')")
    await page.click("#tuning-steps > summary")
    await page.until("document.querySelector('#steps tbody tr').cells[0].textContent === '5'")
    await page.click("#tuning-pause")
    await page.until(f"{text('tuning-note')}.includes('pauses') && {text('tuning-state')}.includes('pauses')")
    assert (await host.job()).wanted == "pause"
    await host.set(status="paused", host="")
    await page.click("#tuning-resume")
    await page.until(f"{text('tuning-note')}.includes('goes on')")
    assert (await host.job()).wanted == "run"
    checkpoint = await host.adapter(tmp_path, 4, f"ft:{MODEL}::mine:1:ckpt-step-4")
    result = await host.adapter(tmp_path, 8, f"ft:{MODEL}::mine:1")
    await host.set(status="running", host="host-1", adapters=[checkpoint])
    await page.until("document.querySelector('#checkpoints tbody tr').cells[0].textContent === '4'")
    for number in range(6, 9):
        await host.step(number)
    await host.set(status="succeeded", result=result, fine_tuned_model=result.name, finished_at=time.time(), clean=True)
    await page.until(f"!{hidden('tuning-chat')} && {hidden('tuning-cancel')}")
    for number, name in enumerate(("tuning-config", "tuning-weights"), 1):
        await page.click(f"#{name}")
        await page.until(f"saved.length === {number}")
    await page.click('[aria-label="Weights: step 4"]')
    await page.until("saved.length === 3")
    assert await page.run("saved") == [8, 400, 400]
    await page.click("#tuning-copy")
    await page.until(f"{text('tuning-note')}.includes('copied')")
    assert await page.run("window.hacked === undefined && !document.querySelector('#fine-tuning img')")
    assert [*await nameless(page), *await page.run(LOW)] == []
    await page.click("#tuning-chat")
    await page.until(f"!{hidden('chat')} && document.getElementById('model').value === '{result.name}'")
    assert await page.run("document.activeElement.id") == "prompt"


async def test_a_failed_job_says_why_and_a_cancelled_one_that_it_is(page: Tab, host: Host) -> None:
    await host.start()
    await page.click("#to-chat")
    await page.run(f"location.hash = '#fine-tuning/{JOB}'")
    await page.until(f"!{hidden('tuning-cancel')}")
    await page.click("#tuning-cancel")
    await page.until(f"{text('tuning-note')}.includes('is being cancelled')")
    assert (await host.job()).wanted == "cancel"
    error = TrainingError("nan_loss", f"The loss of step 3 is not a number: {HOSTILE}")
    await host.set(status="failed", error=error, host="", finished_at=time.time(), clean=True)
    await page.until(f"{text('tuning-error')}.includes({json.dumps(HOSTILE)})")
    assert await page.run("document.getElementById('tuning-error').getAttribute('role')") == "alert"
    assert await page.run(f"{hidden('tuning-cancel')} && {hidden('tuning-pause')} && {hidden('tuning-weights')}")
    assert await page.run("window.hacked === undefined")
    await page.run("location.hash = '#fine-tuning/ftjob-none'")
    note = "document.getElementById('tuning-note')"
    await page.until(f"{note}.getAttribute('role') === 'alert' && {note}.textContent.includes('ftjob-none')")
    assert await page.run(f"{text('tuning-facts')} === '' && {text('tuning-error')} === ''")
    page.errors.clear()  # Chromium itself writes each refusal to its console


async def test_events_are_read_on_after_a_lost_connection(
    browser: Browser, gateway: RunningGateway, proxy: Proxy, host: Host
) -> None:
    await host.start()
    await host.step(1)
    async with console(browser, f"{proxy.url}#fine-tuning/{JOB}", proxy.url) as tab:
        await tab.until(f"{CURVES}[0]?.includes('training 4')")
        proxy.cut("/events")
        await host.step(2)
        await tab.until(f"{CURVES}[0]?.includes('training 2')")
        streams = [one["headers"] for one in tab.sent if "/events" in one["url"]]
        assert len(streams) == 2
        assert "last-event-id" not in streams[0]
        assert streams[1]["last-event-id"]
        tab.errors.clear()  # Chromium itself writes the lost connection to its console
