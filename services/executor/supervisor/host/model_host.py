"""The executor as a host: groups that it loads, drains, puts to sleep and unloads when it is told to.

    LoadModel ──▶ files made ready ──▶ memory promised ──▶ group ──▶ ready        told by heartbeats, step by step
                        └── no files ──────┴── no room ──────┴── no model ──▶ failed, with the reason
    UnloadModel ──▶ drained ──▶ ended, memory given back ──▶ weights kept resident (sleep), or not

Commands are answered at once, may be repeated, and change nothing where there is nothing to do. The host has the last
word on its memory; which model goes where is decided by the scheduler.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog
from pydantic import ValidationError

from services.executor.core.settings import ExecutorSettings, served_name
from services.executor.supervisor.group import GroupSupervisor
from services.executor.supervisor.host.adapters import HostAdapters
from services.executor.supervisor.host.jobs import HostJobKind
from services.executor.supervisor.host.load import HostLoad
from services.executor.supervisor.host.memory import HostMemory, MemoryPlacement, ModelSize
from services.executor.supervisor.host.metrics import HostMetrics
from services.executor.supervisor.host.model_files import MEMORY_SHARE, ResidentFiles, StoredModel, gpus_of, host_bytes
from services.executor.supervisor.ring import GroupHost
from shared.engine_features import refusal
from shared.errors import ConfigurationError, InvalidRequest, ModelDoesNotFit, RyzansteinError
from shared.messages import (
    GroupBeat,
    HostBeat,
    HostCommand,
    HostModel,
    HostReply,
    LoadModel,
    ModelSettings,
    ModelSpec,
    PullAdapter,
    PullModel,
    RemoveModel,
    UnloadModel,
)
from shared.model_store import catalog
from shared.model_store.programs import Progress
from shared.nats import subjects
from shared.nats.kv import Bucket
from shared.registry import as_of_hub
from shared.service.logs import LevelChange
from shared.sparse_attention import keeps_pages
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

MOST_GROUPS = 64  # that a host has, is loading, or ends at a time
MOST_TOLD = 256  # models that a host speaks of in its heartbeats; of those that have failed, the last
# Seconds between two looks whether a group has ended its work: so long a model waits beyond need for its memory.
IDLE_LOOK = 0.1


def settings_of(host: ExecutorSettings, spec: ModelSpec) -> ExecutorSettings:
    """Those of a group that serves `spec`: the host's, but for what the model's say. Raises `ConfigurationError`."""
    given = {
        name: value for name in ModelSettings.__struct_fields__ if (value := getattr(spec.settings, name)) is not None
    }
    if (keeps := keeps_pages(spec.sparse_attention)) is not None:
        given["sparse_attention"] = keeps
    own = {"model": as_of_hub(spec.source), "revision": spec.revision, "served_model_name": spec.name, "group": ""}
    own["draft_model"] = as_of_hub(spec.settings.draft_model or "")  # the host's goes with the host's own model
    # A port that is set can be of one group alone, and groups that come and go share the cores.
    shared = {"nnodes": 1, "takes_models": True, "handover_port": 0, "pin_threads": False}
    try:
        settings = ExecutorSettings.model_validate({**host.model_dump(), **given, **own, **shared})
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigurationError(
            f"The settings of the model {spec.name} are not those of an executor ({what}); correct them."
        ) from None
    if settings.engine == "stub" and not Path(spec.source).expanduser().exists():
        settings = settings.model_copy(update={"model": ""})  # which computes without any model
    return settings


class ModelHost:
    """All groups of an executor, and its models."""

    def __init__(self, settings: ExecutorSettings, service: GroupHost, job_kinds: Iterable[HostJobKind] = ()) -> None:
        self._settings = settings
        self._service = service
        gpus = gpus_of(settings)
        self._gpu_names = [name for name, _ in gpus]
        self.memory = _memory_of(settings, [size for _, size in gpus])
        self.metrics = HostMetrics(self.memory, lambda: len(self.groups))
        self.groups: dict[str, GroupSupervisor] = {}  # by name, in the order in which they have come
        self._own: GroupSupervisor | None = None
        self._own_weights = 0
        self._loads: dict[str, HostLoad] = {}
        self._some_loads = asyncio.Event()  # whether there may be any
        self._pulls: dict[str, HostLoad] = {}  # by model
        self._asleep: dict[str, ResidentFiles] = {}
        # Of models that are stored, asleep or have failed: the last that there is to say.
        self._told: dict[str, HostModel] = {}
        self._log_level = LevelChange()
        self._tasks = TaskSet(failed="host_task_failed")
        self._adapters = HostAdapters()
        self.jobs = [kind.make(settings, service, self.memory, self) for kind in job_kinds]
        self._stopping = False

    # --- its own group ---------------------------------------------------------------------------

    def own(self, group: GroupSupervisor) -> None:
        """The group that the executor was started with: it has its memory whatever there is."""
        self._own = self.groups[group.group] = group

    def outlives(self, group: GroupSupervisor) -> bool:
        """Whether the executor goes on without the group that it was started with: it was unloaded, not drained."""
        return self._own is not group

    async def _unload_own(self, own: GroupSupervisor, command: UnloadModel) -> None:
        await own.stop(command.grace, force=command.force)
        self.memory.release(own.group)
        self.groups.pop(own.group, None)
        if command.sleep:
            await self._put_to_sleep(own.model, own.settings)
        log.info("model_unloaded", group=own.group, model=own.model)
        await self._beat()

    def _count_own(self) -> None:
        own = self._own
        if own is None or own.memory or not own.kv_bytes:
            return
        own.memory = self._own_weights + own.kv_bytes
        self.memory.hold(own.group, own.memory, range(own.settings.ranks_here))

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._settings.model and self._settings.engine == "torch":
            self._own_weights = await asyncio.to_thread(StoredModel(self._settings).weights)
        if self._settings.is_host:
            await self._note_stored()
            self._tasks.spawn(self._tell_idle(), "idle groups")

    async def stop(self) -> None:
        """Drains all groups, side by side; what is being made ready is not any more."""
        self._stopping = True
        for load in [*self._loads.values(), *self._pulls.values()]:
            load.unload = load.unload or UnloadModel(load.group)
            load.cancel()
        groups = self.groups.values()
        await asyncio.gather(*(jobs.stop() for jobs in self.jobs), *(group.stop() for group in groups))
        await self._tasks.cancel()
        await self._adapters.stop()
        for files in self._asleep.values():
            files.close()
        self._asleep.clear()

    def set_log_level(self, change: LevelChange) -> None:
        self._log_level = change
        for group in self.groups.values():
            group.set_log_level(change)

    # --- what is told ----------------------------------------------------------------------------

    def group_beats(self) -> list[GroupBeat]:
        self._count_own()
        return [group.beat() for group in self.groups.values()]

    def beat(self) -> HostBeat:
        models = dict(self._told)
        for load in [*self._pulls.values(), *self._loads.values()]:
            if (told := load.report()) is not None:
                last = models.get(load.spec.name)
                seconds = last.load_seconds if last is not None else 0.0
                models[load.spec.name] = msgspec.structs.replace(told, load_seconds=seconds)
        return HostBeat(
            memory=self.memory.total,
            used=self.memory.used,
            devices=self.memory.devices,
            models=[*models.values()][-MOST_TOLD:],
            takes_models=self._settings.is_host and not self._stopping,
            **{name: value for jobs in self.jobs for name, value in jobs.beat().items()},
        )

    def _tell(self, model: HostModel) -> None:
        """From now on, in place of what was said of it before; how long it takes to load is not forgotten."""
        last = self._told.pop(model.model, None)
        if last is not None:
            seconds, memory = model.load_seconds or last.load_seconds, model.memory or last.memory
            model = msgspec.structs.replace(model, load_seconds=seconds, memory=memory)
        self._told[model.model] = model
        while len(self._told) > MOST_TOLD:
            self._told.pop(next(iter(self._told)))

    async def _note_stored(self) -> None:
        """Models whose files are in the cache, by the names that they have there."""
        cache = self._settings.model_cache.expanduser()
        for local in await asyncio.to_thread(catalog.list_models, cache):
            if local.name not in self._told:
                self._tell(HostModel(local.name, "stored", total=local.bytes))

    # --- commands --------------------------------------------------------------------------------

    async def on_command(self, command: HostCommand) -> HostReply:
        """The answer, which waits for none of what was begun."""
        try:
            for jobs in self.jobs:
                if (reply := await jobs.on_command(command)) is not None:
                    return reply
            if not self._takes(command):
                raise InvalidRequest(
                    f"The executor {self._service.instance} takes no models; start it with --takes-models."
                )
            match command:
                case LoadModel(group, spec):
                    return await self._load(group, spec)
                case UnloadModel():
                    return self._unload(command)
                case PullModel(spec):
                    return self._pull(spec)
                case RemoveModel(spec):
                    return await self._remove(spec)
                case PullAdapter():
                    return await self._pull_adapter(command)
            raise InvalidRequest(f"The executor {self._service.instance} does not support this command.")
        except RyzansteinError as error:
            return HostReply(ok=False, code=error.code, error=error.message)

    def _takes(self, command: HostCommand) -> bool:
        """Beside an engine it takes no models, but adapters of the engine's."""
        reads = bool(self._settings.serving_engine) and isinstance(command, PullAdapter) and self._is_own(command)
        return not self._stopping and (self._settings.is_host or reads)

    async def _pull_adapter(self, command: PullAdapter) -> HostReply:
        own = self._is_own(command)
        if own and self._own is not None and (refused := refusal(["adapter"], self._own.engine)) is not None:
            raise refused
        settings = self._settings if own else self.settings_of(command.spec)
        return HostReply(ok=True, adapter=await self._adapters.pull(command, settings, self._service.bus))

    def _is_own(self, command: PullAdapter) -> bool:
        """Whether its base is the model that the executor was started with. Beside an engine there is no other."""
        settings = self._settings
        is_own = bool(settings.serving_engine) or not command.spec.source
        return is_own and served_name(settings) == command.model

    async def _load(self, group: str, spec: ModelSpec) -> HostReply:
        known = self._loads.get(group)
        if known is not None:
            reply = known.reply(spec)
            known.remove = False
            return reply
        if group in self.groups:
            raise InvalidRequest(f"The group {group} is the executor's own; name another one.")
        if len(self._loads) >= MOST_GROUPS:
            raise ModelDoesNotFit(f"The host has {MOST_GROUPS} groups already; unload one of them.")
        load = HostLoad(group, spec, settings_of(self._settings, spec))
        self._some_loads.set()
        self._loads[group] = load  # before anything is waited for: two that ask at once get one load
        try:
            placed = await self._place_stored(load)
        except ModelDoesNotFit as error:
            del self._loads[group]
            return HostReply(ok=False, code=error.code, error=error.message, memory=load.memory)
        except BaseException:
            del self._loads[group]
            raise
        self._tasks.spawn(self._live(load, placed), f"group {group}")
        return HostReply(ok=True, memory=load.memory)

    async def _place_stored(self, load: HostLoad) -> MemoryPlacement | None:
        """Where the files are there: at once, so that who has asked knows whether there is room. Raises
        `ModelDoesNotFit`; what else is wrong is told by heartbeats."""
        model = StoredModel(load.settings)
        if not model.is_ready:
            return None
        try:
            return self._place(load, await asyncio.to_thread(model.size))
        except ModelDoesNotFit:
            raise
        except (RyzansteinError, OSError):
            return None

    def _unload(self, command: UnloadModel) -> HostReply:
        load = self._loads.get(command.group)
        if load is None:
            if (own := self._own) is not None and own.group == command.group:
                self._own = None
                self._tasks.spawn(self._unload_own(own, command), f"unload {own.group}")
            return HostReply(ok=True)
        if load.unload is None or command.force:
            load.unload = command
            self._tasks.spawn(self._end(load, command), f"unload {load.group}")
        return HostReply(ok=True)

    def _pull(self, spec: ModelSpec) -> HostReply:
        if spec.name not in self._pulls:
            pull = HostLoad("", spec, settings_of(self._settings, spec))
            self._pulls[spec.name] = pull
            self._tasks.spawn(self._fetch(pull), f"pull {spec.name}")
        return HostReply(ok=True)

    async def _remove(self, spec: ModelSpec) -> HostReply:
        """At once, or when its groups are gone. Raises `InvalidRequest` while one of another model has the files."""
        settings = settings_of(self._settings, spec)
        served = [load for load in self._loads.values() if load.spec.name == spec.name]
        users = [
            load.group
            for load in self._loads.values()
            if load not in served and settings.model and load.settings.model == settings.model
        ]
        own = self._own
        if own is not None and settings.model and settings.model == as_of_hub(own.settings.model):
            users.append(own.group)
        if users:
            group = users[0]
            raise InvalidRequest(
                f"The files of the model {spec.name} are those of the group {group}; unload that first."
            )
        if (pull := self._pulls.get(spec.name)) is not None:
            pull.unload = UnloadModel("")
            pull.cancel()
        for load in served:
            load.remove = True
        if served:
            return HostReply(ok=True)
        self._wake([spec.name])
        await asyncio.to_thread(StoredModel(settings).remove)
        self._told.pop(spec.name, None)
        return HostReply(ok=True)

    async def _remove_after(self, spec: ModelSpec) -> None:
        """Its last group takes them along."""
        try:
            await self._remove(spec)
        except (RyzansteinError, OSError) as error:
            log.warning("model_files_kept", model=spec.name, error=str(error))

    # --- loads -----------------------------------------------------------------------------------

    async def _live(self, load: HostLoad, placed: MemoryPlacement | None) -> None:
        """The whole life of a group."""
        name, began = load.spec.name, time.monotonic()
        try:
            if placed is None:
                await self._make_ready(load)
                began = time.monotonic()
                placed = self._place(load, await asyncio.to_thread(StoredModel(load.settings).size))
            await self._serve(load, placed, began)
        except Exception as error:
            self._fail(load, error)
        finally:
            self.memory.release(load.group)
            self.groups.pop(load.group, None)
            self._loads.pop(load.group, None)
            log.info("model_unloaded", group=load.group, model=name)
            await self._beat()  # its memory may be had now
            if load.remove:
                await self._remove_after(load.spec)
            elif load.unload is not None and load.unload.sleep:
                await self._put_to_sleep(name, load.settings)
                await self._beat()

    async def _serve(self, load: HostLoad, placed: MemoryPlacement, began: float) -> None:
        """From the first of its processes to the end of the last. Raises why it has failed."""
        self._wake(placed.woken)
        for jobs in self.jobs:
            await jobs.evict(placed.jobs)
        if load.unload is not None:
            return
        kv = placed.footprint.kv // load.settings.tp
        settings = load.settings.model_copy(update={"kv_memory": kv})
        group = GroupSupervisor(settings, load.group, self._service, variables=self.gpu_variables(placed.devices))
        group.memory = placed.footprint.total
        group.set_log_level(self._log_level)
        load.supervisor = self.groups[load.group] = group
        running = asyncio.create_task(group.run())
        ready = asyncio.create_task(group.ready.wait())
        try:
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                seconds = time.monotonic() - began
                self.metrics.loaded(seconds)
                self._wake([load.spec.name])  # its weights are the group's now
                self._tell(HostModel(load.spec.name, "stored", memory=load.memory, load_seconds=seconds))
                log.info("model_loaded", group=load.group, model=load.spec.name, seconds=round(seconds, 3))
                await self._beat()
            if (error := await running) is not None:
                raise error
        finally:
            ready.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    def _place(self, load: HostLoad, size: ModelSize) -> MemoryPlacement:
        """Raises `ModelDoesNotFit`."""
        settings = load.settings
        try:
            placed = self.memory.place(load.group, size, settings.tp, settings.kv_memory * settings.tp)
        except ModelDoesNotFit:
            load.memory = self.memory.least(size, settings.tp, settings.kv_memory * settings.tp)
            raise
        load.memory = placed.footprint.total
        return placed

    async def _make_ready(self, load: HostLoad) -> None:
        """Fetches and converts what is not there; from then on its settings name a directory."""

        def report(stage: str, done: int, total: int) -> None:
            load.stage = (stage, done, total)

        if load.unload is not None:
            raise load.unwanted()
        load.preparing = asyncio.create_task(self._prepare(load.settings, report))
        await asyncio.wait({load.preparing})
        if load.preparing.cancelled():
            raise load.unwanted()
        load.settings = load.settings.model_copy(update={"model": load.preparing.result()})

    async def _prepare(self, settings: ExecutorSettings, report: Progress) -> str:
        named = await self._named() if settings.model_cache_bytes else None
        return await StoredModel(settings).prepare(report, named)

    async def _named(self) -> list[tuple[str, str]]:
        """What the registry names is not removed from the cache to make room."""
        registry = Bucket(self._service.bus, subjects.REGISTRY_BUCKET, ModelSpec)
        await registry.ensure()
        return [(spec.source, spec.revision) for spec in (await registry.items()).values()]

    async def _fetch(self, pull: HostLoad) -> None:
        try:
            await self._make_ready(pull)
            size = await asyncio.to_thread(StoredModel(pull.settings).bytes_on_disk)
            self._tell(HostModel(pull.spec.name, "stored", total=size))
        except Exception as error:
            self._fail(pull, error)
        finally:
            self._pulls.pop(pull.spec.name, None)
            await self._beat()

    async def _end(self, load: HostLoad, command: UnloadModel) -> None:
        load.cancel()
        if load.supervisor is not None:
            await load.supervisor.stop(command.grace, force=command.force)

    def _fail(self, load: HostLoad, error: Exception) -> None:
        if load.unload is not None:
            return  # it was told to end
        told = error if isinstance(error, RyzansteinError) else load.fault(error)
        self.metrics.failed()
        log.warning("model_load_failed", group=load.group, model=load.spec.name, error=told.message)
        self._tell(HostModel(load.spec.name, "failed", error=told.message, memory=load.memory, failed_at=time.time()))

    def gpu_variables(self, devices: Iterable[int]) -> dict[str, str]:
        """Of the environment of a process that is to see these GPUs alone; none on a CPU."""
        names = [self._gpu_names[device] for device in devices]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}

    # --- as jobs see it (`HostModels`) -----------------------------------------------------------

    def settings_of(self, spec: ModelSpec) -> ExecutorSettings:
        return settings_of(self._settings, spec)

    async def prepare_base(self, settings: ExecutorSettings) -> str:
        return await self._prepare(settings, lambda *step: None)

    def serves(self, model: str) -> bool:
        return any(group.model == model and group.ready.is_set() for group in self.groups.values())

    async def _tell_idle(self) -> None:
        """That a group has no work any more is told at once: another model may wait for its memory."""
        busy: set[str] = set()
        while True:
            if not self._loads:
                self._some_loads.clear()
                await self._some_loads.wait()
            await asyncio.sleep(max(IDLE_LOOK, self._settings.beat_interval / 10))
            before, busy = busy, {group.group for group in self.groups.values() if group.works}
            if self._loads and not before <= busy:
                await self._beat()

    async def _beat(self) -> None:
        """Between two ticks, and where the broker is away not at all: the next one tells."""
        try:
            await self._service.beat_now()
        except RyzansteinError as error:
            log.debug("heartbeat_send_failed", error=str(error))

    # --- sleep -----------------------------------------------------------------------------------

    async def _put_to_sleep(self, name: str, settings: ExecutorSettings) -> None:
        try:
            files = await asyncio.to_thread(StoredModel(settings).resident)
        except (RyzansteinError, OSError) as error:
            log.warning("model_sleep_failed", model=name, reason=str(error))
            return
        if any(load.spec.name == name for load in self._loads.values()):
            files.close()  # it was asked for again meanwhile
            return
        self._wake([name])
        woken = self.memory.put_to_sleep(name, files.size)
        if woken is None:
            log.info("model_sleep_failed", model=name, reason="there is no room for its weights", bytes=files.size)
            files.close()
            return
        self._wake(woken)
        self._asleep[name] = files
        self._tell(HostModel(name, "sleeping", total=files.size))
        log.info("model_asleep", model=name, bytes=files.size)

    def _wake(self, names: Iterable[str]) -> None:
        """Their weights are not held any more."""
        for name in names:
            self.memory.wake(name)
            if (files := self._asleep.pop(name, None)) is not None:
                files.close()
                self._tell(HostModel(name, "stored"))


def _memory_of(settings: ExecutorSettings, gpus: list[int]) -> HostMemory:
    if not gpus:
        return HostMemory([settings.host_memory or int(host_bytes() * MEMORY_SHARE)], gpus=False)
    share = settings.host_memory / sum(gpus) if settings.host_memory else MEMORY_SHARE
    capacities = [int(size * min(share, 1.0)) for size in gpus]
    return HostMemory(capacities, gpus=True, asleep_limit=int(host_bytes() * MEMORY_SHARE))
