"""A whole house of real processes, two of each service, and clients that ask all the time.

Clients do what clients do: a gateway that does not answer is left for another one. Anything else that is not
the whole right answer is a failure.
"""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec

from services.executor.worker.stub import stub_token
from shared.config import CommonSettings
from shared.messages import GroupBeat
from shared.nats.bus import Bus
from tests.processes import ServiceProcess, service_process

TOKENS = 24  # of each answer
# Steps of 10 ms and a short grace: what runs is mostly handed over.
STUB = ("--engine", "stub", "--stub-step-ms", "10", "--drain-grace", "0.1", "--hung-after", "2")


class House:
    """Service processes by their instance's name."""

    def __init__(self, bus: Bus, settings: CommonSettings, directory: Path) -> None:
        self._bus = bus
        self._settings = settings
        self._directory = directory
        self._stack = AsyncExitStack()
        self._kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.python = ""  # of the environment that services are started in from now on; empty: of this one
        self.processes: dict[str, ServiceProcess] = {}

    async def __aenter__(self) -> "House":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Gateways leave first, with what their clients still read; the rest is told at once."""
        gateways = [process for name, process in self.processes.items() if name.startswith("gateway")]
        for wave in (gateways, self.processes.values()):
            await asyncio.gather(*(process.leave() for process in wave))
        await self._stack.aclose()

    async def start(self, instance: str, module: str, *arguments: str) -> None:
        """Returns when it is ready."""
        await self.begin(instance, module, *arguments)
        await self.processes[instance].wait_ready()

    async def begin(self, instance: str, module: str, *arguments: str) -> None:
        self._kinds[instance] = (module, arguments)
        settings = self.settings_of(module)
        context = service_process(
            self._bus, settings, module, self._directory, *arguments, instance=instance, python=self.python
        )
        self.processes[instance] = await self._stack.enter_async_context(context)

    def settings_of(self, module: str) -> CommonSettings:
        """How that service reaches NATS."""
        return self._settings

    async def start_two_of_each(self, executor: Sequence[str] = STUB, model: str = "stub") -> None:
        for number in range(2):
            await self.begin(f"monitor-{number}", "services.health_monitor")
            await self.begin(f"scheduler-{number}", "services.scheduler", "--ack-wait", "2")
            group = ("--group", f"group-{number}")
            await self.begin(f"executor-{number}", "services.executor", *group, *executor)
            await self.begin(f"gateway-{number}", "services.gateway", "--port", "0")
        for process in self.processes.values():
            await process.wait_ready()
        await until_answered(self.url("gateway-0"), model)
        await until_answered(self.url("gateway-1"), model)

    async def restart(self, instance: str) -> None:
        """By its signal, as a rollout does; it has the same port afterwards."""
        old = self.processes[instance]
        module, arguments = self._kinds[instance]
        if "gateway" in instance:
            arguments = ("--port", old.beats[-1].address.rpartition(":")[2])
        assert await old.end() == 0, old.log.read_text()
        old.log.rename(old.log.with_suffix(f".{old.process.pid}.log"))
        await self.start(instance, module, *arguments)

    def url(self, gateway: str) -> str:
        return f"http://{self.processes[gateway].beats[-1].address}"

    def urls(self) -> list[str]:
        return [self.url(name) for name in self.processes if name.startswith("gateway")]

    def group(self, executor: str) -> GroupBeat:
        group = self.processes[executor].beats[-1].group
        assert group is not None
        return group

    def logs(self, pattern: str) -> str:
        return "".join(path.read_text() for path in self._directory.glob(pattern))

    def kill(self, instance: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[instance].process.send_signal(number)


def expected(seed: int) -> str:
    return bytes(stub_token(seed, position) for position in range(TOKENS)).decode()


class Load:
    """Clients that ask one after the other, streaming and not, until they are told to stop."""

    def __init__(self, urls: Sequence[str], clients: int = 8, *, patient: bool = False) -> None:
        """`patient`: a 503 is asked again too, as SDKs do."""
        self._urls = list(urls)
        self._clients = clients
        self._patient = patient
        self._seeds = itertools.count(1)
        self._stopping = False
        self._progress = asyncio.Event()
        self.answers = 0
        self.moves = 0  # times that a client went to another gateway
        self.refusals = 0  # answers with 503, of patient clients

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        """Every answer has been checked when it ends."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))
            try:
                await self.more(self._clients)
                yield self
                await self.more(self._clients)
            finally:
                self._stopping = True

    async def more(self, answers: int) -> None:
        """Returns when so many more answers have come."""
        wanted = self.answers + answers
        async with asyncio.timeout(60):
            while self.answers < wanted:
                self._progress.clear()
                await self._progress.wait()

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            turn = number
            while not self._stopping:
                seed = next(self._seeds)
                while not await self._answered(http, self._urls[turn % len(self._urls)], seed):
                    turn += 1
                    await asyncio.sleep(0.02)
                self.answers += 1
                self._progress.set()

    async def _answered(self, http: httpx.AsyncClient, url: str, seed: int) -> bool:
        """False: this gateway takes no requests."""
        stream = seed % 2 == 0
        body = {"model": "stub", "prompt": f"number {seed}", "max_tokens": TOKENS, "seed": seed, "stream": stream}
        request = http.build_request("POST", f"{url}/v1/completions", json=body)
        try:
            response = await http.send(request, stream=True)
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            self.moves += 1
            return False
        status = response.status_code
        text = (await response.aread()).decode()  # an answer that has begun ends
        if status == 503 and self._patient:
            self.refusals += 1
            return False
        assert status == 200, f"{status} {text}"
        said = _streamed(text) if stream else msgspec.json.decode(text)["choices"][0]["text"]
        assert said == expected(seed), f"seed {seed}: {said!r} instead of {expected(seed)!r}"
        return True


def _streamed(text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    chunks = [msgspec.json.decode(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@contextlib.asynccontextmanager
async def long_answer(url: str, tokens: int = 4000, seed: int = 7) -> AsyncIterator[None]:
    """A generation that outlasts what is done within: 40 s of steps, read all the time and right in every token."""
    body = {"model": "stub", "prompt": "x", "max_tokens": tokens, "seed": seed, "stream": True}
    begun = asyncio.Event()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http, asyncio.TaskGroup() as group:
        reading = group.create_task(_read_long(http, f"{url}/v1/completions", body, begun))
        await begun.wait()
        yield
        assert not reading.done(), "it has outlasted what was done"
        reading.cancel()


async def _read_long(http: httpx.AsyncClient, url: str, body: dict[str, object], begun: asyncio.Event) -> None:
    position = 0
    seed = body["seed"]
    assert isinstance(seed, int)
    async with http.stream("POST", url, json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text = "".join(choice["text"] for choice in chunk["choices"])
            right = bytes(stub_token(seed, position + index) for index in range(len(text))).decode()
            assert text == right, f"position {position}: {text!r} instead of {right!r}"
            position += len(text)
            begun.set()


async def until_answered(url: str, model: str = "stub") -> None:
    """Until the gateway knows the model."""
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False, timeout=60) as http:
        while True:
            body = {"model": model, "prompt": "x", "max_tokens": 1}
            with contextlib.suppress(httpx.TransportError):
                if (await http.post(f"{url}/v1/completions", json=body)).status_code == 200:
                    return
            await asyncio.sleep(0.05)
