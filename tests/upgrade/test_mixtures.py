"""The previous release and this one in one cluster, replaced one instance at a time under load, there and back."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ryzanstein_client import AsyncClient
from services.executor.worker.stub import stub_token
from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.executor.rings import MODEL, RING, make_served_model
from tests.integration.executor.training_cluster import Cluster
from tests.integration.rollout.cluster_fixture import House, Load
from tests.integration.rollout.test_sessions import Client, talking
from tests.upgrade.mixtures import visited, walk
from tests.upgrade.previous_release import installed

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

KINDS = ("monitor", "scheduler", "gateway", "executor")
LINES = 400  # of each batch
LONG = 600  # tokens of an answer that is read across replacements: 6 s of steps


@pytest.fixture(scope="session")
def previous() -> str:
    return str(installed())


async def replace(house: House, kind: str, *, new: bool, previous: str) -> None:
    """Both instances, one after the other."""
    house.python = "" if new else previous
    for number in range(2):
        await house.restart(f"{kind}-{number}")


class Repeated:
    """Does the same again and again, until it is cancelled."""

    def __init__(self) -> None:
        self._done = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self._one()
            self._done.set()

    async def _one(self) -> None:
        raise NotImplementedError

    async def one_more(self) -> None:
        """Returns when what is under way is done."""
        self._done.clear()
        await asyncio.wait_for(self._done.wait(), 120)


class Reader(Repeated):
    """Long answers one after another by our client, which goes to the other gateway where one has left."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self._urls = urls
        self._seeds = itertools.count(1)

    async def _one(self) -> None:
        seed = next(self._seeds)
        right = bytes(stub_token(seed, position) for position in range(LONG)).decode()
        async with AsyncClient(self._urls) as client:
            stream = client.stream_completion(
                model="stub", prompt=f"long {seed}", max_tokens=LONG, seed=seed, ignore_eos=True
            )
            assert await stream.text() == right


