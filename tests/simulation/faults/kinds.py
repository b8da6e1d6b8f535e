"""Every kind of fault: whom it may befall, how long, how it is done to a world and how it is undone.

    process, host   kill, pause, power_loss, skew, clock_jump
    network         cut, cut_one_way, isolate, slow, lossy, reset
    executor        rank_crash, rank_fault, rank_hang, trainer_crash
    engine          engine_crash, engine_fault, engine_hang, engine_stall
    broker          store_full, stream_full, lost_acks, slow_consumer
    operator        drain, rolling_restart, upgrade, new_key, lower_limits
    tenant          flood, poison_line, full_quotas

A process that was killed is started again by the deployment, as its supervisor would.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.simulation.core.processes import Host, Process
from tests.simulation.core.world import World
from tests.simulation.faults.schedule import Fault, Unusable
from tests.simulation.faults.system import System

Act = Callable[[System, Fault], Awaitable[None]]
Range = tuple[float, float]
# What a service that it befalls may refuse for now: whatever it is asked, what is beyond a limit (429), nothing.
Refuses = Literal["anything", "limits", "nothing"]
SERVICES = ("gateway", "scheduler", "health-monitor", "executor")


@dataclass(frozen=True)
class Kind:
    name: str
    story: str  # what has happened, of a target
    roles: tuple[str, ...]  # whose instances it may befall; empty: the deployment's as a whole
    act: Act
    undo: Act | None = None
    # Virtual seconds, from and to, unless the scenario says otherwise; zero: it is not undone.
    lasts: Range = (0.0, 0.0)
    parameters: dict[str, Range] = field(default_factory=dict)  # numbers that are drawn: names, from and to
    others: tuple[str, ...] = ()  # roles of the instance at the other end of a link: the parameter `other`
    between_awaits: bool = False  # whether it may be timed by the target's own steps
    refuses: Refuses = "anything"


def _at_once(act: Callable[[System, Fault], object]) -> Act:
    """Of what takes no time."""

    async def acted(system: System, fault: Fault) -> None:
        act(system, fault)

    return acted


def _of_process(act: Callable[[World, Process, Fault], None]) -> Act:
    """Of what is done to the target's process, while it has one."""

    async def acted(system: System, fault: Fault) -> None:
        if (process := system.process(fault.target)) is not None:
            act(system.world, process, fault)

    return acted


def _host(system: System, name: str) -> str:
    """The name of the host that the instance is on, or was on."""
    process = system.process(name)
    return process.host.name if process is not None else name


def _host_of(system: System, fault: Fault) -> Host:
    return system.world.host(_host(system, fault.target))


def _ends(system: System, fault: Fault) -> tuple[str, str]:
    return _host(system, fault.target), _host(system, str(fault.parameters["other"]))


def _number(fault: Fault, name: str, default: float = 0.0) -> float:
    """Of its parameters."""
    return float(fault.parameters.get(name, default))


_kill = _of_process(lambda world, process, fault: world.kill(process))
_pause = _of_process(lambda world, process, fault: world.pause(process))
_resume = _of_process(lambda world, process, fault: world.resume(process))
_starve = _of_process(lambda world, process, fault: world.starve(process, _number(fault, "seconds")))
_feed = _of_process(lambda world, process, fault: world.starve(process, 0.0))
_power_loss = _at_once(lambda system, fault: system.world.lose_power(_host_of(system, fault)))
_power_back = _at_once(lambda system, fault: system.world.restore_power(_host_of(system, fault)))
_skew = _at_once(lambda system, fault: system.world.jump(_host_of(system, fault), _number(fault, "seconds")))
_unskew = _at_once(lambda system, fault: system.world.jump(_host_of(system, fault), -_number(fault, "seconds")))
_cut = _at_once(lambda system, fault: system.world.network.cut(*_ends(system, fault)))
_heal = _at_once(lambda system, fault: system.world.network.heal(*_ends(system, fault)))
_isolate = _at_once(lambda system, fault: system.world.network.isolate(_host(system, fault.target)))
_rejoin = _at_once(lambda system, fault: system.world.network.rejoin(_host(system, fault.target)))
_slow = _at_once(
    lambda system, fault: system.world.network.slow(*_ends(system, fault), _number(fault, "seconds", 0.05))
)
_fast = _at_once(lambda system, fault: system.world.network.slow(*_ends(system, fault), 0.0))
_lossy = _at_once(lambda system, fault: system.world.network.lossy(*_ends(system, fault), _number(fault, "share", 0.1)))
_lossless = _at_once(lambda system, fault: system.world.network.lossy(*_ends(system, fault), 0.0))


async def _cut_one_way(system: System, fault: Fault) -> None:
    one, other = _ends(system, fault)
    if _number(fault, "away") < 0.5:
        one, other = other, one
    system.world.network.cut(one, other, both=False)


async def _reset(system: System, fault: Fault) -> None:
    """One connection of the target's host, by its number among them."""
    ends = system.world.network.connections(_host(system, fault.target))
    if ends:
        number = int(_number(fault, "number") * len(ends))
        system.world.network.break_connection(ends[min(number, len(ends) - 1)])


async def _operate(system: System, fault: Fault) -> None:
    await system.operate(fault.fault, fault.target, fault.parameters)


async def _end(system: System, fault: Fault) -> None:
    await system.operate(f"end_{fault.fault}", fault.target, fault.parameters)


