"""The local stack: NATS and every service as a process of its own, started, watched and stopped.

NATS ─▶ health monitor, scheduler, gateway, executors ─▶ all ready ─▶ ... ─▶ stopped in this order:
gateway (takes nothing more), scheduler, executors (finish what runs), health monitor, NATS
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from pydantic import SecretStr

from services.cli.nats_server import LocalNats
from shared import subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.messages import Heartbeat
from shared.process import die_with_parent

STOP_ORDER = ("gateway", "scheduler", "executor", "health-monitor")
MODULES = {
    "gateway": "services.gateway",
    "scheduler": "services.scheduler",
    "executor": "services.executor",
    "health-monitor": "services.health_monitor",
}
STOP_GRACE = 30.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0
STABLE_AFTER = 60.0


class StackPlan(msgspec.Struct, frozen=True):
    """What to start."""

    data_dir: Path
    model: str
    """Directory of the model, or empty with the stub engine."""
    served_model_name: str
    host: str
    port: int
    tp: int
    replicas: int
    dtype: str
    engine: str = "torch"
    nats: CommonSettings | None = None
    """An existing NATS to use; None: start one."""
    environment: dict[str, str] = {}
    """More settings for the services, as environment variables."""


class Child:
    """One service process: started with its settings in the environment, its output in a log file."""

    def __init__(self, service: str, instance: str, arguments: list[str], log: Path) -> None:
        self.service = service
        self.instance = instance
        self.log = log
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        assert self._process is not None
        return self._process.returncode

    async def start(self, environment: dict[str, str]) -> None:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[self.service],
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, "RYZANSTEIN_INSTANCE": self.instance},
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the others in order
                preexec_fn=die_with_parent(),
            )

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_error(self) -> str:
        """The sentence with which the service ended, from its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        errors = [line for line in lines[-50:] if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        return f"The {self.service} ended with code {self.returncode}; its log is {self.log}."


class LocalStack:
    """Use: `start`, then `wait_ready`, then `watch` until told to stop, then always `stop`."""

    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._nats: LocalNats | None = None
        self._bus: Bus | None = None
        self.nats_settings = plan.nats or CommonSettings()
        self.children: list[Child] = []
        self.beats: dict[str, Heartbeat] = {}
        """The last heartbeat of each instance."""

    @property
    def gateway_url(self) -> str:
        """Where clients on this machine reach the API."""
        beat = self.beats.get("gateway-0")
        address = beat.address if beat else f"{self._plan.host}:{self._plan.port}"
        host, _, port = address.rpartition(":")
        return f"http://{_reachable(host)}:{port}"

    @property
    def logs(self) -> Path:
        return self._plan.data_dir / "logs"

    @property
    def nats_pid(self) -> int | None:
        """Process id of the NATS server, where this stack has started it."""
        return self._nats.pid if self._nats else None

    async def start(self) -> None:
        """Starts every process; none of them need be ready when it returns."""
        self.logs.mkdir(parents=True, exist_ok=True)
        if self._plan.nats is None:
            self._nats = LocalNats(self._plan.data_dir / "nats")
            await self._nats.start(die_with_parent())
            self.nats_settings = CommonSettings(
                nats_url=self._nats.url,
                nats_user=self._nats.user,
                nats_password=SecretStr(self._nats.password),
            )
        self._bus = await Bus.connect(self.nats_settings, "ryzanstein up")
        await self._bus.ensure_streams()
        await self._bus.subscribe(subjects.ALL_BEATS, Heartbeat, self._on_beat)
        self.children = self._make_children()
        for child in self.children:
            await child.start(self._environment())

    async def wait_ready(self, report: Callable[[dict[str, Heartbeat]], None]) -> None:
        """Returns when every service is ready and every group serves; calls `report` as it goes.

        Raises what the first service that ended said of itself.
        """
        while not self._all_ready():
            self._raise_if_ended()
            report(self.beats)
            await asyncio.sleep(0.1)
        report(self.beats)

    async def watch(self, on_event: Callable[[str], None]) -> None:
        """Starts a service that has ended again, with growing pauses. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep_up(child, on_event))

    async def stop(self) -> None:
        """Ends everything that was started, in order. Safe to call at any time, and twice."""
        for service in STOP_ORDER:
            stops: list[Awaitable[None]] = [
                child.stop(STOP_GRACE) for child in self.children if child.service == service
            ]
            await asyncio.gather(*stops)
        if self._bus is not None:
            await self._bus.close()
            self._bus = None
        if self._nats is not None:
            await self._nats.stop()

    async def kill(self) -> None:
        """Ends everything at once."""
        await asyncio.gather(*(child.stop(0) for child in self.children))

    # --- parts -----------------------------------------------------------------------------------

    def _make_children(self) -> list[Child]:
        gateway = ["--host", self._plan.host, "--port", str(self._plan.port)]
        children = [
            self._child("health-monitor", 0, []),
            self._child("scheduler", 0, []),
            self._child("gateway", 0, gateway),
        ]
        for replica in range(self._plan.replicas):
            children.append(self._child("executor", replica, self._executor_arguments(replica)))
        return children

    def _executor_arguments(self, replica: int) -> list[str]:
        plan = self._plan
        arguments = ["--group", f"group-{replica}", "--tp", str(plan.tp), "--dtype", plan.dtype]
        arguments += ["--engine", plan.engine, "--served-model-name", plan.served_model_name]
        if plan.model:
            arguments += ["--model", plan.model]
        cores = os.cpu_count() or 1
        threads = max(1, cores // (plan.replicas * plan.tp))
        if "RYZANSTEIN_THREADS" not in self._environment():
            arguments += ["--threads", str(threads)]
        return arguments

    def _child(self, service: str, number: int, arguments: list[str]) -> Child:
        instance = f"{service}-{number}"
        return Child(service, instance, arguments, self.logs / f"{instance}.log")

    def _environment(self) -> dict[str, str]:
        settings = self.nats_settings
        return {
            **os.environ,
            **self._plan.environment,
            "RYZANSTEIN_NATS_URL": settings.nats_url,
            "RYZANSTEIN_NATS_USER": settings.nats_user,
            "RYZANSTEIN_NATS_PASSWORD": settings.nats_password.get_secret_value(),
        }

    async def _on_beat(self, beat: Heartbeat) -> None:
        self.beats[beat.instance] = beat

    def _all_ready(self) -> bool:
        return all(self._is_ready(child) for child in self.children)

    def _is_ready(self, child: Child) -> bool:
        beat = self.beats.get(child.instance)
        if beat is None or beat.state != "ready":
            return False
        return child.service != "executor" or (beat.group is not None and beat.group.state == "ready")

    def _raise_if_ended(self) -> None:
        for child in self.children:
            if child.returncode is not None:
                raise ConfigurationError(child.last_error())

    async def _keep_up(self, child: Child, on_event: Callable[[str], None]) -> None:
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            code = await child.wait()
            if child.service == "executor" and code == 0:
                on_event(f"{child.instance} was drained and has left.")
                return
            on_event(f"{child.instance} ended ({child.last_error()}); it is started again.")
            pause = FIRST_PAUSE if time.monotonic() - began > STABLE_AFTER else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)
            await child.start(self._environment())


def existing_nats(settings: CommonSettings, url: str) -> CommonSettings:
    """Settings for a NATS that somebody else runs; user and password may stand in the URL."""
    match = re.fullmatch(r"(?P<scheme>\w+://)(?:(?P<user>[^:@/]*):(?P<password>[^@/]*)@)?(?P<rest>.+)", url)
    if match is None:
        raise ConfigurationError(f"{url!r} is no NATS address; write it as nats://host:port.")
    if match["user"] is None:
        return settings.model_copy(update={"nats_url": url})
    return CommonSettings(
        nats_url=match["scheme"] + match["rest"],
        nats_user=match["user"],
        nats_password=SecretStr(match["password"] or ""),
    )


def _reachable(host: str) -> str:
    """An address to connect to, for one that a server listens on."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return host
    return "127.0.0.1" if unspecified else host
