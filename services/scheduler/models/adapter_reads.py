"""Has hosts read the LoRA adapters that are declared: the asyncio shell around `wanted_adapters`.

KV adapters ──▶ WantedAdapters ── holder of the lease ──PullAdapter──▶ a host ──digest──▶ KV adapters
"""

import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.wanted_adapters import AdapterRead, WantedAdapters
from shared.errors import RyzansteinError, Unavailable, error_from_code
from shared.messages import HostReply, ModelSpec, PullModel
from shared.messages.registry import AdapterRecord, PullAdapter
from shared.nats import subjects
from shared.nats.adapters import AdapterRefused, read_by_first, settle
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.tasks import TaskSet

READ_TIMEOUT = 600.0  # seconds that a host has to fetch, check and store an adapter
FETCH_TIMEOUT = 5.0  # seconds that a host has to say that it fetches a model
MAX_ERROR = 1000  # characters of what a host says against an adapter that are kept

log = structlog.get_logger(__name__)


class AdapterReads:
    """One per scheduler; only the one that decides calls `step`."""

    def __init__(self, bus: Bus, cluster: ClusterView, ended: Callable[[], None]) -> None:
        """`ended` is called when the next adapter may be read."""
        self._bus = bus
        self._ended = ended
        self._bucket = Bucket(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
        self._wanted = WantedAdapters(cluster)
        self._registered: set[str] = set()
        self._reading = TaskSet("adapter_read_failed")

    async def start(self, spawn: Callable[..., object]) -> None:
        """Raises `BrokerUnavailable`."""
        await self._bucket.ensure()
        spawn(self._bucket.follow(self._note), "adapters")

    async def stop(self) -> None:
        await self._reading.cancel()

    def step(self, specs: Mapping[str, ModelSpec]) -> tuple[int, int]:
        """Begins what is due; returns how many adapters are registered, and how many are wanted."""
        for reading in self._wanted.due(specs, time.time()):
            self._reading.spawn(self._read(reading), reading.name)
        return len(self._registered), len(self._wanted)

    def _note(self, name: str, record: AdapterRecord | None) -> None:
        self._wanted.note(name, record)
        if record is not None and record.digest:
            self._registered.add(name)
        else:
            self._registered.discard(name)

    async def _read(self, reading: AdapterRead) -> None:
        failed = False
        try:
            found = await self._asked(reading)
            if found is not None:
                failed = isinstance(found, str)
                await self._settle(reading, found)
            elif reading.fetch:
                subject = subjects.host_control(reading.fetch)
                fetched = await self._bus.request(subject, PullModel(reading.base), HostReply, timeout=FETCH_TIMEOUT)
                told = {"host": reading.fetch, "model": reading.base.name, "adapter": reading.name}
                log.info("adapter_base_fetched", **told, ok=fetched.ok, error=fetched.error)
        except (RyzansteinError, msgspec.DecodeError) as error:
            log.warning("adapter_fetch_failed", adapter=reading.name, error=str(error))
        finally:
            self._wanted.ended(reading, time.time(), failed=failed)
            self._ended()

    async def _asked(self, reading: AdapterRead) -> AdapterRecord | str | None:
        """What the first host that has the base finds, or has against it; None: none has."""
        wanted = reading.wanted
        command = PullAdapter(reading.name, wanted.model, wanted.source, reading.base, wanted.revision)
        found = await read_by_first(self._bus, reading.hosts, command, timeout=READ_TIMEOUT)
        if not isinstance(found, HostReply):
            return found
        error = error_from_code(found.code, found.error)
        if isinstance(error, Unavailable):
            raise error
        return found.error[:MAX_ERROR] or "The host that read it reported nothing about it."

    async def _settle(self, reading: AdapterRead, found: AdapterRecord | str) -> None:
        try:
            done = await settle(self._bucket, reading.name, reading.wanted, found)
        except AdapterRefused:
            found = "The name was replaced too often in the last hours; wait, or use another name."
            done = await settle(self._bucket, reading.name, reading.wanted, found)
        told = {"adapter": reading.name, "model": reading.wanted.model}
        if isinstance(found, str):
            log.warning("adapter_refused", **told, error=found)
        elif done:
            log.info("adapter_registered", **told, digest=found.digest)
