"""The models of a running stack or cluster, as the command line sees and changes them: over NATS, as the operator.

registry (what is wanted) + groups, hosts, placements (what is) ──▶ Snapshot ──▶ status of each model
add, change, remove ──compare and set──▶ registry ──▶ the scheduler that decides ──▶ hosts
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.cli.target import DataDir, NatsUrl, nats_of_stack, with_options_of
from shared.config import CommonSettings
from shared.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DeadlineExceeded,
    ModelDoesNotFit,
    ModelLoadError,
    UnknownModel,
    error_from_code,
)
from shared.messages import GroupRecord
from shared.messages.registry import AdapterRecord, HostCommand, HostRecord, HostReply, ModelPlacement, ModelSpec
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.pins import promises_more
from shared.registry import check, nearest
from shared.registry_view import RegistryView, fold
from shared.tasks import cancel_all

HOST_TIMEOUT = 10.0  # seconds that a host has to answer a command; the work goes on behind it
LOOK_INTERVAL = 0.5  # seconds between two looks at most: a status depends on the time too
SETTLED = 3.0  # seconds after an order in which the scheduler may still say what it said of the model before

R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)

Watch = Callable[["ModelsSnapshot"], None]


@dataclass(slots=True, eq=False)
class ModelsSnapshot(RegistryView):
    """What is wanted and what is, at one moment."""

    adapters: dict[str, AdapterRecord] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Models of the registry, and those that groups serve without being in it."""
        served = {record.model for record in self.groups.values() if record.state != "gone"}
        return sorted(self.specs.keys() | served)

    def resolve(self, name: str) -> str:
        """The model that has this name or this alias. Raises `UnknownModel`, with the nearest names."""
        if name in self.names():
            return name
        for spec in self.specs.values():
            if name in spec.aliases:
                return spec.name
        raise self.unknown(name)

    def spec(self, name: str) -> ModelSpec:
        """Its entry in the registry. Raises `UnknownModel`."""
        model = self.resolve(name)
        if model in self.specs:
            return self.specs[model]
        raise UnknownModel(
            f"The model {model} is served by an executor that was started with it, and is not in the registry; add it "
            f"with `ryzanstein models add {model} --source ...` to have it managed."
        )

    def unknown(self, name: str) -> UnknownModel:
        every = [*self.names(), *(alias for spec in self.specs.values() for alias in spec.aliases)]
        near = nearest(name, every)
        if near:
            told = f"{' or '.join(near)} may be meant"
        else:
            told = f"there are: {', '.join(every[:30])}" if every else "there is none yet; add one with `models add`"
        return UnknownModel(f"There is no model {name!r} in the registry; {told}.")

    def adapter_counts(self) -> Counter[str]:
        """LoRA adapters of each model."""
        return Counter(record.model for record in self.adapters.values() if record.digest)

    def adapter_waits(self, record: AdapterRecord) -> str:
        """What a wanted adapter waits for, in words; empty: it is not."""
        if record.wanted is None:
            return ""
        if record.wanted.error:
            return f"could not be read and will be retried: {record.wanted.error.rstrip('.')}"
        base = record.wanted.model
        if base not in self.names():
            return f"waits for its base {base}, which is not in the registry"
        status = self.status(base)
        if status.ready:
            return "is being read"
        if status.state in ("downloading", "loading"):
            share = f" ({status.state} {status.progress:.0%})" if status.progress else f" ({status.state})"
            return f"waits for its base {base}{share}"
        if not self.taking_hosts():
            return f"waits for a host that has the files of its base {base}; none is there"
        why = f" ({status.reason.rstrip('.')})" if status.reason else ""
        return f"waits until a host has the files of its base {base}{why}"

    def check_pins(self, written: Iterable[ModelSpec], removed: Iterable[str] = ()) -> str:
        """A warning of what is not known about them, where these entries pin models; empty: all is well. Raises
        `ModelDoesNotFit` where they pin more than the hosts have."""
        new = {spec.name: spec for spec in written}
        if not any(promises_more(spec, self.specs.get(name)) for name, spec in new.items()):
            return ""
        pins = self.pins(new.values(), removed)
        if pins.refused:
            raise ModelDoesNotFit(pins.refused)
        return pins.warning


