"""Runs of simulated executors, each in a process of its own: `python -m tests.unit.simulation.executor_runs NAME SEED`
prints what came of it as one JSON line."""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tests.simulation.core import reproducible
from tests.simulation.core.world import World
from tests.simulation.deployment import install

if __name__ == "__main__":
    reproducible.ensure()
install()

from tests.chaos.expected import stub_text  # noqa: E402  # after the stand-ins
from tests.simulation.clients.ask import Refused, Surroundings  # noqa: E402
from tests.simulation.clients.client import Plan  # noqa: E402
from tests.simulation.clients.history import History  # noqa: E402
from tests.simulation.clients.jobs import Training  # noqa: E402
from tests.simulation.core.processes import Process  # noqa: E402
from tests.simulation.deployment import logs  # noqa: E402
from tests.simulation.deployment.deployment import Deployment  # noqa: E402

TOKENS = 60
REGISTRY = "/v1/registry/models"


class House:
    """A small deployment, and one client."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.deployment = Deployment(world)
        self.told: list[str] = []
        self.client = Surroundings(lambda: ["gateway-1:8000"], History(), random.Random(f"{world.seed} client"))
        logs.configure()
        logs.to(lambda process, level, event, fields: self.told.append(event))

    async def start(self, executors: int = 1, **settings: Any) -> None:
        await self.deployment.start(self.deployment.add("broker"))
        for role in ("health-monitor", "scheduler", "gateway"):
            self.deployment.add(role)
        for _ in range(executors):
            self.deployment.add("executor", **settings)
        await self.deployment.start()

    def alive(self, name: str) -> list[Process]:
        """Processes whose name ends so."""
        return [process for process in self.world.processes if process.name.endswith(name) and process.alive]

    async def complete(self, seed: int, model: str = "stub") -> bool:
        """Whether an answer is whole and right; asked again until there is one."""
        body = {"model": model, "prompt": f"{seed}", "seed": seed, "max_tokens": TOKENS}
        reply, _ = await self.client.insist("POST", "/v1/completions", body, silence=600.0)
        return bool(reply.json()["choices"][0]["text"] == stub_text(seed, TOKENS))

    async def served(self, model: str = "stub") -> None:
        """Returns once the gateway knows it."""
        async with asyncio.timeout(120):
            while model not in (await self.client.insist("GET", "/v1/models"))[0].body.decode():  # noqa: ASYNC110
                await asyncio.sleep(0.5)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not holds():  # noqa: ASYNC110  # in virtual time
                await asyncio.sleep(0.1)


async def disturbed(house: House) -> dict[str, Any]:
    """Answers stay whole and right while ranks die in every way, and while a supervisor does."""
    await house.start(2)
    await house.served()
    right = {}
    for number, fault in enumerate(("killed", "stopped", "supervisor")):
        await house.until(lambda: len(house.alive("/rank")) == 2)
        await asyncio.sleep(20.0)
        asking = asyncio.get_running_loop().create_task(house.complete(number))
        await asyncio.sleep(0.5)
        for process in house.alive("executor-1") if fault == "supervisor" else house.alive("/rank"):
            (house.world.pause if fault == "stopped" else house.world.kill)(process)
        orphans = [] if fault != "supervisor" else house.alive("executor-1/rank")
        await asyncio.sleep(0.001)
        assert not any(process.alive for process in orphans), "ranks end with their supervisor"
        right[fault] = await asking
    codes = [process.exit_code for process in house.world.processes if process.name.endswith("/rank")]
    return {"right": right, "codes": codes}


async def models(house: House) -> dict[str, Any]:
    """More models than fit are loaded, unloaded and asked, in turns."""
    await house.start(2, takes_models=True)
    names = [f"model-{number}" for number in range(9)]
    for name in names:
        await house.client.insist("PUT", f"{REGISTRY}/{name}", {"source": f"simulated/{name}", "most": 1, "idle": 600})
    right = [await house.complete(turn, name) for turn in range(2) for name in names]
    return {"right": all(right), "ranks": sum("/rank" in process.name for process in house.world.processes)}


async def jobs(house: House) -> dict[str, Any]:
    """Fine-tuning jobs end in their adapter, whatever becomes of their trainers and hosts."""
    await house.start(2, training_state_interval=0.0, stub_step_ms=300.0)
    await house.served()
    around = house.client
    training = Training("training-1", around, Plan(requests=3, size=(40, 60)))
    running = asyncio.get_running_loop().create_task(training.run())
    for name in ("/trainer", "executor-1", "/trainer", "executor-2"):
        await house.until(lambda: bool(house.alive("/trainer")) or running.done())
        await asyncio.sleep(7.0)
        for process in house.alive(name):
            house.world.kill(process)
    await running
    seen = around.history.jobs
    return {
        "status": [job.status for job in seen],
        "adapters": [len(job.names_of_adapters) for job in seen],
        "wrong": around.history.faults,
        "trainers": sum("/trainer" in process.name for process in house.world.processes),
    }


async def fatal(house: House, fault: str) -> dict[str, Any]:
    """A request ends each ring that computes it."""
    await house.start(2, stub_fault=fault)
    await house.served()
    asked = {"model": "stub", "prompt": [1, 1, 1], "seed": 1, "max_tokens": TOKENS}
    code = ""
    try:
        await house.client.ask("gateway-1:8000", "POST", "/v1/completions", asked, silence=600.0)
    except Refused as error:
        code = error.code
    rings = sum("/rank" in process.name for process in house.world.processes)
    return {"code": code, "right": await house.complete(2), "rings": rings}


RUNS: dict[str, Callable[[House], Coroutine[Any, Any, dict[str, Any]]]] = {
    "disturbed": disturbed,
    "models": models,
    "jobs": jobs,
    **{f"fatal-{one}": partial(fatal, fault=one) for one in ("crash", "hang")},
}


def main(name: str, seed: int) -> None:
    with World(seed) as world:
        house = House(world)
        result = world.run(RUNS[name](house))
        failures = [f"{one.process}: {one.message}: {one.error!r}" for one in world.failures]
        result |= {"now": world.now, "told": sorted(set(house.told)), "failures": failures}
        result["digest"] = world.trace.digest()
    print(json.dumps(result))  # noqa: T201  # the test reads it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
