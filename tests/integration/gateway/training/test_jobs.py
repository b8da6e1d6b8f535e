"""Fine-tuning jobs at a gateway, with OpenAI's client: their life, their events, what is refused."""

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs

from services.gateway.jobs import leases
from shared.config import CommonSettings
from tests.adapters import register
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until
from tests.integration.gateway.training.fake_trainer import CSV, FakeTrainer, submit, until_status, upload


async def test_a_job_from_its_file_to_its_model(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, ring: FakeRing, trainer: FakeTrainer
) -> None:
    made = await submit(client, suffix="support", seed=7, metadata={"a": "b"})
    assert (made.object, made.model, made.seed, made.metadata) == ("fine_tuning.job", MODEL, 7, {"a": "b"})
    queued = await until_status(client, made.id, "queued")
    assert queued.hyperparameters.n_epochs == 2
    assert queued.method.supervised is not None

    await trainer.take(made.id)
    await trainer.step(made.id, 1)
    await trainer.checkpoint(made.id, 1, 1)
    (kept,) = (await trainer.until(made.id, lambda job: bool(job.adapters and job.adapters[0].name))).adapters
    assert kept.name == f"ft:{MODEL}::support:{made.id.removeprefix('ftjob-')[:12]}:ckpt-step-1"
    await trainer.step(made.id, 2)
    await trainer.finish(made.id, 2)

    job = await until_status(client, made.id, "succeeded")
    name = kept.name.removesuffix(":ckpt-step-1")
    assert (job.fine_tuned_model, job.trained_tokens) == (name, 64)
    assert job.finished_at is not None
    (result,) = job.result_files
    assert (await client.files.retrieve(result)).purpose == "fine-tune-results"
    assert (await client.files.content(result)).content == CSV
    for wanted, number in ((name, 2), (kept.name, 1)):
        answer = await client.completions.create(model=wanted, prompt="Hi", max_tokens=4)
        assert answer.model == wanted
        assert ring.requests[-1].adapter == (await trainer.adapter("ftjob-1", 9, number)).digest
    assert {name, kept.name} < {one.id async for one in client.models.list()}

    checkpoints = (await client.fine_tuning.jobs.checkpoints.list(made.id)).data
    assert [one.step_number for one in checkpoints] == [2, 1]
    assert checkpoints[1].fine_tuned_model_checkpoint == kept.name
    assert checkpoints[1].metrics.valid_loss == 2.0
    said = [one.message for one in (await client.fine_tuning.jobs.list_events(made.id)).data]
    assert said[0] == "The job has successfully completed"
    assert said[-1] == f"Created fine-tuning job: {made.id}"
    assert "Step 1/2: training loss=2.50" in said
    newest = await client.fine_tuning.jobs.list_events(made.id, limit=1)
    older = await client.fine_tuning.jobs.list_events(made.id, after=newest.data[0].id)
    assert [one.message for one in [*newest.data, *older.data]] == said

    path = f"/v1/fine_tuning/jobs/{made.id}/adapter"
    assert (await http.get(f"{path}/adapter_config.json")).content == b'{"r": 8}'
    weights = await http.get(f"{path}/adapter_model.safetensors", params={"checkpoint": 1})
    assert weights.content == (1).to_bytes(4, "little") * 100
    assert (await http.get(f"{path}/secret.txt")).status_code == 404
    assert (await http.get(f"{path}/adapter_config.json?checkpoint=5")).status_code == 404

    done = await trainer.until(made.id, lambda one: one.clean)
    assert done.owner == ""
    assert await trainer.objects.info(done.data.object_name) is None
    await client.models.delete(name)
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve(name)


