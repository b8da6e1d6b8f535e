"""An undisturbed deployment, and what it costs: `python -m tests.simulation.deployment --hours 1 --requests 500`.

Prints processor seconds and the run's digest, as JSON. `--profile` says where they went.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import time
from typing import Any

from tests.simulation import deployment as package
from tests.simulation.core import reproducible
from tests.simulation.core.asgi import Exchange, Lost

MODEL = "stub"
CHAT = "/v1/chat/completions"


def chat_scope() -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}


async def ask(address: str, seed: int, tokens: int) -> str:
    """One streamed chat completion, whole. Raises `ValueError` where it is not."""
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "seed": seed,
        "max_tokens": tokens,
    }
    body = {"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}
    text, events = "", ""
    async with Exchange(address, chat_scope(), body) as exchange:
        start = await exchange.receive()
        more = True
        while more:
            part = await exchange.receive()
            events += part["body"].decode()
            more = part.get("more_body", False)
    if start["status"] != 200 or "data: [DONE]" not in events:
        raise ValueError(f"{start['status']}: {events}")
    for line in events.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    from services.executor.worker.stub import stub_token

    if text != "".join(chr(stub_token(seed, position)) for position in range(tokens)):
        raise ValueError(f"{text!r} is not what seed {seed} gives")
    return text


async def live(world: Any, given: argparse.Namespace) -> dict[str, Any]:
    """The deployment from its start to its end."""
    from tests.simulation.deployment.deployment import Deployment

    deployment = Deployment(world)
    for role, count in (("broker", 1), *((role, given.each) for role in given.roles)):
        for _ in range(count):
            deployment.add(role)
    await deployment.start(*deployment.of("broker"))
    await deployment.start()
    took, texts = {"start": time_spent()}, []
    if given.requests:
        await served(deployment)
        addresses = [member.service.address for member in deployment.gateways()]
        for number in range(given.requests):
            texts.append(await ask(addresses[number % len(addresses)], number, given.tokens))
        took["requests"] = time_spent() - sum(took.values())
    await asyncio.sleep(given.hours * 3600)
    took["idle"] = time_spent() - sum(took.values())
    if given.roll:
        async with Load(deployment, given.tokens) as load:
            await operate(deployment, given.roles, load)
        texts += load.texts
        took["roll"] = time_spent() - sum(took.values())
    await deployment.stop()
    took["end"] = time_spent() - sum(took.values())
    errors = [str(error) for member in deployment.members.values() for error in member.errors]
    failures = [f"{one.process}: {one.message} {one.error!r}" for one in world.failures]
    return {"took": took, "whole": len(texts), "example": texts[:1], "errors": errors, "failures": failures}


async def operate(deployment: Any, roles: list[str], load: "Load") -> None:
    """To the previous release and back; one gateway more and one fewer; other settings; a host without power."""
    await deployment.roll(*roles, version="previous")
    await load.more(5)
    await deployment.scale("gateway", more := len(deployment.gateways()) + 1)
    await deployment.roll(*roles, version="current", beat_interval=4.0)
    await deployment.scale("gateway", more - 1)
    unlucky, world = deployment.of("scheduler")[0], deployment.world
    world.lose_power(unlucky.host)
    await load.more(5)
    world.restore_power(unlucky.host)
    deployment.kill(deployment.of("health-monitor")[0])
    await unlucky.until(lambda: unlucky.ready, 60.0)
    await deployment.ready()


class Load:
    """One client that asks all the time while the block lasts, another gateway where one does not answer."""

    def __init__(self, deployment: Any, tokens: int) -> None:
        self._deployment, self._tokens = deployment, tokens
        self.texts: list[str] = []
        self._ending = False
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await self._task

    async def more(self, answers: int) -> None:
        wanted = len(self.texts) + answers
        while len(self.texts) < wanted:
            self._news.clear()
            await self._news.wait()

    async def _ask(self) -> None:
        turn = 0
        while not self._ending:
            turn += 1
            gateways = [member for member in self._deployment.gateways() if member.ready]
            try:
                member = gateways[turn % len(gateways)]
                self.texts.append(await ask(member.service.address, 1000 + turn, self._tokens))
            except (Lost, ZeroDivisionError):
                await asyncio.sleep(0.1)
            self._news.set()


async def served(deployment: Any) -> None:
    """Returns once each gateway lists the model."""
    for member in deployment.gateways():
        while MODEL not in member.service.models():  # noqa: ASYNC110  # nobody outside hears of it
            await asyncio.sleep(0.1)


def time_spent() -> float:
    return time.process_time()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="tests.simulation.deployment", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=0.0, help="idle ones, after the requests")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16, help="of each request")
    parser.add_argument("--each", type=int, default=2, help="instances of each service")
    parser.add_argument("--roles", nargs="+", default=["health-monitor", "scheduler", "executor", "gateway"])
    parser.add_argument("--roll", action="store_true", help="what an operator does, under load")
    parser.add_argument("--profile", type=int, default=0, help="so many functions that cost most")
    given = parser.parse_args(arguments)
    reproducible.ensure()
    package.install()
    from tests.simulation.core.world import World
    from tests.simulation.deployment import logs

    lines: list[str] = []
    logs.configure()
    logs.to(lambda process, level, event, fields: lines.append(f"{process} {level} {event} {fields}"))
    profile = cProfile.Profile()
    with World(given.seed) as world:
        if given.profile:
            profile.enable()
        seen = world.run(live(world, given))
        profile.disable()
        seen |= {"now": world.now, "digest": world.trace.digest(), "logged": lines[:20]}
    sys.stdout.write(json.dumps(seen, indent=1) + "\n")
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(given.profile)


if __name__ == "__main__":
    main(sys.argv[1:])
