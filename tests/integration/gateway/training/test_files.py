"""Files of fine-tuning jobs at a gateway: what they become, and every way in which they are refused."""

import json
from array import array
from collections.abc import AsyncIterable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from services.gateway.tokenizer.tokenizer import ModelTokenizer
from services.gateway.training import preparation
from shared.config import CommonSettings
from shared.errors import QueueFull, StorageFull
from shared.messages.training import Examples, TrainingData, TrainingJob
from shared.nats.bus import Bus
from shared.nats.objects import Objects
from shared.nats.tenants import TenantBucket
from shared.nats.training import training_jobs, training_objects
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

TINY = "tiny"
COLD = ("one", "two", "three", "four", "five")
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Good"}
LINE = {"messages": [USER, ANSWER]}
PAIR = {"input": {"messages": [USER]}, "preferred_output": [ANSWER]} | {
    "non_preferred_output": [{"role": "assistant", "content": "Bad"}]
}
PROMPT = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"


@pytest.fixture
async def tiny(http: httpx.AsyncClient, ring: FakeRing) -> str:
    """A model with a byte-level tokenizer: 0 and 1 are <|start|> and <|end|>."""
    await ring.add_tokenizer("tiny-files", tiny_files())
    await ring.add_model(tiny_card())
    await until_listed(http, TINY)
    return TINY


def tiny_card(name: str = TINY, **changes: object) -> Any:
    return stub_card(name, tokenizer="tiny-files", vocab_size=258, eos_token_ids=[1], **changes)


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: openai.AsyncOpenAI, data: bytes) -> str:
    return (await client.files.create(file=("data.jsonl", data), purpose="fine-tune")).id


async def submit(
    client: openai.AsyncOpenAI, data: bytes, validation: bytes = b"", model: str = TINY, **extra: Any
) -> FineTuningJob:
    files: dict[str, Any] = {"training_file": await upload(client, data)}
    if validation:
        files["validation_file"] = await upload(client, validation)
    method = extra.pop("method", {"type": "supervised"})
    return await client.fine_tuning.jobs.create(model=model, method=method, extra_body=extra, **files)


async def checked(client: openai.AsyncOpenAI, job: FineTuningJob) -> FineTuningJob:
    async def over() -> bool:
        nonlocal job
        job = await client.fine_tuning.jobs.retrieve(job.id)
        return job.status != "validating_files"

    await until(over, 60.0)
    return job


async def records(bus: Bus) -> TenantBucket[TrainingJob]:
    bucket = training_jobs(bus)
    await bucket.ensure()
    return bucket


async def record_of(bus: Bus, job: str) -> TrainingJob:
    entry = await (await records(bus)).get("", job)
    return entry.value


async def data_of(bus: Bus, job: str) -> TrainingData:
    data = (await record_of(bus, job)).data
    return msgspec.msgpack.decode(await training_objects(bus).get(data.object_name), type=TrainingData)


def texts(examples: Examples) -> list[tuple[str, str]]:
    """Each example, and what of it is trained; ends of turns are told as well."""
    tokenizer = ModelTokenizer(tiny_files())
    tokens, found, begin = array("i", examples.tokens), [], 0
    for length in array("I", examples.lengths):
        ids, weights = tokens[begin : begin + length], examples.weights[begin : begin + length]
        learned = [token for token, weight in zip(ids, weights, strict=True) if weight]
        found.append(
            (
                tokenizer.decode(list(ids), skip_special_tokens=False),
                tokenizer.decode(learned, skip_special_tokens=False),
            )
        )
        begin += length
    assert begin == len(tokens) == len(examples.weights)
    return found


async def messages_of(client: openai.AsyncOpenAI, job: str) -> list[str]:
    page = await client.fine_tuning.jobs.list_events(job, limit=100)
    return [event.message for event in reversed(page.data)]


async def test_a_file_becomes_the_tokens_that_are_learned(client: openai.AsyncOpenAI, tiny: str, bus: Bus) -> None:
    long = {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}
    plain = {"prompt": "1+1=", "completion": "2"}
    job = await checked(client, await submit(client, jsonl(LINE, long, LINE, plain), jsonl(LINE)))
    assert job.status == "queued", job.error
    data = await data_of(bus, job.id)
    first = (f"{PROMPT}Good<|end|>\n", "Good<|end|>")
    assert texts(data.training) == [
        first,
        (f"{PROMPT}Good<|end|>\n{PROMPT}Good<|end|>\n", "Good<|end|>"),
        first,
        ("<|end|>1+1=2<|end|>", "2<|end|>"),
    ]
    assert texts(data.validation) == [first]
    record = await record_of(bus, job.id)
    assert (record.data.examples, record.data.validation_examples) == (4, 1)
    assert record.data.tokens == len(data.training.weights)
    assert record.data.trained == sum(data.training.weights)
    given = record.hyperparameters
    assert (given.epochs, given.batch_size, given.learning_rate_multiplier, record.steps) == (25, 1, 1.0, 100)
    assert not record.owner
    told = await messages_of(client, job.id)
    assert any(message.startswith("Validating training file: file-") for message in told)
    assert "1 lines of the training file are repeated." in told
    assert any(message.startswith("The training file has 4 examples") for message in told)
    assert told[-1] == "Files validated, moving job to queued state."


