"""A stack on the stub engine with clients, and a Prometheus that watches it."""

import asyncio
import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from services.cli.target import read_run_file
from shared.config import CommonSettings, load_settings
from shared.messages import ServiceRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.e2e.stack import Stack
from tests.monitoring.prometheus import Prometheus, until
from tests.prometheus import PROMETHEUS, scraping, serving

JOBS = ("ryzanstein-gateway", "ryzanstein-scheduler", "ryzanstein-health-monitor", "ryzanstein-executor")
RULES = Path(__file__).parents[2] / "monitoring" / "rules"
MODEL = "stub"


class Observed(NamedTuple):
    stack: Stack
    targets: dict[str, list[str]]  # addresses by job
    prometheus: Prometheus | None

    def metrics(self, job: str) -> list[str]:
        """What each instance of a service answers on /metrics now."""
        return [httpx.get(f"http://{target}/metrics", trust_env=False, timeout=20).text for target in self.targets[job]]


@contextlib.contextmanager
def observed(directory: Path, *arguments: str, step_ms: float = 5, scrape: float = 1) -> Iterator[Observed]:
    """`arguments` for `ryzanstein up`; scraped every `scrape` seconds, where there is a Prometheus."""
    given = ("--engine", "stub", "--no-smoke-test", "--grpc-port", "0", *arguments)
    environment = {"RYZANSTEIN_STUB_STEP_MS": str(step_ms), "RYZANSTEIN_STUB_BLOCKS": "2048"}
    with Stack(directory / "stack", *given, **environment) as stack:
        targets = asyncio.run(targets_of(stack))
        if PROMETHEUS is None:
            yield Observed(stack, targets, None)
            return
        rules = {"rule_files": [str(path) for path in sorted(RULES.glob("*.yml"))]}
        with (
            serving(directory, {**scraping(targets, scrape), **rules}) as url,
            contextlib.closing(Prometheus(url)) as prometheus,
        ):
            until(lambda: _all_up(prometheus, targets), 60)
            yield Observed(stack, targets, prometheus)


def _all_up(prometheus: Prometheus, targets: dict[str, list[str]]) -> bool:
    up = [target for target in prometheus.targets() if target["health"] == "up"]
    return len(up) == sum(map(len, targets.values()))


async def targets_of(stack: Stack) -> dict[str, list[str]]:
    """Addresses of the services' /metrics, by job, once all have said theirs."""
    note = read_run_file(stack.data_dir)
    assert note is not None
    login = {"nats_url": note.nats_url, "nats_user": note.nats_user, "nats_password": note.nats_password}
    bus = await Bus.connect(load_settings(CommonSettings, **login), "test")
    try:
        bucket = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        async with asyncio.timeout(60):
            while True:
                targets: dict[str, list[str]] = {job: [] for job in JOBS}
                for record in (await bucket.items()).values():
                    if record.address and record.state == "ready":
                        targets[f"ryzanstein-{record.name}"].append(record.address)
                if all(targets.values()):
                    return targets
                await asyncio.sleep(0.1)
    finally:
        await bus.close()


class Traffic:
    """Clients of all kinds: streams and whole answers, conversations, batches, and some who are wrong."""

    def __init__(self, url: str, clients: int = 4, *, pause: float = 0.0) -> None:
        """`pause`: seconds on average between two requests of a client."""
        self._url = url
        self._pause = pause
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(clients)]
        self.answers = 0
        self.errors: list[str] = []

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors[:3]

    def _client(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(base_url=self._url, trust_env=False, timeout=60) as http:
            while not self._stopping.wait(chance.expovariate(1 / self._pause) if self._pause else 0):
                try:
                    self._ask(http, next(self._numbers), chance)
                    self.answers += 1
                except (httpx.HTTPError, AssertionError) as error:
                    self.errors.append(repr(error))

    def _ask(self, http: httpx.Client, number: int, chance: random.Random) -> None:
        if number % 25 == 24:
            body = {"model": f"made-up-{number}", "prompt": "x"}
            assert http.post("/v1/completions", json=body).status_code == 404
        elif number == 0:
            submit_batch(http, lines=20)
        elif number % 10 == 5:
            body = {"model": MODEL, "prompt": "once"}
            for _ in range(2):
                again = {"idempotency-key": f"key-{number}"}
                assert http.post("/v1/completions", json=body, headers=again).status_code == 200
        elif number % 3:
            talk = [{"role": "user", "content": f"Story {number % 5}: " + "tell me more of it, " * 12}]
            body = {"model": MODEL, "messages": talk, "max_tokens": chance.randint(4, 24), "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for _ in response.iter_lines():
                    pass
        else:
            body = {"model": MODEL, "prompt": f"number {number} " * 4, "max_tokens": chance.randint(2, 16)}
            assert http.post("/v1/completions", json=body).status_code == 200


def submit_batch(http: httpx.Client, lines: int) -> None:
    """A batch job of completions."""
    body = {"model": MODEL, "prompt": "a line", "max_tokens": 8}
    content = "".join(
        json.dumps({"custom_id": str(line), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
        for line in range(lines)
    )
    stored = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
    assert stored.status_code == 200, stored.text
    wanted = {"input_file_id": stored.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = http.post("/v1/batches", json=wanted)
    assert made.status_code == 200, made.text


def seconds_until_shown(observed: Observed, expr: str, before: float, patience: float = 30) -> float:
    """How long it takes from now until the value of `expr` is above `before`."""
    began = time.monotonic()
    prometheus = observed.prometheus
    assert prometheus is not None

    def shown() -> bool:
        return any(float(sample["value"][1]) > before for sample in prometheus.query(expr))

    until(shown, patience, 0.05)
    return time.monotonic() - began
