"""A Prometheus that scrapes what a test runs, whatever comes and goes, and evaluates rules."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.alerts.rules import Document
from tests.prometheus import serving

POLL = 0.1  # seconds between two looks at what a condition waits for
JOBS = ("ryzanstein-gateway", "ryzanstein-scheduler", "ryzanstein-health-monitor", "ryzanstein-executor")


@dataclass(frozen=True, order=True)
class Target:
    """Something with /metrics. `instance` is its label, which a restart does not change, as with a pod's address."""

    job: str
    instance: str
    address: str
    scheme: str = "http"


def need(program: str) -> str:
    """The program's path; the test is skipped, and says so, where there is none."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed here; Debian's package prometheus has it")
    return found


async def stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Prometheus:
    """Use as an asynchronous context manager. `targets` is asked again and again: services come and go."""

    def __init__(
        self, directory: Path, rules: Document, targets: Callable[[], Iterable[Target]], *, interval: float = 5.0
    ) -> None:
        """`interval`: seconds between two scrapes of a target."""
        need("prometheus")
        self._directory = directory
        self._rules = rules
        self._targets = targets
        self._interval = f"{round(interval * 1000)}ms"
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Prometheus":
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "rules.yml").write_text(yaml.safe_dump(self._rules, sort_keys=False))
        self._write(())
        async with self._stack as stack:
            server = serving(self._directory, self._configuration())
            self.url = await asyncio.to_thread(stack.enter_context, server)
            client = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=10)
            self._http = await stack.enter_async_context(client)
            stack.push_async_callback(stop, asyncio.create_task(self._follow()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _configuration(self) -> dict[str, Any]:
        return {
            "global": {"scrape_interval": self._interval, "scrape_timeout": self._interval},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": job,
                    "tls_config": {"insecure_skip_verify": True},
                    "file_sd_configs": [{"files": [f"{job}.json"], "refresh_interval": "1s"}],
                }
                for job in JOBS
            ],
        }

    async def _follow(self) -> None:
        told: tuple[Target, ...] = ()
        while True:
            targets = tuple(sorted(self._targets()))
            if targets != told:
                self._write(targets)
                told = targets
            await asyncio.sleep(POLL)

    def _write(self, targets: Iterable[Target]) -> None:
        """What it reads changes at once: a file half written would be no targets."""
        for job in JOBS:
            entries = [
                {"targets": [one.address], "labels": {"instance": one.instance, "__scheme__": one.scheme}}
                for one in targets
                if one.job == job
            ]
            fresh = self._directory / f"{job}.new"
            fresh.write_text(json.dumps(entries))
            fresh.replace(self._directory / f"{job}.json")

    # --- what tests ask --------------------------------------------------------------------------

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant vector."""
        answer = (await self._http.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def alerts(self) -> list[dict[str, Any]]:
        """Those that are firing."""
        answer = (await self._http.get("/api/v1/alerts")).json()
        return [alert for alert in answer["data"]["alerts"] if alert["state"] == "firing"]

    async def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in await self.alerts()}

    async def fired_within(self, seconds: float) -> set[str]:
        window = f"{round(seconds * 1000)}ms"
        found = await self.query(f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{window}]))')
        return {sample["metric"]["alertname"] for sample in found}

    async def until_firing(self, name: str, seconds: float) -> dict[str, Any]:
        """The alert, once it fires."""

        async def look() -> dict[str, Any] | None:
            return next((one for one in await self.alerts() if one["labels"]["alertname"] == name), None)

        found = await self.until(look, seconds, f"{name} fires")
        assert isinstance(found, dict)
        return found

    async def until_over(self, name: str, seconds: float) -> None:
        async def look() -> bool:
            return name not in await self.firing()

        await self.until(look, seconds, f"{name} is over")

    async def until_seen(self, expression: str, seconds: float = 30) -> None:
        """Until an expression has a sample."""

        async def look() -> bool:
            return bool(await self.query(expression))

        await self.until(look, seconds, f"{expression} is true")

    async def until(self, find: Callable[[], Any], seconds: float, what: str) -> object:
        """What `find` returns, once that is something true."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if found := await find():
                        return found
                    await asyncio.sleep(POLL)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {seconds:g} s") from None
