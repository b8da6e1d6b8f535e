"""A real Prometheus on loopback that scrapes what a test runs, and evaluates rules."""

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.peers.servers import free_port
from shared.process import die_with_parent
from tests.alerts.rules import Document

START_TIMEOUT = 30.0
POLL = 0.1
"""Seconds between two looks at what a condition waits for."""
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


class Prometheus:
    """Use as an asynchronous context manager. `targets` is asked again and again: services come and go."""

    def __init__(
        self,
        directory: Path,
        rules: Document,
        targets: Callable[[], Iterable[Target]],
        *,
        interval: float = 5.0,
    ) -> None:
        """`interval`: seconds between two scrapes of a target."""
        self._program = need("prometheus")
        self._directory = directory
        self._rules = rules
        self._targets = targets
        self._interval = f"{round(interval * 1000)}ms"
        self.url = f"http://127.0.0.1:{free_port()}"
        self._http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=10)
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Prometheus":
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "rules.yml").write_text(yaml.safe_dump(self._rules, sort_keys=False))
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(self._configuration()))
        self._write(())
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._http.aclose()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()

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

    async def _start(self) -> None:
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._program,
                f"--config.file={self._directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        await self.until(self._ready, START_TIMEOUT, "Prometheus is ready")

    async def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, (self._directory / "prometheus.log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return (await self._http.get("/-/ready")).status_code == 200
        return False

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
        found = await self.query(
            f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{window}]))'
        )
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