async def test_what_its_tenant_wants(client: openai.AsyncOpenAI, trainer: FakeTrainer) -> None:
    jobs = client.fine_tuning.jobs
    made = await submit(client)
    await until_status(client, made.id, "queued")
    assert (await jobs.pause(made.id)).status == "paused", "no host has it"
    assert (await jobs.resume(made.id)).status == "queued"
    with pytest.raises(openai.ConflictError, match="it is not paused"):
        await jobs.resume(made.id)

    await trainer.take(made.id)
    assert (await jobs.pause(made.id)).status == "running", "its host writes a state first"
    assert (await trainer.known(made.id)).wanted == "pause"
    await trainer.write(made.id, host="")  # it has died: what is wanted is done all the same
    await until_status(client, made.id, "paused")
    assert (await jobs.resume(made.id)).status == "queued"

    await trainer.take(made.id)
    assert (await jobs.cancel(made.id)).status == "running"
    await trainer.write(made.id, host="", status="paused")
    await until_status(client, made.id, "cancelled")
    assert (await jobs.cancel(made.id)).status == "cancelled"
    for refused in (jobs.pause, jobs.resume):
        with pytest.raises(openai.ConflictError, match="it is over"):
            await refused(made.id)
    await trainer.until(made.id, lambda job: job.clean)

    other = await submit(client)
    assert (await jobs.cancel(other.id)).status == "cancelled", "whatever it is doing"
    await trainer.until(other.id, lambda job: job.clean and not job.owner)


async def test_a_job_that_is_being_published_is_not_cancelled(client: openai.AsyncOpenAI, trainer: FakeTrainer) -> None:
    made = await submit(client)
    await trainer.take(made.id)
    await trainer.finish(made.id, 1)
    with pytest.raises(openai.ConflictError):
        await client.fine_tuning.jobs.cancel(made.id)
    await until_status(client, made.id, "succeeded")


async def test_events_are_followed_and_resumed(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, trainer: FakeTrainer
) -> None:
    made = await submit(client)
    await trainer.take(made.id)
    await trainer.step(made.id, 1)
    path, ids, seen = f"/v1/fine_tuning/jobs/{made.id}/events?stream=true", [], []
    async with http.stream("GET", path) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
                if seen[-1]["type"] == "metrics":
                    break
    assert seen[0]["message"] == f"Created fine-tuning job: {made.id}"
    assert (seen[-1]["data"]["step"], seen[-1]["data"]["total_steps"]) == (1, 2)
    await trainer.step(made.id, 2)
    await trainer.finish(made.id, 1)
    answer = await http.get(path, headers={"Last-Event-ID": ids[-1]})
    rest = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert rest[0]["data"]["step"] == 2
    assert rest[-1]["message"] == "The job has successfully completed"
    assert {one["id"] for one in seen}.isdisjoint(one["id"] for one in rest)
    assert (await http.get(path, headers={"Last-Event-ID": "x"})).status_code == 400


async def test_jobs_are_listed_page_by_page(client: openai.AsyncOpenAI, trainer: FakeTrainer) -> None:
    file = await upload(client)
    given: list[dict[str, str] | None] = [{"a": "b"}, None, {"a": "c"}]
    made = [(await submit(client, training_file=file, metadata=one)).id for one in given]
    assert [job.id async for job in client.fine_tuning.jobs.list(limit=1)] == made[::-1]
    found = await client.fine_tuning.jobs.list(metadata={"a": "b"})
    assert [job.id for job in found.data] == [made[0]]
    none = await client.fine_tuning.jobs.list(extra_query={"metadata": "null"})
    assert [job.id for job in none.data] == [made[1]]
    with pytest.raises(openai.BadRequestError):
        await client.fine_tuning.jobs.list(extra_query={"metadata": "null", "metadata[a]": "b"})


async def test_the_oldest_that_are_over_are_forgotten_with_their_events(
    client: openai.AsyncOpenAI, gateway: RunningGateway, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "FORGOTTEN_AT_ONCE", 1)
    jobs = gateway.service.work._jobs[1]._jobs
    jobs.traits = replace(jobs.traits, known=structs.replace(jobs.traits.known, value=1))
    file, made = await upload(client), []
    for _ in range(2):
        made.append((await submit(client, training_file=file)).id)
        await until_status(client, made[-1], "queued")
        await client.fine_tuning.jobs.cancel(made[-1])
        await trainer.until(made[-1], lambda job: job.clean)
    third = await submit(client, training_file=file)
    assert [job.id for job in (await client.fine_tuning.jobs.list()).data] == [third.id]
    for gone in made:
        assert [entry async for entry in trainer.events.of("", gone)] == []


async def test_the_same_key_is_the_same_job(client: openai.AsyncOpenAI, trainer: FakeTrainer) -> None:
    file, headers = await upload(client), {"Idempotency-Key": "once"}
    first = await submit(client, training_file=file, extra_headers=headers)
    again = await submit(client, training_file=file, extra_headers=headers)
    assert again.id == first.id
    with pytest.raises(openai.UnprocessableEntityError):
        await submit(client, training_file=file, suffix="other", extra_headers=headers)