async def test_pairs_and_examples_that_are_cut(client: openai.AsyncOpenAI, tiny: str, bus: Bus) -> None:
    method = {"type": "dpo"}
    job = await checked(client, await submit(client, jsonl(PAIR, PAIR), method=method))
    assert texts((await data_of(bus, job.id)).training)[:2] == [
        (f"{PROMPT}Good<|end|>\n", "Good<|end|>"),
        (f"{PROMPT}Bad<|end|>\n", "Bad<|end|>"),
    ]
    record = await record_of(bus, job.id)
    assert (record.data.examples, record.hyperparameters.beta) == (2, 0.1)
    prompt = len(ModelTokenizer(tiny_files())._encode([PROMPT], False)[0])
    fields = {"truncate": True, "max_tokens": prompt + 2}
    job = await checked(client, await submit(client, jsonl(LINE, LINE), **fields))
    assert texts((await data_of(bus, job.id)).training)[0] == (f"{PROMPT}Go", "Go")
    assert "2 examples of the training file were cut at their end." in await messages_of(client, job.id)


BAD = [
    (b"", {}, "The training file has no examples"),
    (b"\n \n", {}, "The training file has no examples"),
    (jsonl(LINE), {}, "has 1 example, and at least 2 are needed"),
    (jsonl(LINE) + b"\xff\xfe\n{\n", {}, "2 faults. Line 2: This line is not valid UTF-8. Line 3: This line is not"),
    (jsonl({"messages": [USER]}, LINE), {}, "Line 1: The conversation has no message with role 'assistant'"),
    (jsonl(LINE, {"conversations": []}), {}, "Line 2: Unknown parameter: 'conversations'; did you mean 'messages'?"),
    (
        jsonl(LINE, {"messages": [USER, {**ANSWER, "content": "x" * 3000}]}),
        {},
        "more than the model's context of 2,048",
    ),
    (jsonl(LINE, LINE), {"max_tokens": 8}, "more than the job's max_tokens of 8"),
    (jsonl(LINE, LINE), {"max_tokens": 8, "truncate": True}, "is left of the example where it was cut"),
    (jsonl(PAIR, PAIR), {}, "create it with the method dpo"),
    (jsonl(LINE, LINE), {"method": {"type": "dpo"}}, "create it with the method supervised"),
    (jsonl(*[{}] * 150), {}, "at least 100 faults"),
]


async def test_what_is_wrong_is_told_with_its_line(client: openai.AsyncOpenAI, tiny: str) -> None:
    for data, fields, words in BAD:
        job = await checked(client, await submit(client, data or b" ", **fields))
        assert (job.status, job.trained_tokens) == ("failed", None)
        assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
        assert words in (job.error.message or ""), job.error
        told = await messages_of(client, job.id)
        assert told[-1] == (job.error.message or "")[:1000]
        assert any(f"{words.partition('Line ')[2]}"[:40] in message for message in told)
    job = await checked(client, await submit(client, jsonl(LINE, LINE), jsonl({"messages": []})))
    assert job.error.param == "validation_file"
    assert "Line 1" in (job.error.message or "")


