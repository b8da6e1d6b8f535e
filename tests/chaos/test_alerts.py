"""Every alert is fired once by a fault, with the real rules in a real Prometheus; a busy house fires none.

Windows and `for` are `FACTOR` times as short as an operator's (`alerting.py`); expressions and thresholds are the
real ones.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from shared.messages import ControlReply, Drain
from shared.nats import subjects
from tests.alerts.prometheus import need
from tests.alerts.rules import PENDING
from tests.chaos.alerting import askers, fires, hang, kill, signal_if_there, signal_ranks, start, watched
from tests.chaos.broker import full_store
from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.conftest import Loader
from tests.chaos.expected import stub_tasks
from tests.chaos.faults import group_of
from tests.chaos.load import Load
from tests.chaos.mischief import DeafToBatches

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600), pytest.mark.slow]
STUB = ["--engine", "stub", "--served-model-name", "stub", "--stub-step-ms"]
BUSY = 40.0  # seconds of load in which nothing may be alerted: 8 minutes of an operator's time


@pytest.fixture(autouse=True)
def _prometheus() -> None:
    """Skipped before anything is started where there is none."""
    need("prometheus")


@pytest.mark.nightly
async def test_a_few_faults_are_alerted_and_over_when_they_are(tmp_path: Path) -> None:
    """The part that runs with all other tests."""
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1)
    async with House(tmp_path / "house", plan) as house, watched(house, tmp_path / "prometheus", factor=30) as seen:
        await seen.until_seen("sum(ryzanstein_service_ready) == 4")
        await kill(house, "scheduler-0")
        await fires(seen, "RyzansteinNoScheduler", severity="page")
        await fires(seen, "RyzansteinInstanceDown", instance="scheduler-0", severity="ticket")
        assert "RyzansteinNoGateway" not in await seen.firing()
        await start(house, "scheduler-0")
        await seen.until_over("RyzansteinNoScheduler", 30)
        await house.broker.kill()
        await fires(seen, "RyzansteinBrokerUnreachable", severity="page")
        await house.broker.up()
        await seen.until_over("RyzansteinBrokerUnreachable", 30)


@pytest.mark.chaos
async def test_processes_that_are_away(tmp_path: Path, load: Loader) -> None:
    async with House(tmp_path / "house") as house, watched(house, tmp_path / "prometheus") as seen:
        async with load(house) as clients:
            await clients.flowing()
            await seen.until_seen("sum(ryzanstein_service_ready) == 8 unless count(ALERTS) > 0")
            await asyncio.sleep(BUSY)
            assert await seen.fired_within(BUSY) == set()
            for _ in range(3):
                await kill(house, "gateway-1")
                await start(house, "gateway-1")
                await seen.until_seen('ryzanstein_service_ready{instance="gateway-1"} == 1')
            await fires(seen, "RyzansteinInstanceRestarting", instance="gateway-1")
            for service, name in (
                ("gateway", "RyzansteinNoGateway"),
                ("scheduler", "RyzansteinNoScheduler"),
                ("health-monitor", "RyzansteinNoHealthMonitor"),
            ):
                await kill(house, f"{service}-0", f"{service}-1")
                await fires(seen, name)
                await fires(seen, "RyzansteinInstanceDown", job=f"ryzanstein-{service}")
                await start(house, f"{service}-0", f"{service}-1")
                await seen.until_over(name, 30)
                await seen.until_over("RyzansteinInstanceDown", 30)
            if not PENDING:
                async with askers(house):  # of what is asked for now there is no record yet
                    house.broker.signal(signal.SIGSTOP)
                    await fires(seen, "RyzansteinJournalLag")
                    house.broker.signal(signal.SIGCONT)
                await seen.until_over("RyzansteinJournalLag", 60)
            async with askers(house):
                await house.broker.kill()
                await fires(seen, "RyzansteinBrokerUnreachable")
                await fires(seen, "RyzansteinRequestsFailing")
                await fires(seen, "RyzansteinErrorBudgetBurn")
                await house.broker.up()
            for name in ("RyzansteinBrokerUnreachable", "RyzansteinRequestsFailing"):
                await seen.until_over(name, 60)
            await clients.finish()
        clients.check(may_refuse=True)


@pytest.mark.chaos
async def test_groups_that_are_lost(tmp_path: Path, load: Loader) -> None:
    executors = ("executor-0", "executor-1")
    # A storm costs a request more groups than it may lose by default.
    plan = Plan(environment={"RYZANSTEIN_RECOVERY_ATTEMPTS": "1000"})
    async with House(tmp_path / "house", plan) as house, watched(house, tmp_path / "prometheus") as seen:
        async with load(house) as clients:
            await clients.flowing()
            async with _meanwhile(_lose_ranks(house)):
                await fires(seen, "RyzansteinRingRestarting", job="ryzanstein-executor")
            await house.all_ready()
            async with _meanwhile(_stall_executors(house)):
                await fires(seen, "RyzansteinRecoveryStorm", 180)
            for name in executors:
                signal_ranks(house, name, signal.SIGCONT)
                house.members[name].signal(signal.SIGCONT)
            await house.all_ready()
            await kill(house, "executor-1")
            await fires(seen, "RyzansteinGroupLost", group="group-1")
            await kill(house, "executor-0")
            await fires(seen, "RyzansteinModelWithoutGroup")
            await start(house, "executor-0", "executor-1")
            await seen.until_over("RyzansteinGroupLost", 30)
            await seen.until_over("RyzansteinModelWithoutGroup", 30)
            await clients.finish()
        clients.check(may_refuse=True)
        await house.watch.until(lambda: not any(map(house.work, executors)), 30, "nobody has work")
        async with Load(house.addresses, stub_tasks(random.Random(), 7000), clients=1):
            await house.watch.until(lambda: any(map(house.work, executors)), 30, "one has work")
            group = group_of(next(name for name in executors if house.work(name)))
            await _drain(house, group, 600.0)
            await fires(seen, "RyzansteinDrainSlow", group=group)
            await _drain(house, group, 0.0)  # what the runbook says
        await seen.until_over("RyzansteinDrainSlow", 60)


async def _drain(house: House, group: str, grace: float) -> None:
    reply = await house.bus.request(subjects.control(group), Drain(grace), ControlReply, timeout=5)
    assert reply.ok, reply


@contextlib.asynccontextmanager
async def _meanwhile(mischief: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Goes on with `mischief` within the context; a fault of it is one of the test."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(mischief)
        yield
        task.cancel()


async def _stall_executors(house: House) -> None:
    """One after the other, for ever: stopped until it counts as gone, then woken, and the next one."""
    while True:
        for name in ("executor-0", "executor-1"):
            await house.watch.until(house.all_work, 60, "every ring has work")
            at = time.monotonic()
            house.members[name].signal(signal.SIGSTOP)
            signal_ranks(house, name, signal.SIGSTOP)
            await house.watch.down(group_of(name), at)
            signal_ranks(house, name, signal.SIGCONT)
            house.members[name].signal(signal.SIGCONT)
            await house.watch.up(group_of(name), at)


async def _lose_ranks(house: House) -> None:
    """A rank of one ring after the other, for ever; their executors pause for longer each time."""
    while True:
        for name in ("executor-0", "executor-1"):
            await house.watch.until(house.all_work, 60, "every ring has work")
            signal_if_there(house.ranks(name)[0], signal.SIGKILL)
            epoch = house.epoch(name)
            await house.watch.until(lambda of=name, old=epoch: house.epoch(of) > old, 60, f"{name} is anew")
            await house.ready(name)


@pytest.mark.chaos
async def test_rings_that_hang_crawl_or_do_not_hear(tmp_path: Path, load: Loader) -> None:
    """The executor is told to wait for ten minutes, so that only the monitor sees the hang."""
    deaf = DeafToBatches()
    plan = Plan(executor_arguments=[*STUB, "20", "--hung-after", "600"], mischief={"executor-1": deaf})
    async with House(tmp_path / "house", plan) as house, watched(house, tmp_path / "prometheus") as seen:
        async with load(house) as clients:
            await clients.flowing()
            # What is usual must be known before something is slow.
            await seen.until_seen("min(ryzanstein_executor_step_seconds_total) > 15", 120)
            leader = house.ranks("executor-0")[0]
            crawl = asyncio.create_task(_crawl(leader))
            await fires(seen, "RyzansteinGroupSlow", group="group-0")
            crawl.cancel()
            await asyncio.gather(crawl, return_exceptions=True)
            signal_if_there(leader, signal.SIGCONT)
            await seen.until_over("RyzansteinGroupSlow", 60)
            deaf.on = True
            await fires(seen, "RyzansteinBreakerOpen", group="group-1")
            deaf.on = False
            await seen.until_over("RyzansteinBreakerOpen", 60)
            await house.watch.until(house.all_work, 60, "every ring has work")
            await hang(house, "executor-0")
            await fires(seen, "RyzansteinGroupHung", group="group-0")
            signal_ranks(house, "executor-0", signal.SIGCONT)
            await seen.until_over("RyzansteinGroupHung", 60)
            await clients.finish()
        clients.check()


async def _crawl(pid: int) -> None:
    """A process that runs a fifth of the time."""
    while True:
        signal_if_there(pid, signal.SIGSTOP)
        await asyncio.sleep(0.08)
        signal_if_there(pid, signal.SIGCONT)
        await asyncio.sleep(0.02)


@pytest.mark.chaos
async def test_more_load_than_places(tmp_path: Path) -> None:
    """Two places, and a step takes half a second: what comes must wait, and first tokens are late."""
    stub = [*STUB, "500", "--max-sequences", "2"]
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1, executor_arguments=stub)
    async with (
        House(tmp_path / "house", plan) as house,
        watched(house, tmp_path / "prometheus") as seen,
        Load(house.addresses, stub_tasks(random.Random(), 6), clients=60),
    ):
        await fires(seen, "RyzansteinQueueLong")
        await fires(seen, "RyzansteinFirstTokenBudgetBurn")


@pytest.mark.chaos
async def test_a_kv_cache_that_is_too_small(tmp_path: Path) -> None:
    stub = [*STUB, "10", "--stub-blocks", "40"]
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1, executor_arguments=stub)
    async with (
        House(tmp_path / "house", plan) as house,
        watched(house, tmp_path / "prometheus") as seen,
        Load(house.addresses, stub_tasks(random.Random(), 300)),
    ):
        await fires(seen, "RyzansteinKvCacheExhausted", instance="executor-0")


@pytest.mark.chaos
async def test_a_batch_that_nobody_computes(tmp_path: Path) -> None:
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1)
    async with House(tmp_path / "house", plan) as house, watched(house, tmp_path / "prometheus") as seen:
        ((_, address),) = house.addresses()
        line = '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"stub","prompt":"x"}}\n'
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=30) as http:
            files = {"file": ("input.jsonl", line.encode())}
            sent = (await http.post("/v1/files", data={"purpose": "batch"}, files=files)).raise_for_status()
            await kill(house, "executor-0")
            body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            (await http.post("/v1/batches", json=body)).raise_for_status()
        await fires(seen, "RyzansteinBatchesStuck")
        await start(house, "executor-0")
        await seen.until_over("RyzansteinBatchesStuck", 60)


@pytest.mark.chaos
async def test_a_store_without_room(tmp_path: Path, load: Loader) -> None:
    async with (
        House(tmp_path / "house", Plan(store="quota")) as house,
        watched(house, tmp_path / "prometheus") as seen,
        load(house) as clients,
    ):
        await clients.flowing()
        async with full_store(house.bus):
            await fires(seen, "RyzansteinStoreFailing")
            await fires(seen, "RyzansteinRequestsFailing")
        await seen.until_over("RyzansteinStoreFailing", 60)
        await clients.finish()
    clients.check(may_refuse=True)


@pytest.mark.chaos
async def test_wrong_keys_and_a_certificate_that_ends_soon(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=5))
    certificate, key = tmp_path / "gateway.pem", tmp_path / "gateway.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    environment = {
        "RYZANSTEIN_TLS_CERTIFICATE": str(certificate),
        "RYZANSTEIN_TLS_KEY": str(key),
        "RYZANSTEIN_REQUIRE_KEY": "true",
    }
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=1, tp=1, environment=environment)
    async with (
        House(tmp_path / "house", plan) as house,
        watched(house, tmp_path / "prometheus", scheme="https") as seen,
        httpx.AsyncClient(verify=False, trust_env=False) as http,
    ):
        ((_, address),) = house.addresses()
        await fires(seen, "RyzansteinCertificateExpiring", instance="gateway-0")

        async def knock() -> bool:
            assert (await http.get(f"https://{address}/v1/models")).status_code == 401
            return "RyzansteinRefusalSurge" in await seen.firing()

        await seen.until(knock, 60, "RyzansteinRefusalSurge fires")
        await fires(seen, "RyzansteinRefusalSurge", status="401")
