"""What the manifests say, done: NATS with its very files, services with their very variables, probes as they are set.

Only addresses are others, for pods have a network each; and the stub computes, since models are fetched elsewhere.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from k8s import passwords
from services.cli.serve import MODULES
from services.cli.supervision.nats_server import find_binary
from shared.config import CommonSettings
from shared.nats.bus import Bus
from shared.process import die_with_parent
from tests.processes import ServiceProcess, service_process
from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import Pod, environment

BUILD = "overlays/cpu"
ELSEWHERE = {
    "RYZANSTEIN_HOST": "127.0.0.1",
    "RYZANSTEIN_PORT": "0",
    "RYZANSTEIN_GRPC_PORT": "0",
    "RYZANSTEIN_OPS_PORT": "0",
    "RYZANSTEIN_HANDOVER_PORT": "0",
    "RYZANSTEIN_MODEL": "",
    "RYZANSTEIN_ENGINE": "stub",
    "RYZANSTEIN_DRAIN_DELAY": "0",  # nobody balances any load here
}
SECRET = passwords.passwords()


@dataclass
class Nats:
    """The server of the manifests, and how it is reached."""

    process: asyncio.subprocess.Process
    url: str
    monitoring: str

    def settings(self, user: str) -> CommonSettings:
        return CommonSettings(
            nats_url=self.url, nats_user=user, nats_password=SecretStr(SECRET[user]), beat_interval=0.1
        )


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[Nats]:
    build = manifests.build(BUILD)
    pod = build.component("nats")
    config = _files(pod, tmp_path)
    given = {
        entry["name"]: SECRET[entry["valueFrom"]["secretKeyRef"]["key"]]
        for entry in pod.main["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    with (tmp_path / "nats.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            find_binary(), "-c", config, env={**given, "POD_NAME": "nats-0"}, stderr=log, preexec_fn=die_with_parent()
        )
    try:
        ports = await _ports(tmp_path / f"nats-server_{process.pid}.ports")
        yield Nats(process, ports["nats"][0], ports["monitoring"][0])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _files(pod: Pod, directory: Path) -> Path:
    """The files of NATS' ConfigMap, on loopback and below `directory`."""
    (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "config"]
    for name, text in manifests.build(BUILD).get("ConfigMap", volume["configMap"]["name"])["data"].items():
        for there, here in {
            "0.0.0.0:4222": "127.0.0.1:-1",
            "http_port: 8222": 'http: "127.0.0.1:-1"',
            "/data/": f"{directory}/",
            "/var/run/nats/": f"{directory}/",
        }.items():
            text = text.replace(there, here)
        (directory / name).write_text(text)
    main = directory / "nats.conf"
    main.write_text(f'{main.read_text()}\nports_file_dir: "{directory}"\n')
    return main


async def _ports(path: Path) -> dict[str, list[str]]:
    async with asyncio.timeout(20):
        while (ports := _read(path)) is None:  # noqa: ASYNC110  # it is another process
            await asyncio.sleep(0.02)
    return ports


def _read(path: Path) -> dict[str, list[str]] | None:
    """None: not there yet, or half written."""
    try:
        ports: dict[str, list[str]] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return ports


@pytest.fixture
async def house(nats: Nats, tmp_path: Path) -> AsyncIterator[dict[str, ServiceProcess]]:
    """Each service as its pod would run it, ready."""
    build = manifests.build(BUILD)
    async with AsyncExitStack() as stack:
        bus = await Bus.connect(nats.settings("operator"), "test")
        stack.push_async_callback(bus.close)
        services: dict[str, ServiceProcess] = {}
        for pod in build.pods():
            if pod.component == "nats":
                continue
            program, serve, service = pod.main["command"]
            assert (program, serve) == ("ryzanstein", "serve")
            variables = {key: value for key, value in environment(build, pod.main).items() if value}
            user = variables["RYZANSTEIN_NATS_USER"]
            variables |= ELSEWHERE | {"HOME": os.environ.get("HOME", "/tmp"), "RYZANSTEIN_THREADS": "1"}
            services[pod.component] = await stack.enter_async_context(
                service_process(
                    bus, nats.settings(user), MODULES[service], tmp_path, instance=f"{pod}-0", variables=variables
                )
            )
        for process in services.values():
            await process.wait_ready()
        yield services


async def probe(http: httpx.AsyncClient, process: ServiceProcess, pod: Pod, kind: str) -> int:
    path = pod.main[f"{kind}Probe"]["httpGet"]["path"]
    return (await http.get(f"http://{process.beats[-1].address}{path}")).status_code


async def until(http: httpx.AsyncClient, house: dict[str, ServiceProcess], kind: str, status: int) -> None:
    """Returns once that probe of each service has that answer."""
    build = manifests.build(BUILD)
    async with asyncio.timeout(60):
        for name, process in house.items():
            pod = build.component(name)
            while await probe(http, process, pod, kind) != status:  # noqa: ASYNC110  # it does not tell
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_pods_start_answer_their_probes_and_leave_in_good_order(
    nats: Nats, house: dict[str, ServiceProcess]
) -> None:
    build = manifests.build(BUILD)
    pod = build.component("nats")
    async with httpx.AsyncClient() as http:
        for kind in ("startup", "liveness", "readiness"):
            path = pod.main[f"{kind}Probe"]["httpGet"]["path"]
            assert (await http.get(f"{nats.monitoring}{path}")).status_code == 200
            await until(http, house, kind, 200)
        answer = await http.get(f"http://{house['gateway'].beats[-1].address}/v1/models")
        assert answer.status_code == 401, "no key has been made yet"
    for process in house.values():
        assert await process.end() == 0, process.log.read_text()
        assert "permissions violation" not in process.log.read_text().lower()


async def test_nobody_is_killed_because_nats_is_away(nats: Nats, house: dict[str, ServiceProcess]) -> None:
    build = manifests.build(BUILD)
    nats.process.send_signal(signal.SIGKILL)
    await nats.process.wait()
    async with httpx.AsyncClient() as http:
        await until(http, house, "readiness", 503)
        for name, process in house.items():
            assert await probe(http, process, build.component(name), "liveness") == 200
            assert process.process.returncode is None
