"""Small worlds, each a function that says what was seen: run in a process of their own, whose clock is not pytest's.

python -m tests.unit.simulation.worlds SEED NAME...    prints what they saw, as JSON
"""

import asyncio
import contextlib
import datetime
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.simulation.core import loop, machine, reproducible
from tests.simulation.core.loop import Stuck
from tests.simulation.core.processes import CURRENT, NotSimulated, Process
from tests.simulation.core.transport import HIGH, KERNEL
from tests.simulation.core.world import World

Main = Callable[[], Coroutine[Any, Any, Any]]
AT_IMPORT: list[random.Random] = []  # as modules make one when they are imported


def started(world: World, name: str, main: Main) -> Process:
    return world.start(name, world.host(name), main)


class Talk(asyncio.Protocol):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard, self.told = b"", []
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def pause_writing(self) -> None:
        self.told.append("full")

    def resume_writing(self) -> None:
        self.told.append("room")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append(type(exc).__name__ if exc else "end")


class Pair:
    """Two processes with a connection: `near` of the first, `far` of the second, which listens."""

    def __init__(self, world: World) -> None:
        self.world, self.near, self.far = world, Talk(), Talk()
        self.second = started(world, "second", self._listen)
        self.first: Process = self.second

    async def _listen(self) -> None:
        await asyncio.get_running_loop().create_server(lambda: self.far, "", 7)

    async def connect(self) -> None:
        async def main() -> None:
            await asyncio.get_running_loop().create_connection(lambda: self.near, "second", 7)
            connected.set_result(None)

        await asyncio.sleep(0.1)
        connected = self.world.loop.create_future()
        self.first = started(self.world, "first", main)
        await connected
        await asyncio.sleep(0.1)  # the second one has heard of it

    def write(self, data: bytes) -> None:
        self.first.context().run(self.near.transport.write, data)

    def answer(self, data: bytes) -> None:
        self.second.context().run(self.far.transport.write, data)


def connected(seed: int, then: Callable[[World, Pair], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        pair = Pair(world)
        await pair.connect()
        return await then(world, pair)

    with World(seed) as world:
        return world.run(main())


# --- processes ---------------------------------------------------------------------------------------


def dead_code_never_runs(seed: int) -> Any:
    ran: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(1)
        finally:
            ran.append("generator")

    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ran.append(name)

    async def victim() -> None:
        asyncio.create_task(waits("child"))  # noqa: RUF006  # nobody but its timer holds it
        asyncio.get_running_loop().call_later(2, ran.append, "timer")
        try:
            async for _ in numbers():
                pass
        finally:
            ran.append("main")

    async def main() -> None:
        process = started(world, "victim", victim)
        await asyncio.sleep(1.5)
        world.pause(process)
        world.kill(process)
        await asyncio.sleep(200)
        gc.collect()

    with World(seed) as world:
        world.run(main())
        return {"ran": list(ran), "failures": len(world.failures)}


def failures_are_told(seed: int) -> Any:
    async def broken() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: 1 / 0)
        loop.set_exception_handler(lambda loop, context: own.append(CURRENT.get().name))
        await asyncio.sleep(1)
        raise ValueError("main")

    async def main() -> None:
        first, second = started(world, "first", broken), started(world, "second", broken)
        await asyncio.sleep(0.5)
        world.kill(second)
        await asyncio.sleep(1)
        assert first.alive

    own: list[str] = []
    with World(seed) as world:
        world.run(main())
        told = sorted((one.process, type(one.error).__name__) for one in world.failures)
        return {"told": told, "own": sorted(own)}


def processes_exit(seed: int) -> Any:
    def ends(how: Callable[[], Any]) -> Main:
        async def main() -> None:
            await asyncio.sleep(1)
            how()
            await asyncio.sleep(1000)

        return main

    def handled() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, 7)

    async def main() -> Any:
        ways = {
            "exit": lambda: sys.exit(3),
            "_exit": lambda: os._exit(4),
            "own signal": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "handler": handled,
            "none": lambda: None,
        }
        all_ = {name: started(world, name, ends(how)) for name, how in ways.items()}
        for name, process in all_.items():
            process.on_end = lambda name=name: ended.append(name)
        await asyncio.sleep(5)
        for name in ("handler", "none"):
            world.signal(all_[name], signal.SIGTERM)
        await asyncio.sleep(5)
        return {name: process.exit_code for name, process in all_.items()}

    ended: list[str] = []
    with World(seed) as world:
        return {"codes": world.run(main()), "ended": sorted(ended)}