class ClusterModels:
    """One connection; `open` it first. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.registry = Bucket(bus, subjects.REGISTRY_BUCKET, ModelSpec)
        self.adapters = Bucket(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
        self._groups = Bucket(bus, subjects.GROUPS_BUCKET, GroupRecord)
        self._hosts = Bucket(bus, subjects.HOSTS_BUCKET, HostRecord)
        self._placements = Bucket(bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)

    async def open(self) -> None:
        buckets = (self.registry, self.adapters, self._groups, self._hosts, self._placements)
        await asyncio.gather(*(bucket.ensure() for bucket in buckets))

    async def read(self) -> ModelsSnapshot:
        return ModelsSnapshot(
            await self.registry.items(),
            await self._groups.items(),
            await self._hosts.items(),
            await self._placements.items(),
            adapters={name: one for name, one in (await self.adapters.items()).items() if stands(one)},
        )

    async def snapshots(self) -> AsyncGenerator[ModelsSnapshot, None]:
        """What is now, and again after each change, and every `LOOK_INTERVAL`. For ever; close it."""
        now, news = await self.read(), asyncio.Event()
        following = (
            _follow(self.registry, now.specs, news),
            _follow(self._groups, now.groups, news),
            _follow(self._hosts, now.hosts, news),
            _follow(self._placements, now.placements, news),
            _follow(self.adapters, now.adapters, news),
        )
        tasks = [asyncio.create_task(one) for one in following]
        try:
            while True:
                yield now
                news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), LOOK_INTERVAL)
        finally:
            await cancel_all(tasks)

    async def add(self, spec: ModelSpec) -> bool:
        """Writes a new entry; False: it stands there with these fields already. Raises `ConfigurationError` with all
        that is wrong with it, or where another one has the name."""
        now = await self.read()
        known = now.specs.get(spec.name)
        if known is None:
            _raise(check(spec, now.specs.values(), now.adapters))
            now.check_pins([spec])
            if await self.registry.create(spec.name, spec) is not None:
                return True
            known = (await self.read()).specs.get(spec.name)
        if known is not None and known.declared() == spec.declared():
            return False
        raise ConfigurationError(
            f"The model {spec.name} is already registered with different settings; change it with `ryzanstein models "
            f"set {spec.name}`, or remove it first."
        )

    async def change(self, name: str, made: Callable[[ModelSpec], ModelSpec]) -> tuple[ModelSpec, ModelSpec]:
        """Writes what `made` makes of the entry, over writes of others; returns it before and after. Raises
        `UnknownModel`, `ConfigurationError` with all that is wrong with it."""
        now = await self.read()

        def newest(known: KvEntry[ModelSpec] | None) -> ModelSpec:
            if known is None:
                raise now.unknown(name)
            changed = made(known.value)
            _raise(check(changed, now.specs.values(), now.adapters))
            now.check_pins([changed])
            return changed

        change = await self.registry.change(now.spec(name).name, newest)
        assert change.before is not None
        assert change.after is not None, "an entry was made of one"
        return change.before.value, change.after.value

    async def order(self, name: str, action: str, *, force: bool = False) -> ModelSpec:
        """Has the model loaded or unloaded from now on; an unload waits for what runs unless `force`."""
        at = time.time()

        def made(spec: ModelSpec) -> ModelSpec:
            return msgspec.structs.replace(spec, action=action, action_at=at, force=force)

        return (await self.change(name, made))[1]

    async def tell(self, instance: str, command: HostCommand) -> HostReply:
        """One host's answer; that it gave none is one too."""
        try:
            return await self.bus.request(subjects.host_control(instance), command, HostReply, timeout=HOST_TIMEOUT)
        except BrokerUnavailable as error:
            return HostReply(ok=False, code=error.code, error="The host does not answer; see `ryzanstein status`.")

    # --- waiting ---------------------------------------------------------------------------------

    async def wait_loaded(self, models: Sequence[str], since: float, timeout: float, report: Watch) -> ModelsSnapshot:
        """Returns when each of `models` takes requests; `since`: unix seconds of the order.

        Raises what has become of the first that cannot be loaded, and `DeadlineExceeded`.
        """

        def done(now: ModelsSnapshot) -> bool:
            missing = [model for model in models if not _is_loaded(now, model, since)]
            return not missing  # each was looked at: one that fails is told though another is not there yet

        return await self.wait(done, timeout, report, f"{', '.join(models)} could not be loaded")

    async def wait_unloaded(self, model: str, timeout: float, report: Watch) -> ModelsSnapshot:
        """Returns when no group serves it or is on its way to."""

        def done(now: ModelsSnapshot) -> bool:
            return not now.groups_of(model) and now.status(model).state not in ("loading", "downloading", "loaded")

        return await self.wait(done, timeout, report, f"{model} is still finishing its requests")

    async def wait_adapters(self, names: Sequence[str], timeout: float, report: Watch) -> ModelsSnapshot:
        """Returns when a host has read each of them. Raises why one could not, and `DeadlineExceeded`."""

        def done(now: ModelsSnapshot) -> bool:
            missing = [name for name in names if not _is_read(now, name)]
            return not missing

        what = f"{', '.join(names)} could not be read"
        return await self.wait(done, timeout, report, what, "`ryzanstein adapters list`")

    async def wait(
        self,
        done: Callable[[ModelsSnapshot], bool],
        timeout: float,
        report: Watch,
        what: str,
        see: str = "`ryzanstein models list`",
    ) -> ModelsSnapshot:
        """The first moment at which `done`; `timeout` in seconds, 0: for ever. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout or None), contextlib.aclosing(self.snapshots()) as moments:
                async for now in moments:
                    if done(now):
                        return now
                    report(now)
        except TimeoutError:
            pass
        raise DeadlineExceeded(f"{what} within {timeout:g} s; it goes on. See {see}.")


async def with_models(settings: CommonSettings, work: Callable[[ClusterModels], Awaitable[R]]) -> R:
    """`work` on a connection of its own. Raises `BrokerUnavailable`."""
    async with Bus.session(settings, "ryzanstein models") as bus:
        models = ClusterModels(bus)
        await models.open()
        return await work(models)


def run_on_models(data_dir: Path | None, nats_url: str, work: Callable[[ClusterModels], Awaitable[R]]) -> R:
    """`with_models` of the stack that a command is about. Raises `ConfigurationError` where there is none."""
    return asyncio.run(with_models(nats_of_stack(data_dir, nats_url), work))


def on_models(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A command that is given the models of a stack first, with the options that say which stack."""

    def run(data_dir: DataDir = None, nats_url: NatsUrl = "", **given: Any) -> None:
        run_on_models(data_dir, nats_url, lambda models: command(models, **given))

    return with_options_of(command, run)


