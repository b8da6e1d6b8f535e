"""The life of a service process: start, run until a signal or a fault, stop.

starting ──start()──▶ ready ──SIGTERM, SIGINT──▶ draining ──stop()──▶ gone
    │                    └──── fail(error) ────────▶ draining
    └── SIGTERM, SIGINT, fail(error): start() is cancelled ──▶ draining

The HTTP port answers from the first moment, before NATS is connected: /health says that the process
lives, /ready why it is not ready. One that other processes share is left to them until this one is ready.
"""

import abc
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from shared import tracing
from shared.config import CommonSettings, SettingsT, parse_settings
from shared.errors import RyzansteinError
from shared.messages import GroupBeat, Heartbeat, HostBeat, LogLevel, ServiceName, ServiceStatus, SetLogLevel
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from shared.process import VERSION, freeze_gc_after_startup, pid_namespace
from shared.service.endpoints import Health, OpsApp, SpanCollector, StateCollector, new_registry
from shared.service.http_server import HttpServer
from shared.service.listener import bind
from shared.service.logs import LEVELS, LevelChange, configure_logging, level, set_level
from shared.tasks import TaskSet, cancel_all

log = structlog.get_logger(__name__)


class Service(abc.ABC):
    """Base of the four services: connection, operations endpoint, heartbeats, background tasks.

    A subclass implements `start` and `stop`; both run in the service's event loop.
    """

    name: ClassVar[ServiceName]
    # Whether it gives the streams the limits of its settings: one service decides, and may.
    changes_streams: ClassVar[bool] = False

    traces: ClassVar[bool] = False  # whether it has spans to record, where tracing is on

    def __init__(self, settings: CommonSettings) -> None:
        self.settings = settings
        self.instance = settings.instance or f"{self.name}-{secrets.token_hex(3)}"
        self.state: ServiceStatus = "starting"
        self.owns_process = False  # whether the process is there for this service alone
        self.grpc_address = ""  # `host:port` of a gRPC API, for the heartbeat
        self.registry: CollectorRegistry = new_registry()
        self._bus: Bus | None = None
        self._tasks = TaskSet(on_failure=self.fail)
        self._http: HttpServer | None = None
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self.registry.register(
            StateCollector(self.health, lambda: self._connected, lambda: self._bus.reconnects if self._bus else 0)
        )

    # --- for subclasses --------------------------------------------------------------------------

    @property
    def bus(self) -> Bus:
        assert self._bus is not None, "the service has not been started"
        return self._bus

    @property
    def _connected(self) -> bool:
        return self._bus is not None and self._bus.connected

    @property
    def address(self) -> str:
        """`host:port` of the service's HTTP port; empty before it listens."""
        return self._http.address if self._http else ""

    @abc.abstractmethod
    async def start(self) -> None:
        """Begins the work. The bus is connected and its streams exist."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Ends the work without losing any. The bus is still connected."""

    def health(self) -> Health:
        """What /health and /ready say; a subclass adds its own conditions."""
        reasons = [] if self.state == "ready" else [f"the service is {self.state}"]
        if not self._connected:
            reasons.append("NATS is not connected")
        reason = "; ".join(reasons)
        return Health(self.name, self.instance, self.state, not reason, reason)

    def group_beats(self) -> list[GroupBeat]:
        """What the heartbeat says of groups; executors answer."""
        return []

    def host_beat(self) -> HostBeat | None:
        """What the heartbeat says of the host; executors answer."""
        return None

    def models(self) -> list[str]:
        """What the heartbeat says of models; gateways answer."""
        return []

    def log_fields(self) -> dict[str, object]:
        """What every line of the log carries, beside service and instance."""
        return {}

    def on_log_level(self, change: LevelChange) -> None:
        """The operator wants another level; this process has it already."""
        return

    def make_app(self) -> Any:
        """The ASGI application on the service's HTTP port."""
        return OpsApp(self.health, self.registry)

    def listen_port(self) -> int:
        return self.settings.ops_port

    def shares_port(self) -> bool:
        """Whether other processes listen on that port too."""
        return False

    def server_options(self) -> dict[str, Any]:
        return {}

    def make_server(self) -> HttpServer:
        """What will serve the HTTP port. Its socket listens from now on. Raises `PortInUse`, `ConfigurationError`."""
        sock = bind(self.settings.host, self.listen_port(), shared=self.shares_port())
        return HttpServer(self.make_app(), sock, **self.server_options())

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` in the background; should it raise, the service ends with that error."""
        return self._tasks.spawn(work, name)

    async def stop_accepting(self) -> None:
        """Refuses new connections on the service's HTTP port; what is under way goes on."""
        if self._http is not None:
            await self._http.stop_accepting()

    def fail(self, error: BaseException) -> None:
        """Ends the service because of `error`."""
        self._failure = self._failure or error
        self._ended.set()

    def end(self) -> None:
        """Ends the service in good order."""
        self._ended.set()

    # --- the life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, wait for the end, stop. Raises what made the service fail."""
        self._http = self.make_server()
        try:
            if not self.shares_port():
                await self._http.start()
            if await self._until_ended(asyncio.create_task(self._start_up(), name="start")):
                if self.owns_process:
                    freeze_gc_after_startup()
                self.state = "ready"  # before the first connection that a shared port brings
                if self.shares_port():
                    await self._http.start()
                log.info("ready", address=self.address)
                await self.beat_if_heard()
                await self._ended.wait()
        finally:
            await self._shut_down()
        if self._failure is not None:
            raise self._failure

    async def _start_up(self) -> None:
        self._bus = await Bus.connect(self.settings, subjects.connection(self.name, self.instance))
        await ensure_streams(self._bus, change=self.changes_streams)
        self.spawn(self._beat(), "heartbeat")
        control = subjects.service_control(self.name, self.instance)
        await self._bus.subscribe(control, SetLogLevel, self._on_log_level)
        await self.start()

    async def _on_log_level(self, wanted: SetLogLevel) -> LogLevel:
        error = ""
        if wanted.level in (*LEVELS, "usual"):
            name = "" if wanted.level == "usual" else wanted.level
            self.on_log_level(set_level(name, max(0.0, wanted.seconds)))
            log.warning("log_level_changed", level=level().name, seconds=wanted.seconds)
        elif wanted.level:
            error = f"There is no level {wanted.level[:32]!r}; it is one of {', '.join(LEVELS)}, usual."
        now = level()
        return LogLevel(now.name, now.usual, now.until, error)

    async def _until_ended(self, starting: asyncio.Task[None]) -> bool:
        """Waits for `starting`, or for the end of the service: then it is cancelled.

        True when the service may be called ready. Raises what `starting` raises.
        """
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return not self._ended.is_set()
        finally:
            ended.cancel()
            if not starting.done():
                await cancel_all({starting})
        if starting.done() and not starting.cancelled() and (error := starting.exception()) is not None:
            log.warning("start_failed", error=str(error))
        return False

    async def _shut_down(self) -> None:
        """Every step is taken, whatever becomes of the others; the first fault is the one that is told."""
        self.state = "draining"
        await self.beat_if_heard()
        try:
            if self._bus is not None:
                await self.stop()
        except Exception as error:
            log.exception("stop_failed")
            self._failure = self._failure or error
        finally:
            await self._tasks.cancel()
            if self._http is not None:
                await self._http.stop()
            self.state = "gone"
            await self.beat_if_heard()
            if self._bus is not None:
                await self._bus.close()
            log.info("stopped")

    async def _beat(self) -> None:
        while True:
            await self.beat_if_heard()
            await asyncio.sleep(self.settings.beat_interval)

    async def beat_if_heard(self) -> None:
        """A heartbeat that may fail: with NATS gone, silence says enough."""
        with contextlib.suppress(RyzansteinError):
            await self.beat_now()

    async def beat_now(self) -> None:
        """Sends a heartbeat between two ticks: a change of state must not wait for the next one."""
        if self._bus is None or not self._bus.connected:
            return
        groups = self.group_beats()
        beat = Heartbeat(
            service=self.name,
            instance=self.instance,
            pid=os.getpid(),
            state=self.state,
            address=self.address,
            group=groups[0] if groups else None,
            grpc_address=self.grpc_address,
            pid_namespace=pid_namespace(),
            sent_at=time.time(),
            models=self.models(),
            groups=groups,
            host=self.host_beat(),
            version=VERSION,
        )
        await self._bus.publish(subjects.beats(self.name, self.instance), beat)


def main(
    service_type: Callable[[SettingsT], Service],
    settings_type: type[SettingsT],
    command: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """A service's whole process: reads its settings, runs it to its end, returns the exit code.

    An expected error is printed as its one sentence; of another one the log has the trace.
    """

    async def live() -> None:
        given = sys.argv[1:] if arguments is None else arguments
        service = service_type(parse_settings(settings_type, command, given))
        settings = service.settings
        service.owns_process = True
        level, fmt, about = settings.log_level, settings.log_format, service.log_fields()
        configure_logging(service.name, service.instance, level=level, fmt=fmt, about=about)
        if service.traces and tracing.configure(service.name, service.instance):
            service.registry.register(SpanCollector())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.end)
        try:
            await service.run()
        finally:
            tracing.close()

    try:
        uvloop.run(live())
    except RyzansteinError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the terminal is the interface here
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.exception("unexpected_error")
        fault = f"`{command}` failed with an internal error ({type(error).__name__})"
        print(f"error: {fault}; see the log above, and please report it.", file=sys.stderr)  # noqa: T201
        return 1
    return 0
