"""The whole house as separate processes: any number of each service, each to be killed, stopped or cut off.

NATS ── gateway-0, gateway-1 ── scheduler-0, scheduler-1 ── health-monitor-0, -1 ── executor-0, executor-1
                                                                                   └ rank 0, rank 1 each
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.cli.serve import MODULES
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from shared.process import die_with_parent
from tests.chaos.broker import Broker, SmallDisk
from tests.chaos.links import Direct, Link, NamespaceLink, Pass, ProxyLink, namespaces_work
from tests.chaos.watch import Watch

READY_TIMEOUT = 120.0
QUOTA = 24 << 20
# What streams set aside of a store that can be filled; with the journal's, half of it.
SMALL_STORES = {
    f"RYZANSTEIN_{name}_MAX_BYTES": str(1 << 20) for name in ("RESPONSE", "RECORDS", "FILES", "TRAINING", "ADAPTERS")
}
SERVICES = ("health-monitor", "scheduler", "gateway", "executor")


@dataclass(frozen=True)
class Plan:
    """What a house is made of."""

    gateways: int = 2
    schedulers: int = 2
    monitors: int = 2
    executors: int = 2
    tp: int = 2
    step_ms: float = 20.0
    executor_arguments: Sequence[str] = ()  # in place of the stub engine's
    cuttable: Sequence[str] = ()  # instances whose way to NATS can be cut
    # What changes the broker's messages to an instance.
    mischief: dict[str, Pass] = field(default_factory=dict)
    store: str = ""  # of NATS: `tmpfs` for one that can be filled, `quota` for one that NATS itself limits
    environment: dict[str, str] = field(default_factory=dict)

    def count(self, service: str) -> int:
        return {
            "gateway": self.gateways,
            "scheduler": self.schedulers,
            "health-monitor": self.monitors,
            "executor": self.executors,
        }[service]


class Member:
    """One service's process. May be started again once it has ended, under its name and port."""

    def __init__(self, service: str, instance: str, arguments: list[str], log: Path, link: Link) -> None:
        self.service = service
        self.instance = instance
        self.arguments = arguments
        self.log = log
        self.link = link
        self.stopped = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, environment: dict[str, str], nats_port: int) -> None:
        url = await self.link.prepare(nats_port)
        own = {"RYZANSTEIN_NATS_URL": url, "RYZANSTEIN_INSTANCE": self.instance}
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.link.prefix,
                sys.executable,
                "-m",
                MODULES[self.service],
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, **own},
                preexec_fn=die_with_parent(),
            )
        self.stopped = False
        await self.link.attach(self.pid)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self.stopped = number is signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self, seconds: float = 60) -> int:
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), seconds)

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; wakes it before if it was stopped."""
        if self.running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                await self.ended(30)
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self.ended()
        await self.link.close()


class House:
    """Use as an asynchronous context manager: nothing is left running."""

    def __init__(self, directory: Path, plan: Plan | None = None) -> None:
        self.directory = directory
        self.plan = plan or Plan()
        self.members: dict[str, Member] = {}
        self.disk = SmallDisk(directory / "nats")
        self.cut_with = ""  # how links are cut: `namespace` or `proxy`
        self._broker: Broker | None = None
        self._bus: Bus | None = None
        self._watch: Watch | None = None
        self._environment: dict[str, str] = {}
        self._addresses: dict[str, str] = {}  # of gateways, as they were heard last

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def bus(self) -> Bus:
        assert self._bus is not None
        return self._bus

    @property
    def watch(self) -> Watch:
        assert self._watch is not None
        return self._watch

    async def __aenter__(self) -> "House":
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for service in ("gateway", "scheduler", "executor", "health-monitor"):
            await asyncio.gather(*(m.end() for m in self.members.values() if m.service == service))
        if self._watch is not None:
            await self._watch.stop()
        if self._bus is not None:
            await self._bus.close()
        if self._broker is not None:
            await self._broker.down()
        self.disk.unmount()

    async def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.plan.store == "tmpfs":
            self.disk.mount()
        self._broker = Broker(self.directory / "nats", quota=QUOTA if self.plan.store == "quota" else 0)
        await self._broker.up()
        common = self._broker.settings(journal_max_bytes=8 << 20 if self.plan.store else 1 << 30)
        self._environment = {
            "RYZANSTEIN_NATS_USER": common.nats_user,
            "RYZANSTEIN_NATS_PASSWORD": common.nats_password.get_secret_value(),
            "RYZANSTEIN_JOURNAL_MAX_BYTES": str(common.journal_max_bytes),
            "RYZANSTEIN_LOG_FORMAT": "json",
            **(SMALL_STORES if self.plan.store else {}),
            **self.plan.environment,
        }
        self._bus = await Bus.connect(common, "chaos")
        await ensure_streams(self._bus)
        self._watch = Watch(self._bus)
        await self._watch.start()
        if self.plan.cuttable:
            self.cut_with = "namespace" if await namespaces_work() else "proxy"
        for service in SERVICES:
            for number in range(self.plan.count(service)):
                self._add(service, number)
        for member in self.members.values():
            await self.start(member.instance)
        await self.all_ready()

    def _add(self, service: str, number: int, group: str = "", executor_arguments: Sequence[str] = ()) -> None:
        instance = f"{service}-{number}"
        link = self._link(instance)
        arguments = ["--host", link.host]
        if service == "gateway":
            arguments += ["--port", "0"]
        if service == "executor":
            arguments += ["--group", group or f"group-{number}", "--tp", str(self.plan.tp)]
            arguments += (
                executor_arguments
                or self.plan.executor_arguments
                or (["--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", str(self.plan.step_ms)])
            )
        log = self.directory / f"{instance}.log"
        self.members[instance] = Member(service, instance, arguments, log, link)

    def _link(self, instance: str) -> Link:
        if instance in self.plan.mischief:
            return ProxyLink(self.plan.mischief[instance])
        if instance not in self.plan.cuttable:
            return Direct()
        return NamespaceLink() if self.cut_with == "namespace" else ProxyLink()

    # --- what tests do with it -------------------------------------------------------------------

    async def start(self, instance: str) -> None:
        """Starts a member, for the first time or again; a gateway keeps its port."""
        member = self.members[instance]
        beat = self.watch.beats.pop(instance, None)
        if member.service == "gateway" and beat is not None:
            self._addresses[instance] = beat.address
            member.arguments[member.arguments.index("--port") + 1] = beat.address.rpartition(":")[2]
        await member.start(self._environment, self.broker.port)

    async def add_executor(self, group: str) -> str:
        """One more, for `group`; returns its instance once it serves."""
        number = sum(member.service == "executor" for member in self.members.values())
        self._add("executor", number, group)
        await self.start(f"executor-{number}")
        await self.ready(f"executor-{number}")
        return f"executor-{number}"

    @contextlib.asynccontextmanager
    async def executors(self, numbers: Sequence[int], arguments: Sequence[str]) -> AsyncIterator[list[str]]:
        """Executors with `arguments`, for as long as the context is open: their instances, once they serve."""
        names = [f"executor-{number}" for number in numbers]
        try:
            for number, name in zip(numbers, names, strict=True):
                self._add("executor", number, executor_arguments=arguments)
                await self.start(name)
            await asyncio.gather(*map(self.ready, names))
            yield names
        finally:
            await asyncio.gather(*(self.members[name].end() for name in names if name in self.members))
            for name in names:
                self.members.pop(name, None)

    async def ready(self, instance: str, seconds: float = READY_TIMEOUT) -> None:
        """Until its heartbeat says so, of its present process."""
        member = self.members[instance]

        def find() -> bool:
            assert member.running, f"{instance} has ended:\n{tail(member.log)}"
            beat = self.watch.beats.get(instance)
            if beat is None or beat.pid != member.pid or beat.state != "ready":
                return False
            return beat.group is None or beat.group.state == "ready"

        await self.watch.until(find, seconds, f"{instance} is ready")

    async def all_ready(self) -> None:
        await asyncio.gather(*(self.ready(name) for name, m in self.members.items() if m.running))

    def addresses(self) -> list[tuple[str, str]]:
        """(instance, host:port) of the gateways, those that are away included."""
        for name, beat in self.watch.beats.items():
            if beat.service == "gateway":
                self._addresses[name] = beat.address
        return [(name, self.members[name].link.reach(of)) for name, of in self._addresses.items()]

    def ranks(self, instance: str) -> list[int]:
        """Process ids of the ranks of an executor, rank 0 first."""
        beat = self.watch.beats[instance]
        assert beat.group is not None
        return [rank.pid for rank in sorted(beat.group.ranks, key=lambda rank: rank.rank)]

    def epoch(self, instance: str) -> int:
        beat = self.watch.beats[instance]
        assert beat.group is not None
        return beat.group.epoch

    def work(self, executor: str) -> int:
        """Requests that a ring has, by its last beat."""
        beat = self.watch.beats.get(executor)
        return beat.group.load.running + beat.group.load.waiting if beat is not None and beat.group else 0

    def all_work(self) -> bool:
        """Whether a fault of any ring would hit somebody."""
        return all(self.work(name) > 0 for name, m in self.members.items() if m.service == "executor")

    def memory(self, instance: str) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.members[instance].pid).memory_info().rss)

    def logs(self) -> str:
        """The last lines of every log."""
        return "\n".join(f"--- {path.name}\n{tail(path)}" for path in sorted(self.directory.glob("*.log")))


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def since(start: float) -> float:
    """Seconds since `start` of `time.monotonic`."""
    return time.monotonic() - start