async def _follow(bucket: Bucket[T], into: dict[str, T], news: asyncio.Event) -> None:
    def note(name: str, value: T | None) -> None:
        fold(into, name, None if isinstance(value, AdapterRecord) and not stands(value) else value)
        news.set()

    await bucket.follow(note)


def stands(record: AdapterRecord) -> bool:
    """Whether the name stands for an adapter, or is to: what was unloaded is kept for a while too."""
    return bool(record.digest or record.wanted)


def _is_read(now: ModelsSnapshot, name: str) -> bool:
    """Raises why it will not be."""
    record = now.adapters.get(name)
    if record is None:
        raise ConfigurationError(f"{name} was unloaded meanwhile by somebody else.")
    if record.wanted is not None and record.wanted.error:
        raise ModelLoadError(f"The adapter {name} could not be read: {record.wanted.error}")
    return record.wanted is None


def _is_loaded(now: ModelsSnapshot, model: str, since: float) -> bool:
    """Raises why it will not be."""
    status = now.status(model)
    if status.ready:
        return True
    spec = now.specs.get(model)
    if spec is None or (spec.action == "unload" and spec.action_at >= since):
        raise ConfigurationError(f"{model} was {'unloaded' if spec else 'removed'} meanwhile by somebody else.")
    if status.state == "failed":
        raise ModelLoadError(f"{model} could not be loaded on {', '.join(status.hosts)}: {status.reason}")
    placement = now.placements.get(model)
    if placement is not None and placement.code and status.state != "loading" and time.time() - since > SETTLED:
        raise error_from_code(placement.code, placement.reason)
    return False


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigurationError("\n  ".join(problems))
