"""A real Prometheus (Debian's package, or any binary on the path) on a free port of loopback."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.peers.servers import free_port
from shared.process import die_with_parent

PROMETHEUS = shutil.which("prometheus")  # its program; None: there is none here
START_TIMEOUT = 60.0
POLL = 0.05


@contextlib.contextmanager
def serving(directory: Path, configuration: Mapping[str, Any]) -> Iterator[str]:
    """Its address, from when it is ready until the block ends. Keeps its files in `directory`."""
    assert PROMETHEUS is not None
    written, log = directory / "prometheus.yml", directory / "prometheus.log"
    written.write_text(yaml.safe_dump(dict(configuration)))
    address = f"127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={written}",
                f"--storage.tsdb.path={directory / 'prometheus'}",
                f"--web.listen-address={address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(),
        )
    try:
        give_up = time.monotonic() + START_TIMEOUT
        while not _ready(f"http://{address}"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, f"not ready within {START_TIMEOUT:g} s: {log.read_text()}"
            time.sleep(POLL)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def scraping(jobs: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Any]:
    """A configuration: the addresses of each job, every `seconds`."""
    often = f"{seconds:g}s"
    return {
        "global": {"scrape_interval": often, "scrape_timeout": often, "evaluation_interval": often},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    return False
