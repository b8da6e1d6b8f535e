"""The local stack: NATS and every service as a process of its own, started, watched and stopped.

NATS ─▶ health monitor, scheduler, gateway, executors ─▶ all ready ─▶ ... ─▶ stopped in this order:
gateway (takes nothing more), scheduler, executors (finish what runs), health monitor, NATS
"""

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.cli.serve import MODULES
from services.cli.supervision import early_executor
from services.cli.supervision.early_executor import EarlyExecutor
from services.cli.supervision.nats_server import LocalNats, StoreWatch, stop_process
from services.cli.target import StackSettings
from shared.config import CommonSettings
from shared.errors import ConfigurationError, PortInUse
from shared.messages import Heartbeat, ModelCard, ModelSettings, ModelSpec
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.streams import ensure_streams
from shared.process import die_with_parent
from shared.service.listener import reserve
from shared.tasks import Backoff

if TYPE_CHECKING:
    from services.cli.cluster_models import ClusterModels
    from shared.registry import DeclaredAdapter

_LAST_LINES = 50


class Child:
    """Started, waited for and stopped; may be started again once it has ended."""

    def __init__(
        self, service: str, instance: str, arguments: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.service = service
        self.instance = instance
        self.log = log
        self.arguments = arguments  # may be changed between two starts
        self._environment = {**(environment or {}), "RYZANSTEIN_INSTANCE": instance}
        self._process: asyncio.subprocess.Process | EarlyExecutor | None = None
        self._log_begin = 0  # where in the log the output of the present process begins

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment`: what all children share. Raises `OSError` when there can be no process."""
        whole = {**environment, **self._environment}
        with self.log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = self._started_early(whole) or await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[self.service],
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=whole,
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the others in order
                preexec_fn=die_with_parent(),
            )

    def _started_early(self, environment: Mapping[str, str]) -> EarlyExecutor | None:
        """The executor that waits to be told what it is, where there is one; not for one with GPUs of its own."""
        if self.service != "executor" or "CUDA_VISIBLE_DEVICES" in self._environment:
            return None
        early = early_executor.take()
        if early is not None:
            with contextlib.suppress(OSError):
                early.tell(self.arguments, environment, self.log)
                return early
        return None

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is not None:
            await stop_process(self._process, grace)

    def last_error(self) -> str:
        """The sentence with which the process ended, from what it has written to its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_begin)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        errors = [line for line in lines[-_LAST_LINES:] if line.startswith("error: ")]
        if errors:
            return errors[-1].removeprefix("error: ")
        return f"The {self.service} {ending(self.returncode)}; its log is {self.log}."


def ending(code: int | None) -> str:
    """An exit code in words: `ended with code 3`, `was killed by SIGKILL`."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def set_aside(directory: Path) -> None:
    """Keeps the logs of the last run as `*.log.1`, and those of no other."""
    for log in directory.glob("*.log"):
        log.replace(log.with_name(f"{log.name}.1"))


STOP_ORDER = ("gateway", "scheduler", "executor", "health-monitor")
STOP_MARGIN = 20.0  # seconds that a service gets to end, beyond those for finishing its work
LOOK_INTERVAL = 0.1  # seconds between two looks at whether a process has ended that was to become ready

Tell = Callable[[str], None]

# Options of executors as the plan has them, where it has some.
PASSED_ON = (
    "weight_dtype",
    "kv_dtype",
    "tool_parser",
    "reasoning_parser",
    "model",
    "draft_model",
    "engine_python",
    "engine_args",
    "engine_url",
    "engine_kind",
    "engine_credentials",
)


class StackPlan(msgspec.Struct, frozen=True):
    data_dir: Path
    model: str  # directory of the model, or empty with the stub engine
    served_model_name: str
    host: str
    port: int
    tp: int
    replicas: int
    dtype: str
    weight_dtype: str | None = None  # how weights are kept on GPUs; None: as the executors' own settings say
    kv_dtype: str | None = None  # how full KV blocks are kept; None: as the executors' own settings say
    # Bytes of weights that each rank keeps in memory; None: as the executors' own settings say.
    weights_memory: int | None = None
    engine: str = "torch"
    engine_python: str = ""  # the Python that has the engine; empty: the executors' own
    engine_args: str = ""  # of the engine, as it spells them
    engine_url: str = ""  # of a server that computes instead; empty: there is none
    engine_kind: str = ""  # what answers there
    engine_credentials: str = ""  # file with its key
    gpus: list[str] = []  # CUDA_VISIBLE_DEVICES of each group; empty: as it stands
    nats: CommonSettings | None = None  # an existing NATS to use; None: start one
    # How the model writes tool calls; None: as the executors' own settings say.
    tool_parser: str | None = None
    reasoning_parser: str | None = None  # the same for its reasoning
    grpc_port: int | None = None  # of the gRPC API; 0: the system chooses; None: it is not served
    # Models beside that of the executors, or instead of it where that has no name; the scheduler has them loaded.
    further: list[ModelSpec] = []
    adapters: "list[DeclaredAdapter]" = []  # LoRA adapters of these; the scheduler has them read
    draft_model: str = ""  # of the executors' own model; empty: it has none

    @property
    def has_rings(self) -> bool:
        """Whether executors compute in rings of their own."""
        return self.engine != "vllm" and not self.engine_url

    def own_spec(self) -> ModelSpec | None:
        """The model that the executors are started with, as the registry has it; None: they are started without one.

        One replica is always there: those that leave are not replaced in other executors, which have their own."""
        if not self.served_model_name:
            return None
        settings = ModelSettings(
            tp=self.tp,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            draft_model=self.draft_model or None,
        )
        source = self.model or self.served_model_name
        return ModelSpec(self.served_model_name, source, settings=settings, least=1, most=self.replicas, origin="up")


class LocalStack:
    """Use: `start`, then `wait_ready`, then `watch` until told to stop, then always `stop`."""

    def __init__(self, plan: StackPlan, settings: StackSettings) -> None:
        self.plan = plan
        self._settings = settings
        self._nats: LocalNats | None = None
        self._bus: Bus | None = None
        self.nats_settings = plan.nats or CommonSettings()
        # Part of every name: on a NATS that is not ours, others may run a stack of the same shape.
        self._mark = "" if plan.nats is None else f"{secrets.token_hex(3)}-"
        self._port = plan.port
        self._grpc_port = plan.grpc_port
        # Ports that several gateways share, and one for the operations of each service.
        self._reserved: list[socket.socket] = []
        self.children: list[Child] = []
        self.beats: dict[str, Heartbeat] = {}  # the last heartbeat of each instance, of its present process
        self._ops_ports: dict[str, int] = {}
        # Where each gateway answers for itself, by instance, when there are several.
        self.ops_addresses: dict[str, str] = {}
        self._news = asyncio.Event()  # set with every heartbeat

    @property
    def gateway_url(self) -> str:
        """Where clients on this machine reach the API."""
        beat = next((beat for beat in self.beats.values() if beat.service == "gateway"), None)
        address = beat.address if beat else f"{bracketed(self.plan.host)}:{self._port}"
        return f"{'https' if self._settings.tls_certificate else 'http'}://{reachable(address)}"

    @property
    def grpc_address(self) -> str:
        """`host:port` at which clients on this machine reach the gRPC API; empty while it is not served."""
        beat = next((beat for beat in self.beats.values() if beat.grpc_address), None)
        return reachable(beat.grpc_address) if beat else ""

    @property
    def logs(self) -> Path:
        return self.plan.data_dir / "logs"

    @property
    def nats_pid(self) -> int | None:
        """Process id of the NATS server, where this stack has started it."""
        return self._nats.pid if self._nats else None

    async def start(self, *, executors: bool = True) -> None:
        """Starts every process, or all but the `executors`, whose model is not known yet; none of them need be ready
        when it returns. Raises `PortInUse`, and other errors."""
        self._reserve_ports()
        self.logs.mkdir(parents=True, exist_ok=True)
        set_aside(self.logs)
        if self.plan.nats is None:
            self._nats = LocalNats(self.plan.data_dir / "nats", least_rights=True)
            set_aside(self.plan.data_dir / "nats")
            await self._nats.start(die_with_parent())
            self.nats_settings = self._nats.settings()
            await self._start_children(executors)  # their imports run beside what follows
        self._bus = await Bus.connect(self.nats_settings, "ryzanstein up")
        await ensure_streams(self._bus)
        await self._bus.subscribe(subjects.ALL_BEATS, Heartbeat, self._on_beat)
        if self.plan.nats is not None:
            await self._start_children(executors)  # not before it has let us in

    async def start_executors(self, plan: StackPlan) -> None:
        """Those that `start` has left out. `plan`: as before, with the model."""
        self.plan = plan
        made = self._make_executors()
        self.children += made
        for child in made:
            await self._start(child)

    async def _start_children(self, executors: bool) -> None:
        # What takes longest to be ready begins first.
        first, others = self._make_executors() if executors else [], self._make_services()
        self.children = others + first
        for child in first + others:
            await self._start(child)

    async def wait_ready(self, report: Callable[[dict[str, Heartbeat]], None]) -> None:
        """Returns when every service is ready and every group serves; calls `report` as it goes.

        Raises what the first service that ended said of itself.
        """
        while not all(map(self._is_ready, self.children)):
            self._raise_if_ended()
            report(self.beats)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_INTERVAL)
        report(self.beats)

    async def withdraw_models(self) -> None:
        """Takes what an earlier start has declared and this one does not out of the registry, while the executors
        load: it is neither listed nor loaded again. What was unloaded during that start is to be loaded again."""
        assert self._bus is not None
        registry = await Bucket.open(self._bus, subjects.REGISTRY_BUCKET, ModelSpec)
        names = {self.plan.served_model_name, *(spec.name for spec in self.plan.further)}
        for name, spec in (await registry.items()).items():
            if spec.origin == "up" and name not in names:
                await registry.delete(name)
            elif spec.origin == "up" and spec.action:
                await registry.put(name, msgspec.structs.replace(spec, action="", action_at=0.0))

    def models(self) -> "ClusterModels":
        """The registry, and what comes of it; after `start`."""
        from services.cli.cluster_models import ClusterModels  # once the services start

        assert self._bus is not None
        return ClusterModels(self._bus)

    async def card(self, model: str) -> ModelCard | None:
        """None: no group has told of the model yet."""
        assert self._bus is not None
        found = await (await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)).get(model)
        return found.value if found is not None else None

    async def watch(self, on_event: Tell) -> None:
        """Starts what has ended again, with growing pauses. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._nats is not None:
                group.create_task(self._keep_nats_up(self._nats, on_event))
                group.create_task(StoreWatch(self._nats, self.plan.data_dir / "nats", on_event).run())
            for child in self.children:
                group.create_task(self._keep_up(child, on_event))

    async def stop(self) -> None:
        """Ends everything that was started, in order. Safe to call at any time, and twice."""
        for service in STOP_ORDER:
            children = (child for child in self.children if child.service == service)
            await asyncio.gather(*(child.stop(self._grace(service)) for child in children))
        if self._bus is not None:
            await self._bus.close()
            self._bus = None
        if self._nats is not None:
            await self._nats.stop()
        for sock in self._reserved:
            sock.close()

    async def kill(self) -> None:
        """Ends everything at once."""
        await asyncio.gather(*(child.stop(0) for child in self.children))

    # --- parts -----------------------------------------------------------------------------------

    def _make_services(self) -> list[Child]:
        settings = self._settings
        return [
            self._child("health-monitor", 0, []),
            *(self._child("scheduler", number, []) for number in range(settings.schedulers)),
            *(self._child("gateway", number, self._gateway_arguments(number)) for number in range(settings.gateways)),
        ]

    def _make_executors(self) -> list[Child]:
        made = []
        for replica in range(self.plan.replicas):
            gpus = self.plan.gpus[replica : replica + 1]
            environment = {"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {}
            arguments = self._executor_arguments(replica)
            made.append(self._child("executor", replica, arguments, environment))
        return made

    def _reserve_ports(self) -> None:
        """They stay the same, and nobody else's, while services end and start again."""
        host, gateways = self.plan.host, self._settings.gateways
        counts = {"health-monitor": 1, "scheduler": self._settings.schedulers, "executor": self.plan.replicas}
        if gateways > 1:
            self._reserved.append(reserve(host, self._port, shared=True))
            self._port = _port_of(self._reserved[-1])
            if self._grpc_port is not None:
                self._reserved.append(reserve(host, self._grpc_port, option="--grpc-port", shared=True))
                self._grpc_port = _port_of(self._reserved[-1])
            counts["gateway"] = gateways
        names = [f"{service}-{number}" for service, count in counts.items() for number in range(count)]
        sockets, self._ops_ports = reserve_ops_ports(host, names, self.plan.data_dir / "ports.json")
        self._reserved += sockets
        for number in range(gateways if gateways > 1 else 0):
            port = self._ops_ports[f"gateway-{number}"]
            self.ops_addresses[f"gateway-{self._mark}{number}"] = f"{bracketed(host)}:{port}"

    def _gateway_arguments(self, number: int) -> list[str]:
        arguments = ["--host", self.plan.host, "--port", str(self._port)]
        if address := self.ops_addresses.get(f"gateway-{self._mark}{number}"):
            arguments += ["--share-port", "--ops-port", address.rpartition(":")[2]]
        if self._grpc_port is not None:
            arguments += ["--grpc-port", str(self._grpc_port)]
        for name in ("tls_certificate", "tls_key", "tls_client_ca"):
            if path := getattr(self._settings, name):
                arguments += [f"--{name.replace('_', '-')}", path]
        return arguments

    def _executor_arguments(self, replica: int) -> list[str]:
        plan, settings = self.plan, self._settings
        arguments = ["--group", f"group-{self._mark}{replica}", "--dtype", plan.dtype, "--engine", plan.engine]
        if plan.has_rings:
            arguments += ["--tp", str(plan.tp), "--takes-models"]
        if plan.served_model_name:
            arguments += ["--served-model-name", plan.served_model_name]
        for name in PASSED_ON:
            if value := getattr(plan, name):
                arguments += [f"--{name.replace('_', '-')}", value]
        if plan.weights_memory is not None:
            arguments += ["--weights-memory", str(plan.weights_memory)]
        if not settings.threads and plan.has_rings:
            cores = len(os.sched_getaffinity(0))
            arguments += ["--threads", str(max(1, cores // (plan.replicas * plan.tp)))]
        if not settings.replicas_on_host:
            arguments += ["--replicas-on-host", str(plan.replicas)]
        return arguments

    def _child(
        self, service: str, number: int, arguments: list[str], environment: dict[str, str] | None = None
    ) -> Child:
        log = self.logs / f"{service}-{number}.log"
        port = self._ops_ports.get(f"{service}-{number}", 0)
        if port and service != "gateway":
            arguments = [*arguments, "--ops-port", str(port)]
        return Child(service, f"{service}-{self._mark}{number}", arguments, log, environment)

    async def _start(self, child: Child) -> None:
        await child.start(self._environment(child.service))

    def _environment(self, service: str) -> dict[str, str]:
        """On a NATS of our own each service is a user of its own, with that user's rights."""
        settings = self.nats_settings
        user, password = settings.nats_user, settings.nats_password.get_secret_value()
        if self._nats is not None:
            user, password = service, self._nats.passwords[service]
        return {
            "RYZANSTEIN_DUMP_DIRECTORY": str(self.plan.data_dir / "dumps"),
            **os.environ,
            "RYZANSTEIN_NATS_URL": settings.nats_url,
            "RYZANSTEIN_NATS_USER": user,
            "RYZANSTEIN_NATS_PASSWORD": password,
        }

    def _grace(self, service: str) -> float:
        settings = self._settings
        work = {
            "executor": settings.drain_grace + settings.handover_timeout,
            "gateway": settings.drain_delay + settings.drain_timeout,
        }
        return work.get(service, 0.0) + STOP_MARGIN

    async def _on_beat(self, beat: Heartbeat) -> None:
        """Takes beats of our own processes alone: others may be on this NATS, and dead ones linger."""
        if not any(child.instance == beat.instance and child.pid == beat.pid for child in self.children):
            return
        self.beats[beat.instance] = beat
        self._news.set()
        if beat.service == "gateway" and beat.address:
            self._port = int(beat.address.rpartition(":")[2])  # it stays, should the gateway start again
        if beat.grpc_address:
            self._grpc_port = int(beat.grpc_address.rpartition(":")[2])

    def _is_ready(self, child: Child) -> bool:
        beat = self.beats.get(child.instance)
        if beat is None or beat.state != "ready":
            return False
        if not self.plan.served_model_name:
            return True
        if child.service == "gateway":  # it is told of the groups later than this process
            return self.plan.served_model_name in beat.models
        return child.service != "executor" or (beat.group is not None and beat.group.state == "ready")

    def _raise_if_ended(self) -> None:
        if self._nats is not None and self._nats.returncode is not None:
            raise ConfigurationError(
                f"nats-server {ending(self._nats.returncode)} while the services started; its log is {self._nats.log}."
            )
        for child in self.children:
            if child.returncode is not None:
                raise ConfigurationError(child.last_error())

    # --- watching --------------------------------------------------------------------------------

    async def _keep_up(self, child: Child, on_event: Tell) -> None:
        pauses = Backoff()
        while True:
            code = await child.wait()
            if child.service == "executor" and code == 0:
                on_event(f"{child.instance} was drained and has left.")
                return
            on_event(f"{child.instance} ended ({child.last_error()}); it is started again.")
            if child.service == "gateway":
                child.arguments = self._gateway_arguments(int(child.instance.rpartition("-")[2]))
            await self._again(lambda: self._start(child), child.instance, pauses, on_event)

    async def _keep_nats_up(self, nats: LocalNats, on_event: Tell) -> None:
        """The same port, store and credentials: the services find their way back by themselves."""
        pauses = Backoff()
        while True:
            code = await nats.wait()
            on_event(f"NATS {ending(code)}; it is started again, its log is {nats.log}.")
            await self._again(lambda: nats.start(die_with_parent()), "NATS", pauses, on_event)
            on_event("NATS is back.")

    async def _again(self, start: Callable[[], Awaitable[None]], name: str, pauses: Backoff, on_event: Tell) -> None:
        while True:
            await asyncio.sleep(pauses.next(time.monotonic()))
            try:
                await start()
            except (OSError, ConfigurationError) as error:
                on_event(f"{name} could not be started ({error}); it is tried again.")
            else:
                pauses.began(time.monotonic())
                return


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def bracketed(host: str) -> str:
    """`host` as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def reachable(address: str) -> str:
    """A `host:port` to connect to, for one that a server listens on."""
    host, _, port = address.rpartition(":")
    try:
        listens_on = ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a name
        return address
    if not listens_on.is_unspecified:
        return address
    return f"127.0.0.1:{port}" if listens_on.version == 4 else f"[::1]:{port}"


def reserve_ops_ports(host: str, names: Iterable[str], remembered: Path) -> tuple[list[socket.socket], dict[str, int]]:
    """Sockets that keep a port for each of the services `names`, and which: the one in the file `remembered` where that
    is free, else one that the system chooses. The file has them afterwards."""
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        known = msgspec.json.decode(remembered.read_bytes(), type=dict[str, int])
    kept = {name: _reserved(host, known.get(name, 0)) for name in names}
    ports = {name: sock.getsockname()[1] for name, sock in kept.items()}
    with contextlib.suppress(OSError):  # a stack that remembers nothing serves all the same
        remembered.write_bytes(msgspec.json.encode({**known, **ports}))
    return list(kept.values()), ports


def _reserved(host: str, port: int) -> socket.socket:
    if 0 < port < 1 << 16:
        with contextlib.suppress(PortInUse):
            return reserve(host, port)
    return reserve(host, 0)