DPO: dict[str, Any] = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}


async def test_what_is_refused(client: openai.AsyncOpenAI, ring: FakeRing, trainer: FakeTrainer) -> None:
    for fields, status, said in [
        ({"model": "nothing"}, 404, "does not exist here"),
        ({"model": "ours"}, 400, f"train one on its base, '{MODEL}'"),
        ({"model": "encoder"}, 400, "generates no text"),
        ({"training_file": "file-none"}, 404, "No such File object"),
        ({"validation_file": "file-none"}, 404, "No such File object"),
        ({"method": {"type": "reinforcement"}}, 400, "Reinforcement fine-tuning is not supported"),
        ({"method": DPO | {"supervised": {}}}, 400, "leave one out"),
        ({"method": DPO, "hyperparameters": {"n_epochs": 1}}, 400, "leave the former out"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, 400, "not supported here"),
        ({"suffix": "a:b"}, 400, "letters without accents"),
        ({"suffix": "a b"}, 400, "Invalid suffix 'a b'"),
        ({"suffix": "a" * 65}, 400, "limit training_suffix: 64 characters"),
        ({"hyperparameters": {"n_epochs": 51}, "method": None}, 400, "n_epochs"),
        ({"extra_body": {"lora": {"target_modules": ["q_proj", "q_proj"]}}}, 400, "stands twice"),
        ({"extra_body": {"replicas": 8}}, 400, "8 replicas cannot share a batch of 4"),
        ({"extra_body": {"rank": 8}}, 400, "rank"),
    ]:
        if fields.get("model") == "ours":
            await register(ring.bus, "ours", MODEL, "a" * 64)
        if fields.get("model") == "encoder":
            await ring.add_model(stub_card("encoder", tasks=["embed"], bidirectional=True, embedding_size=8))
        if fields.get("model") in ("ours", "encoder"):
            await until_found(client, fields["model"])
        with pytest.raises(openai.APIStatusError, match=said) as refused:
            await submit(client, **fields)
        assert refused.value.status_code == status
        assert (await client.fine_tuning.jobs.list()).data == []


async def until_found(client: openai.AsyncOpenAI, model: str) -> None:
    async def found() -> bool:
        return model in {one.id async for one in client.models.list()}

    await until(found, 40.0)


async def admitted(client: openai.AsyncOpenAI, **fields: Any) -> bool:
    try:
        await submit(client, **fields)
    except openai.RateLimitError:
        return False
    return True


async def test_files_have_their_purpose_and_tenants_their_limit(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, tenant_training_jobs=1) as gateway, gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="upload it with the purpose 'fine-tune'"):
            await submit(client, training_file=await upload(client, purpose="batch"))
        first = await submit(client)
        with pytest.raises(openai.RateLimitError, match="RYZANSTEIN_TENANT_TRAINING_JOBS") as refused:
            await submit(client)
        assert refused.value.code == "quota_exceeded"
        await client.fine_tuning.jobs.cancel(first.id)
        await until(lambda: admitted(client, method=DPO))  # the gateway reads of the end a little later
        async with gateway.http() as http:
            for path, status in (
                ("/v1/fine_tuning/jobs/ftjob-none", 404),
                ("/v1/fine_tuning/jobs/ftjob-none/events", 404),
                ("/v1/fine_tuning/jobs/ftjob-none/checkpoints", 404),
                (f"/v1/fine_tuning/jobs/{first.id}/adapter/adapter_config.json", 404),
                ("/v1/fine_tuning/checkpoints/ftckpt_1/permissions", 404),
            ):
                assert (await http.get(path)).status_code == status, path


async def test_a_bad_file_fails_with_its_lines(client: openai.AsyncOpenAI, trainer: FakeTrainer) -> None:
    file = await client.files.create(file=("a.jsonl", b'{"messages": 1}\n{\n'), purpose="fine-tune")
    made = await submit(client, training_file=file.id)
    failed = await until_status(client, made.id, "failed")
    assert (failed.error.code, failed.error.param) == ("invalid_training_file", "training_file")
    assert "Line 2" in failed.error.message
    events = (await client.fine_tuning.jobs.list_events(made.id)).data
    assert {one.level for one in events} >= {"error", "info"}
    await trainer.until(made.id, lambda job: job.clean)
