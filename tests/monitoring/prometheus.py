"""A real Prometheus (Debian's package, or any binary on the path) on a free port, and what one asks it."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.servers import free_port
from shared.process import die_with_parent

SCRAPE = 1
"""Seconds between two scrapes."""


def binary(name: str = "prometheus") -> str | None:
    return shutil.which(name)


class Prometheus:
    """Asked through its HTTP API. Raises AssertionError with its words where it finds fault with a query."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def query(self, expr: str) -> list[Any]:
        """What there is now."""
        return list(self.asked("/api/v1/query", query=expr)["result"])

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Any]:
        given = {"query": expr, "start": str(start), "end": str(end), "step": str(step)}
        return list(self.asked("/api/v1/query_range", **given)["result"])

    def label_values(self, metric: str, label: str) -> list[str]:
        now = time.time()
        path = f"/api/v1/label/{label}/values"
        return list(self.asked(path, **{"match[]": metric, "start": str(now - 60), "end": str(now + 1)}))

    def targets(self) -> list[Any]:
        return list(self.asked("/api/v1/targets")["activeTargets"])

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == 200
        return False

    def close(self) -> None:
        self._http.close()

    def asked(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        assert not answer.get("warnings"), answer["warnings"]
        return answer["data"]


@contextlib.contextmanager
def running(
    program: str,
    directory: Path,
    jobs: Mapping[str, Sequence[str]],
    rules: Sequence[Path] = (),
    scrape: float = SCRAPE,
) -> Iterator[Prometheus]:
    """Scrapes the addresses of each job every `scrape` seconds, until the block ends."""
    lines = [
        "global:",
        f"  scrape_interval: {scrape:g}s",
        f"  scrape_timeout: {scrape:g}s",
        f"  evaluation_interval: {scrape:g}s",
        f"rule_files: [{', '.join(map(str, rules))}]",
        "scrape_configs:",
    ]
    for job, targets in jobs.items():
        lines += [f"  - job_name: {job}", "    static_configs:", f"      - targets: [{', '.join(targets)}]"]
    configuration = directory / "prometheus.yml"
    configuration.write_text("\n".join(lines) + "\n")
    address = f"127.0.0.1:{free_port()}"
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(),
        )
    prometheus = Prometheus(f"http://{address}")
    try:
        until(lambda: prometheus.ready() or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(20)


def until(condition: Any, seconds: float, pause: float = 0.1) -> None:
    """Returns once `condition()` is true. Raises AssertionError after `seconds`."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds:g} s"
        time.sleep(pause)