def paused_processes_wait(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        world.pause(pair.second)
        world.pause(pair.second)
        pair.write(b"hello")
        await asyncio.sleep(10)
        before = pair.far.heard
        world.resume(pair.second)
        await asyncio.sleep(1)
        return [before.decode(), pair.far.heard.decode()]

    return connected(seed, then)


def starved_processes_are_slow(seed: int) -> Any:
    async def counts() -> None:
        while True:
            done.append(world.now)
            await asyncio.sleep(0)
            if len(done) % 10 == 0:
                await asyncio.sleep(1)

    async def main() -> Any:
        process = started(world, "counts", counts)
        await asyncio.sleep(0.5)
        quick = len(done)
        world.starve(process, 0.2)
        await asyncio.sleep(1.5)
        slow = len({*done})
        world.pause(process)
        await asyncio.sleep(5)
        stopped = len({*done}) == slow
        world.resume(process)
        world.starve(process, 0)
        await asyncio.sleep(10)
        return {"quick": quick, "slow": 3 < slow < 20, "stopped": stopped, "again": len(done) >= 80}

    done: list[float] = []
    with World(seed) as world:
        return world.run(main())


def faults_fall_between_two_steps(seed: int) -> Any:
    async def counts() -> None:
        for number in range(10):
            done.append(number)
            await asyncio.sleep(0)

    async def main() -> Any:
        process = started(world, "counts", counts)
        reached = await world.after_steps(process, 4, 1.0)
        world.kill(process)
        late = await world.after_steps(started(world, "idle", lambda: asyncio.sleep(100)), 50, 1.0)
        return {"done": done, "reached": reached, "late": late, "now": world.now}

    done: list[int] = []
    with World(seed) as world:
        return world.run(main())


# --- the machine ---------------------------------------------------------------------------------------


def threads_take_virtual_time(seed: int) -> Any:
    def works(seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
        return threading.Event().wait(1.0) or seconds

    async def main() -> Any:
        began, real = world.now, machine.real_time()
        first = await asyncio.to_thread(works, 2.0)
        with ThreadPoolExecutor(1) as pool:
            second = await asyncio.wrap_future(pool.submit(works, 3.0))
        took = world.now - began
        return {"results": [first, second], "took": round(took, 1), "quick": machine.real_time() - real < 1.0}

    with World(seed) as world:
        return world.run(main())


def asks_a_program() -> str:
    return subprocess.run(["echo", "allowed"], check=True, capture_output=True).stdout.decode()


def what_is_not_simulated_is_refused(seed: int) -> Any:
    async def asks() -> None:
        loop = asyncio.get_running_loop()
        for ask in (
            lambda: time.sleep(1),
            lambda: threading.Thread(target=print, name="writer").start(),
            lambda: subprocess.run(["true"], check=True),
            lambda: loop.add_reader(0, print),
            lambda: threading.Condition().wait(),
        ):
            try:
                ask()
            except NotSimulated as error:
                told.append(str(error))
        with contextlib.suppress(NotSimulated):
            await asyncio.create_subprocess_exec("true")
            told.append("a process was started")

    async def main() -> None:
        started(world, "curious", asks)
        await asyncio.sleep(1)
        with machine.allowed():
            told.append(asks_a_program())

    told: list[str] = []
    with World(seed) as world:
        world.run(main())
        return told


def machines_are_told_apart(seed: int) -> Any:
    async def looks() -> None:
        await asyncio.sleep(100)
        seen[CURRENT.get().name] = [
            socket.gethostname(),
            os.cpu_count() == len(os.sched_getaffinity(0)) == 2,
            os.getpid(),
            round(time.time() - machine.EPOCH, 3),
            datetime.datetime.now(datetime.UTC).timestamp() == time.time(),
            time.gmtime().tm_year,
            round(time.monotonic(), 3),
        ]

    async def main() -> None:
        started(world, "true", looks)
        world.jump(world.host("ahead"), 30)
        world.drift(world.host("ahead"), 0.01)
        started(world, "ahead", looks)
        await asyncio.sleep(200)

    seen: dict[str, Any] = {}
    with World(seed) as world:
        world.run(main())
    return seen


def randomness_is_the_seeds(seed: int) -> Any:
    async def main() -> Any:
        drawn = [random.random(), random.Random().random(), AT_IMPORT[0].random(), str(uuid.uuid4())]
        return [*drawn, os.urandom(4).hex()]

    def once(seed: int) -> Any:
        with World(seed) as world:
            return world.run(main())

    return {"same": once(seed) == once(seed), "other": once(seed) != once(seed + 1)}


# --- the network ---------------------------------------------------------------------------------------


def cuts_heal(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        network, seen = world.network, []
        network.cut("first", "second", both=False)
        pair.write(b"one ")
        pair.answer(b"back")
        await asyncio.sleep(20)
        seen.append([pair.far.heard.decode(), pair.near.heard.decode()])
        network.heal("first", "second")
        await asyncio.sleep(30)
        network.isolate("second")
        pair.write(b"two ")
        await asyncio.sleep(1)
        seen.append([pair.far.heard.decode(), pair.near.told])
        network.rejoin("second")
        await asyncio.sleep(30)
        network.slow("first", "second", 5.0)
        pair.write(b"three")
        await asyncio.sleep(1)
        slow = pair.far.heard
        await asyncio.sleep(30)
        return [*seen, slow.decode(), pair.far.heard.decode()]

    return connected(seed, then)


def what_was_aborted_is_not_sent_again(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        world.network.cut("first", "second")
        pair.write(b"never")
        pair.first.context().run(pair.near.transport.abort)
        world.network.heal("first", "second")
        await asyncio.sleep(60)
        pair.answer(b"are you there?")
        await asyncio.sleep(1)
        return [pair.far.heard.decode(), pair.far.told]

    return connected(seed, then)


def silence_ends_at_last(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        world.network.cut("first", "second")
        pair.write(b"lost")
        await asyncio.sleep(900)
        before = list(pair.near.told)
        await asyncio.sleep(60)
        world.network.cut("simulator", "second")
        began = world.now
        try:
            await asyncio.open_connection("second", 7)
        except TimeoutError:
            return [before, pair.near.told, round(world.now - began)]

    return connected(seed, then)


def nobody_listens(seed: int) -> Any:
    async def main() -> Any:
        told = []
        world.host("there")
        for host, port in (("there", 9), ("nowhere", 9)):
            try:
                await asyncio.open_connection(host, port)
            except OSError as error:
                told.append(type(error).__name__)
        return told

    with World(seed) as world:
        return world.run(main())


def hosts_lose_power(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        host, seen = pair.second.host, []
        host.disk["written"] = 1
        if seed % 2:
            pair.write(b"anybody?")
        world.lose_power(host)
        await asyncio.sleep(60)
        if not seed % 2:
            pair.write(b"anybody?")
        await asyncio.sleep(60)
        seen += pair.near.told
        world.restore_power(host)
        await asyncio.sleep(60)
        return [seen, pair.near.told, host.disk, host.power_losses]

    return connected(seed, then)


def hosts_lose_power_with_bytes_under_way(seed: int) -> Any:
    return hosts_lose_power(2 * seed + 1)


def slow_readers_fill_the_writer(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        world.pause(pair.second)
        for _ in range(KERNEL // 1000):
            pair.write(bytes(1000))
        unread = [pair.near.transport.get_write_buffer_size(), list(pair.near.told)]
        for _ in range(2 * HIGH // 1000):
            pair.write(bytes(1000))
        held = pair.near.transport.get_write_buffer_size() > HIGH
        await asyncio.sleep(1)
        world.resume(pair.second)
        await asyncio.sleep(1)
        return [unread, held, pair.near.told, pair.near.transport.get_write_buffer_size()]

    return connected(seed, then)


def killed_writers_leave_what_was_written_or_its_beginning(seed: int) -> Any:
    written = b"0123456789" * 3

    async def then(world: World, pair: Pair) -> Any:
        for at in range(0, len(written), 10):
            pair.write(written[at : at + 10])
            await asyncio.sleep(0.00005)
        world.kill(pair.first)
        await asyncio.sleep(1)
        return [written.startswith(pair.far.heard), len(pair.far.heard), pair.far.told]

    return [connected(seed + number, then) for number in range(40)]


def connections_break(seed: int) -> Any:
    async def then(world: World, pair: Pair) -> Any:
        pair.write(b"one")
        await asyncio.sleep(1)
        (end,) = world.network.connections("first", "second")
        world.network.break_connection(end)
        pair.write(b"two")
        await asyncio.sleep(1)
        return [pair.far.heard.decode(), pair.near.told, pair.far.told, len(world.network.connections())]

    return connected(seed, then)


# --- the run ---------------------------------------------------------------------------------------------


def what_spins_or_waits_for_nothing_is_seen(seed: int) -> Any:
    async def spins() -> None:
        await asyncio.sleep(1)
        while True:  # noqa: ASYNC110  # that is the point
            await asyncio.sleep(0)

    async def spinning() -> None:
        started(world, "spinner", spins)
        await asyncio.sleep(3)

    async def idle() -> None:
        await asyncio.Event().wait()

    loop.TURNS_AT_ONE_TIME = 10_000
    told = []
    for main in (spinning, idle):
        with World(seed) as world:
            try:
                world.run(main())
            except Stuck as stuck:
                told.append(str(stuck))
    return told


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each line with what depends on the order of a set of tasks, and on randomness."""
    while line := await reader.readline():
        some = {asyncio.create_task(asyncio.sleep(random.random())) for _ in range(5)}
        done, _ = await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
        writer.write(line + f"{[task in done for task in some]} {uuid.uuid4()}\n".encode())


async def asks() -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("server", 5)
            writer.write(f"{set('abcdefgh')}\n".encode())
            while await reader.readline() and await reader.readline():
                await asyncio.sleep(0.2)
                writer.write(f"{set('abcdefgh')}\n".encode())
        await asyncio.sleep(1)


async def serves() -> None:
    await asyncio.start_server(answers, "", 5)
    await asyncio.Event().wait()


def memory_is_given_back(seed: int) -> Any:
    async def main(world: World) -> None:
        server = started(world, "server", serves)
        await asyncio.sleep(1)
        started(world, "client", asks)
        await asyncio.sleep(5)
        world.kill(server)
        await asyncio.sleep(5)

    def once() -> int:
        with World(seed) as world:
            world.run(main(world))
        return len(gc.get_objects())

    counts = [once() for _ in range(30)]
    return max(counts[10:]) - counts[10]


def digest(seed: int) -> Any:
    """Of clients that ask a server which is killed again and again."""

    async def main() -> None:
        for number in range(3):
            world.start(f"client-{number}", world.host(f"client-{number}"), asks)
        for _ in range(10):
            server = started(world, "server", serves)
            await asyncio.sleep(20)
            world.kill(server)
            await asyncio.sleep(1)

    with World(seed) as world:
        world.run(main())
        return {"digest": world.trace.digest(), "count": world.trace.count, "failures": len(world.failures)}


def main(seed: str, *names: str) -> None:
    reproducible.ensure()
    machine.install()
    AT_IMPORT.append(random.Random())
    sys.stdout.write(json.dumps({name: globals()[name](int(seed)) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
