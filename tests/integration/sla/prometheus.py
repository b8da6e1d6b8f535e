"""A real Prometheus that scrapes what a test has started."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx

from shared.process import die_with_parent
from tests.integration.gateway.fake_ring import until

PROMETHEUS = shutil.which("prometheus")
"""Its program; None: there is none here (Debian's package prometheus)."""


@contextlib.asynccontextmanager
async def prometheus(directory: Path, jobs: Mapping[str, list[str]], port: int) -> AsyncIterator[str]:
    """Its address, once it has scraped everything; `jobs`: what it scrapes every second, by the job's name."""
    assert PROMETHEUS is not None
    lines = ["global: {scrape_interval: 1s, scrape_timeout: 1s}", "scrape_configs:"]
    for job, targets in jobs.items():
        lines += [f"- job_name: {job}", f"  static_configs: [{{targets: {targets}}}]"]
    config = directory / "prometheus.yml"
    config.write_text("\n".join(lines) + "\n")
    url = f"http://127.0.0.1:{port}"
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:

            async def scraped() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return await value(http, "sum(up)") == sum(map(len, jobs.values()))
                return False

            await until(scraped, 60)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def value(http: httpx.AsyncClient, query: str) -> float | None:
    """What an expression is now; None: nothing."""
    answer = await http.get("/api/v1/query", params={"query": query})
    if answer.status_code != 200:
        return None
    found = answer.json()["data"]["result"]
    return float(found[0]["value"][1]) if found else None