class Batches(Repeated):
    """Batches one after another: each line is answered once, and right."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self._gateways = Gateways(urls)

    async def _one(self) -> None:
        lines = "".join(
            msgspec.json.encode(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"model": "stub", "prompt": "x", "max_tokens": 8, "seed": number},
                }
            ).decode()
            + "\n"
            for number in range(LINES)
        )
        file = await self._gateways.ask(
            "POST", "/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}
        )
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await self._gateways.ask("POST", "/v1/batches", json=asked)
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.5)
            batch = await self._gateways.ask("GET", f"/v1/batches/{batch['id']}")
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        text = (await self._gateways.answer("GET", f"/v1/files/{batch['output_file_id']}/content")).text
        found = [msgspec.json.decode(line) for line in text.splitlines()]
        assert sorted(one["custom_id"] for one in found) == sorted(f"line-{number}" for number in range(LINES))
        for one in found:
            seed = int(one["custom_id"].rpartition("-")[2])
            right = bytes(stub_token(seed, position) for position in range(8)).decode()
            assert one["response"]["body"]["choices"][0]["text"] == right


class Gateways:
    """Whichever of them takes requests."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = itertools.cycle(urls)

    async def ask(self, method: str, path: str, **fields: Any) -> Any:
        return (await self.answer(method, path, **fields)).json()

    async def answer(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """Any refusal fails but that a gateway starts or leaves."""
        async with asyncio.timeout(120), httpx.AsyncClient(timeout=60, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await http.request(method, f"{next(self._urls)}{path}", **fields)
                    if answer.status_code != 503:
                        assert answer.status_code == 200, answer.text
                        return answer
                await asyncio.sleep(0.05)


async def store(gateways: Gateways) -> dict[str, str]:
    """One of each kind of what is kept for clients: by its path, what is read there."""
    messages = [{"role": "user", "content": "Hello"}]
    file = await gateways.ask("POST", "/v1/files", files={"file": ("f", "{}\n")}, data={"purpose": "user_data"})
    items = [{"type": "message", **message} for message in messages]
    conversation = await gateways.ask("POST", "/v1/conversations", json={"items": items})
    asked = {"model": "stub", "input": "Hello", "max_output_tokens": 8}
    response = await gateways.ask("POST", "/v1/responses", json=asked)
    chat = await gateways.ask(
        "POST", "/v1/chat/completions", json={"model": "stub", "messages": messages, "max_tokens": 8, "store": True}
    )
    paths = (
        f"/v1/files/{file['id']}/content",
        f"/v1/conversations/{conversation['id']}/items",
        f"/v1/responses/{response['id']}",
        f"/v1/chat/completions/{chat['id']}",
    )
    return {path: (await gateways.answer("GET", path)).text for path in paths}


@contextlib.asynccontextmanager
async def working(urls: list[str]) -> AsyncIterator[tuple[Load, Reader, Batches]]:
    """Short answers, long ones and batches all the time; whatever is wrong with one fails the test."""
    reader, batches = Reader(urls), Batches(urls)
    async with asyncio.TaskGroup() as group, Load(urls, clients=4, patient=True).running() as load:
        tasks = [group.create_task(reader.run()), group.create_task(batches.run())]
        try:
            yield load, reader, batches
        finally:
            for task in tasks:
                task.cancel()


async def test_every_step_of_every_order_fails_no_request(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, previous: str
) -> None:
    async with House(bus, nats_settings, tmp_path) as house:
        house.python = previous
        await house.start_two_of_each()
        gateways = Gateways(house.urls())
        stored = await store(gateways)
        async with working(house.urls()) as (load, reader, batches):
            for mixture, kind in visited(walk(KINDS)):
                if kind == "executor":
                    # An answer then meets one replacement of them, which drains two groups: gateways of before 0.1.0
                    # count these as lost, and give up after three.
                    await reader.one_more()
                await replace(house, kind, new=kind not in mixture, previous=previous)
                await load.more(8)
                if kind == "gateway":
                    stored |= await store(gateways)
                    for path, text in stored.items():
                        assert (await gateways.answer("GET", path)).text == text
            await batches.one_more()  # what was under way in the last mixture comes to its end
        assert '"event": "recovering"' in house.logs("gateway-*.log"), (
            "groups have handed back what they could not finish"
        )


@pytest.mark.parametrize("upgrade", [True, False], ids=["to the new release", "back to the previous one"])
async def test_sessions_keep_their_cache(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, previous: str, upgrade: bool
) -> None:
    model = make_served_model(tmp_path / "model")
    executor = (*RING, "--model", str(model), "--kv-memory", str(64 << 20))
    async with House(bus, nats_settings, tmp_path) as house, httpx.AsyncClient(timeout=60) as http:
        house.python = previous if upgrade else ""
        await house.start_two_of_each(executor, MODEL)
        urls = house.urls()
        quiet = [Client(http, urls, f"quiet-{number}") for number in range(12)]
        for _ in range(3):
            await asyncio.gather(*(client.turn() for client in quiet))
        async with talking(http, urls, clients=3):
            for kind in KINDS:
                await replace(house, kind, new=upgrade, previous=previous)
        for client in quiet:
            client.cached = client.reusable = 0
            await client.turn()
        hits = sum(client.cached for client in quiet) / sum(client.reusable for client in quiet)
        assert hits > 0.95, f"{hits:.1%}"


async def test_fine_tuning_goes_on_to_the_same_adapter(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, previous: str
) -> None:
    """Monitor, scheduler and both executors, one at a time, there and back, while a job trains."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(bus, nats_settings, tmp_path, stack)
        generation = itertools.count()

        async def begin(kind: str, *, new: bool) -> str:
            cluster.python = "" if new else previous
            name = f"{kind}-{next(generation)}"
            if kind == "host":
                await cluster.executor(name, step_ms=20)
            else:
                gone = ("--gone-after", "2") if kind == "monitor" else ()
                await cluster.begin(name, f"services.{'health_monitor' if kind == 'monitor' else kind}", *gone)
            return name

        running = {
            kind: await begin(kind.rstrip("01"), new=False) for kind in ("monitor", "scheduler", "host0", "host1")
        }
        await cluster.submit("calm", examples=200)
        calm = await cluster.until("calm", lambda job: job.result is not None)
        await cluster.submit("moved", examples=1200)
        await cluster.until("moved", lambda job: job.state is not None)
        for new in (True, False):
            for kind in running:
                before = await cluster.job("moved")
                assert await cluster.processes[running[kind]].end() == 0
                running[kind] = await begin(kind.rstrip("01"), new=new)
                await cluster.until("moved", lambda job, before=before: job.result is not None or _further(job, before))
        moved = await cluster.until("moved", lambda job: job.result is not None)
        await cluster.submit("undisturbed", examples=1200)
        undisturbed = await cluster.until("undisturbed", lambda job: job.result is not None)
        assert calm.result is not None
        assert moved.result is not None
        assert undisturbed.result is not None
        assert moved.result.digest == undisturbed.result.digest


def _further(job: Any, before: Any) -> bool:
    """Whether it has stored a later state than `before`."""
    return job.state is not None and (before.state is None or job.state.step > before.state.step)