BROKER = ("broker",)
ALL = (*SERVICES, "broker")
_PROCESSES = (
    Kind("kill", "is killed (SIGKILL)", ALL, _kill, between_awaits=True),
    Kind("pause", "is stopped (SIGSTOP)", ALL, _pause, _resume, (0.2, 12.0), between_awaits=True),
    Kind("starve", "waits for its cores", ALL, _starve, _feed, (1.0, 20.0), {"seconds": (0.005, 0.3)}),
    Kind("power_loss", "loses power with its whole host", ALL, _power_loss, _power_back, (1.0, 20.0)),
    Kind("skew", "has a clock that is off", ALL, _skew, _unskew, (5.0, 60.0), {"seconds": (-20.0, 20.0)}),
    Kind("clock_jump", "has its clock of the day set", ALL, _skew, parameters={"seconds": (-5.0, 5.0)}),
)
_NETWORK = (
    Kind("cut", "is cut off", SERVICES, _cut, _heal, (0.2, 15.0), {}, BROKER, between_awaits=True),
    Kind(
        "cut_one_way",
        "is not heard, or hears not",
        SERVICES,
        _cut_one_way,
        _heal,
        (0.2, 15.0),
        {"away": (0, 1)},
        BROKER,
    ),
    Kind("isolate", "is cut off from everybody", ALL, _isolate, _rejoin, (0.2, 15.0), between_awaits=True),
    Kind("slow", "has a slow line", SERVICES, _slow, _fast, (1.0, 20.0), {"seconds": (0.01, 0.5)}, BROKER),
    Kind(
        "lossy",
        "has a line that loses segments",
        SERVICES,
        _lossy,
        _lossless,
        (1.0, 20.0),
        {"share": (0.01, 0.4)},
        BROKER,
    ),
    Kind("reset", "has a connection reset", ALL, _reset, parameters={"number": (0.0, 1.0)}, between_awaits=True),
)
_RINGS = (
    Kind("rank_crash", "loses its ranks", ("executor",), _operate),
    Kind("rank_fault", "has ranks that end by a fault of their own (SIGSEGV)", ("executor",), _operate),
    Kind("trainer_crash", "loses its trainer", ("executor",), _operate),
    Kind("rank_hang", "has a rank that hangs", ("executor",), _operate, _end, (1.0, 12.0)),
)
# Nothing happens to an executor whose own ring computes.
_ENGINES = (
    Kind("engine_crash", "loses its engine", ("executor",), _operate),
    Kind("engine_fault", "has an engine that ends by a fault of its own (SIGSEGV)", ("executor",), _operate),
    Kind("engine_hang", "has an engine that is stopped (SIGSTOP)", ("executor",), _operate, _end, (1.0, 40.0)),
    Kind("engine_stall", "has an engine that computes no step", ("executor",), _operate, _end, (1.0, 40.0)),
)
_BROKER = (
    Kind("store_full", "has no room on its disk", BROKER, _operate, _end, (1.0, 15.0)),
    Kind(
        "stream_full",
        "has a stream whose quota is reached",
        BROKER,
        _operate,
        _end,
        (1.0, 15.0),
        {"number": (0.0, 1.0)},
    ),
    Kind(
        "lost_acks",
        "loses acknowledgements, and delivers again what it takes for unacknowledged",
        BROKER,
        _operate,
        _end,
        (1.0, 20.0),
        {"share": (0.2, 1.0)},
        refuses="nothing",
    ),
    Kind("slow_consumer", "closes a connection whose client reads too slowly", SERVICES, _operate),
)


def _asked(name: str, story: str, parameters: dict[str, Range], refuses: Refuses = "nothing") -> Kind:
    """What somebody does to the deployment as a whole."""
    return Kind(name, story, (), _operate, parameters=parameters, refuses=refuses)


_OPERATOR = (
    Kind("drain", "is asked to end (SIGTERM), and is started again", SERVICES, _operate),
    Kind("rolling_restart", "is restarted one instance after another", (), _operate),
    Kind("upgrade", "gets the next version one instance after another", (), _operate),
    _asked(
        "new_key",
        "gives the clients of a tenant another key, and the one that they had is revoked",
        {"tenant": (0.0, 1.0)},
    ),
    Kind(
        "lower_limits",
        "lowers the limits of a tenant's key",
        (),
        _operate,
        _end,
        (5.0, 40.0),
        {"tenant": (0.0, 1.0), "requests": (5.0, 60.0), "concurrent": (1.0, 3.0)},
        refuses="limits",
    ),
)
_TENANTS = (
    _asked(
        "flood",
        "is sent many requests with large prompts at once by a tenant",
        {"tenant": (0.0, 1.0), "requests": (40.0, 80.0)},
    ),
    _asked(
        "poison_line",
        "is sent a batch with a line that ends every gateway that computes it",
        {"tenant": (0.0, 1.0), "lines": (2.0, 40.0)},
        refuses="anything",
    ),
    _asked("full_quotas", "has a tenant that fills its quotas", {"tenant": (0.0, 1.0)}),
)
_ALL = (*_PROCESSES, *_NETWORK, *_RINGS, *_ENGINES, *_BROKER, *_OPERATOR, *_TENANTS)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_of(name: str) -> Kind:
    """Raises `Unusable`, which names what is known."""
    if name not in KINDS:
        raise Unusable(f"There is no fault {name!r}; known are {', '.join(sorted(KINDS))}.")
    return KINDS[name]