async def test_a_file_may_have_so_many_examples_and_tokens(
    nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    async with run_gateway(nats_settings, training_examples=3, training_tokens=400) as gateway:
        client = gateway.openai()
        for data, words in (
            (jsonl(*[LINE] * 4), "limit training_examples: 3 entries, RYZANSTEIN_TRAINING_EXAMPLES changes it"),
            (jsonl(LINE, {"messages": [USER, {**ANSWER, "content": "x" * 400}]}), "limit training_tokens: 400 tokens"),
        ):
            job = await checked(client, await submit(client, data, model=MODEL))
            assert words in (job.error.message or "")
        await client.close()


@pytest.fixture
async def cold(hosts: FakeHosts, gateway: RunningGateway, ring: FakeRing) -> FakeHosts:
    """With models that nobody has loaded."""
    await ring.add_tokenizer("tiny-files", tiny_files())
    for name in COLD:
        await hosts.register(name)
    await until(lambda: set(COLD) <= gateway.service.work.catalog.registry.specs.keys())
    return hosts


async def test_a_base_that_was_never_loaded_is_waited_for(
    cold: FakeHosts, client: openai.AsyncOpenAI, ring: FakeRing, bus: Bus
) -> None:
    """Its tokenizer is needed. What it turns out to be is seen then, and so is whether the file is still there."""
    jobs = {name: await submit(client, jsonl(LINE, LINE), model=name) for name in COLD}
    await until(lambda: all(cold.waiting(name) > 0 for name in jobs))
    for name, job in jobs.items():

        async def told(name: str = name, job: str = job.id) -> bool:
            return f"'{name}' must be loaded once" in (await record_of(bus, job)).waiting_for

        await until(told)
    await client.files.delete(jobs["two"].training_file)
    await ring.add_model(tiny_card("one"))
    await ring.add_model(tiny_card("two"))
    await ring.add_model(tiny_card("three", tasks=["embed"], embedding_size=8))
    await ring.add_model(tiny_card("four", bidirectional=True))
    await cold.registry.delete("five")
    done = await checked(client, jobs["one"])
    assert done.status == "queued"
    assert not (await record_of(bus, done.id)).waiting_for
    for name, code, words in (
        ("two", "invalid_training_file", "was deleted, has expired"),
        ("three", "model_not_trainable", "generates no text"),
        ("four", "model_not_trainable", "is an encoder"),
        ("five", "model_not_found", "does not exist here"),
    ):
        refused = await checked(client, jobs[name])
        assert refused.error.code == code, refused.error
        assert words in (refused.error.message or "")


async def test_a_tokenizer_that_is_not_stored_yet_is_waited_for(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, ring: FakeRing, bus: Bus
) -> None:
    await ring.add_model(tiny_card())
    await until_listed(http, TINY)
    job = await submit(client, jsonl(LINE, LINE))

    async def told() -> bool:
        return "is not stored in NATS yet" in (await record_of(bus, job.id)).waiting_for

    await until(told)
    await ring.add_tokenizer("tiny-files", tiny_files())
    assert (await checked(client, job)).status == "queued"


async def test_what_does_not_come_is_given_up(
    cold: FakeHosts,
    gateway: RunningGateway,
    client: openai.AsyncOpenAI,
    ring: FakeRing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A base, after a day; room for the examples, after an hour."""
    for name in ("BASE_WITHIN", "ROOM_WITHIN"):
        monkeypatch.setattr(preparation, name, 0.0)
    job = await checked(client, await submit(client, jsonl(LINE, LINE), model="one"))
    assert (job.error.code, job.error.param) == ("no_group_available", "model")
    assert "could not take the request in time" in (job.error.message or "")

    async def full(self: Objects, name: str, parts: AsyncIterable[bytes], **given: Any) -> int:
        raise StorageFull("The object store is full.")

    uploaded = await upload(client, jsonl(LINE, LINE))
    await ring.add_model(tiny_card("two"))
    await until(lambda: "two" in gateway.service.work.catalog.cards)
    monkeypatch.setattr(Objects, "write", full)
    monkeypatch.setattr(preparation, "ROOM_PAUSE", 0.0)
    job = await client.fine_tuning.jobs.create(model="two", training_file=uploaded)
    job = await checked(client, job)
    assert (job.error.code, job.error.message) == ("storage_full", "The object store is full.")


@pytest.mark.slow
async def test_a_full_store_and_busy_queues_are_waited_for(
    client: openai.AsyncOpenAI, tiny: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what another gateway has written stays, which was killed before it could say so."""
    monkeypatch.setattr(preparation, "ROOM_PAUSE", 0.01)
    monkeypatch.setattr("services.gateway.training.tokenization.BUSY_PAUSE", 0.01)
    write, render = Objects.write, ModelTokenizer.render_turns
    refusals = iter([StorageFull("The object store is full."), None])
    busy = iter([QueueFull("Others are first."), None])

    async def first_full(self: Objects, name: str, parts: AsyncIterable[bytes], **given: Any) -> int:
        if name.endswith("-examples") and (refusal := next(refusals, None)) is not None:
            raise refusal
        return await write(self, name, parts, **given)

    async def first_busy(self: ModelTokenizer, *given: Any) -> Any:
        if (refusal := next(busy, None)) is not None:
            raise refusal
        return await render(self, *given)

    monkeypatch.setattr(Objects, "write", first_full)
    monkeypatch.setattr(ModelTokenizer, "render_turns", first_busy)
    job = await checked(client, await submit(client, jsonl(LINE, LINE)))
    assert job.status == "queued"
    assert list(refusals) == list(busy) == []
    known = await training_objects(bus).info(f"{job.id}-examples")
    assert known is not None
    again = msgspec.structs.replace(
        await record_of(bus, job.id), status="validating_files", owner="", data=None, steps=0
    )
    await (await records(bus)).put("", job.id, again)
    job = await checked(client, job)
    assert job.status == "queued"
    assert (await record_of(bus, job.id)).data is not None
    assert await training_objects(bus).info(f"{job.id}-examples") == known
