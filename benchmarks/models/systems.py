"""The systems that are compared, each with room for one model at a time.

    ryzanstein      one stack; its host's memory is set so that one of the models fits
    llama.cpp       `llama-server` as a router, `--models-max 1`
    ollama's order  a `llama-server` for the model whose turn it is, ended when another's comes (`switching.Turns`)

Ollama itself computes with llama.cpp: its order of requests and its one process a model are what is compared.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from benchmarks.errors import BenchError
from benchmarks.models.switching import System, Turns, target_of
from benchmarks.peers.catalog import Launch
from benchmarks.peers.servers import Server, free_port, wait_ready
from benchmarks.serve.runner import Target, wait_answered
from benchmarks.serve.sse import Client

READY_SECONDS = 300.0
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Served:
    """A model by its name and its GGUF file."""

    name: str
    file: Path


class OneServer:
    """Everything at one address, which loads what it is asked for."""

    def __init__(self, name: str, url: str, models: Sequence[Served]) -> None:
        self.name = name
        self._targets = [target_of(url, model.name, ANSWER_SECONDS) for model in models]

    @asynccontextmanager
    async def turn(self, model: int) -> AsyncIterator[Target]:
        yield self._targets[model]

    async def first_answers(self, server: Server) -> None:
        """One request of each model, so that what is done once is done. Raises `BenchError`."""
        for target in self._targets:
            await wait_ready(server, target.client, model=target.model, extra={}, timeout=READY_SECONDS)

    def close(self) -> None:
        for target in self._targets:
            target.client.close()


class OllamasOrder:
    """One `llama-server` at a time."""

    name = "ollama's order"

    def __init__(self, program: Path, models: Sequence[Served], options: Sequence[str], folder: Path) -> None:
        self._program, self._models, self._options, self._folder = program, models, options, folder
        self._turns = Turns()
        self._server: Server | None = None
        self._target: Target | None = None

    @asynccontextmanager
    async def turn(self, model: int) -> AsyncIterator[Target]:
        async with self._turns.of(model) as switches:
            if switches:
                try:
                    await self._switch(self._models[model])
                finally:
                    self._turns.loaded()
            assert self._target is not None, "a model is loaded"
            yield self._target

    async def _switch(self, model: Served) -> None:
        self.close()
        port = free_port()
        command = (str(self._program), "-m", str(model.file), "--port", str(port), *self._options)
        self._server = Server(Launch(command, {}), self._folder / "ollama.log", self._folder)
        self._server.__enter__()
        client = Client(f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS)
        alive = partial(_alive, self._server, model)
        await wait_answered(lambda: client.get("/health"), READY_SECONDS, alive, poll=0.02)
        self._target = Target(client, model.name, {})

    def close(self) -> None:
        if self._target is not None:
            self._target.client.close()
            self._target = None
        if self._server is not None:
            self._server.stop()
            self._server = None


def _alive(server: Server, model: Served) -> None:
    if (end := server.ended()) is not None:
        raise BenchError(f"llama-server could not serve {model.name}: {end}.")


@asynccontextmanager
async def one_server(
    name: str, launch: Launch, port: int, models: Sequence[Served], log: Path
) -> AsyncIterator[System]:
    """What is launched, once it has answered a request of each model."""
    with Server(launch, log, log.parent) as server:
        system = OneServer(name, f"http://127.0.0.1:{port}", models)
        try:
            await system.first_answers(server)
            yield system
        finally:
            system.close()


@asynccontextmanager
async def ryzanstein(models: Sequence[Served], host_memory: int, folder: Path) -> AsyncIterator[System]:
    """`host_memory`: bytes; at least one model must fit, and no two."""
    port = free_port()
    file = folder / "models.yaml"
    specs = [{"name": model.name, "source": str(model.file)} for model in models]
    file.write_text(yaml.safe_dump({"models": specs}))
    command = ("ryzanstein", "up", "--models-file", str(file), "--no-smoke-test", "--port", str(port))
    variables = {
        "RYZANSTEIN_HOST_MEMORY": str(host_memory),
        "RYZANSTEIN_DATA_DIR": str(folder / "data"),
        "PATH": os.environ["PATH"],
    }
    launch = Launch((*command, "--data-dir", str(folder / "data")), variables)
    async with one_server("ryzanstein", launch, port, models, folder / "up.log") as system:
        yield system


@asynccontextmanager
async def llama_cpp(
    program: Path, models: Sequence[Served], options: Sequence[str], folder: Path
) -> AsyncIterator[System]:
    """llama.cpp's router."""
    port = free_port()
    preset = folder / "models.ini"
    preset.write_text(
        "version = 1\n" + "".join(f"\n[{model.name}]\nmodel = {model.file}\n" for model in models)
    )
    command = (
        str(program),
        "--models-preset",
        str(preset),
        "--models-max",
        "1",
        "--port",
        str(port),
        *options,
    )
    launch = Launch(command, {"LLAMA_CACHE": str(folder / "cache")})
    async with one_server("llama.cpp's router", launch, port, models, folder / "router.log") as system:
        yield system


@asynccontextmanager
async def ollamas_order(
    program: Path, models: Sequence[Served], options: Sequence[str], folder: Path
) -> AsyncIterator[System]:
    system = OllamasOrder(program, models, options, folder)
    try:
        for model in range(len(models)):
            async with system.turn(model):
                pass
        yield system
    finally:
        system.close()


def scratch() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="ryzanstein-bench-")
