"""`ryzanstein up`: a whole stack on this machine, from nothing to an answer.

model ─▶ NATS and services ─▶ all ready ─▶ one answer as proof ─▶ serve until Ctrl-C or SIGTERM
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from services.cli.bars import LoadBars, model_bars
from services.cli.chat import ChatClient
from services.cli.models import ensure_model
from services.cli.run_file import RunFile, lock, remove_run_file, write_run_file
from services.cli.stack import LocalStack, StackPlan, existing_nats
from shared.config import CommonSettings
from shared.errors import RyzansteinError
from shared.http_server import bind

T = TypeVar("T")

PROOF_PROMPT = "In one sentence: what is a distributed system?"
PROOF_TOKENS = 60


class UpOptions(msgspec.Struct, frozen=True):
    """The options of the command."""

    model: str
    data_dir: Path
    model_cache: Path
    host: str
    port: int
    tp: int
    replicas: int
    dtype: str
    engine: str
    nats_url: str
    proof: bool


class Up:
    """One run of the command."""

    def __init__(self, options: UpOptions, settings: CommonSettings, console: Console) -> None:
        self._options = options
        self._settings = settings
        self._console = console
        self._signal = asyncio.Event()

    async def run(self) -> int:
        """Runs the stack until a signal comes; returns the exit code. Nothing is left running."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal.set)
        with lock(self._options.data_dir):
            if self._options.port:  # say that it is taken before minutes go into a download
                bind(self._options.host, self._options.port).close()
            nats = None
            if self._options.nats_url:
                nats = existing_nats(self._settings, self._options.nats_url)
            model = await self._unless_stopped(asyncio.to_thread(self._prepare_model))
            if model is None:
                return 130
            await self._run_stack(LocalStack(self._plan(*model, nats)))
        return 0

    def _prepare_model(self) -> tuple[str, str]:
        options = self._options
        if options.engine == "stub":
            return "stub", ""
        with model_bars(self._console) as report:
            name, directory = ensure_model(options.model, options.model_cache, report)
        return name, str(directory)

    def _plan(self, name: str, directory: str, nats: CommonSettings | None) -> StackPlan:
        options = self._options
        return StackPlan(
            data_dir=options.data_dir,
            model=directory,
            served_model_name=name,
            host=options.host,
            port=options.port,
            tp=options.tp,
            replicas=options.replicas,
            dtype=options.dtype,
            engine=options.engine,
            nats=nats,
        )

    async def _run_stack(self, stack: LocalStack) -> None:
        watching: asyncio.Task[None] | None = None
        try:
            await self._unless_stopped(self._bring_up(stack))
            watching = asyncio.create_task(stack.watch(self._tell))
            if self._options.proof and not self._signal.is_set():
                await self._unless_stopped(asyncio.to_thread(self._prove, stack.gateway_url))
            if not self._signal.is_set():
                self._console.print("Serving. Press Ctrl-C to stop.")
                await self._unless_stopped(asyncio.shield(watching))
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await self._stop(stack)

    async def _bring_up(self, stack: LocalStack) -> None:
        await stack.start()
        with LoadBars(self._console) as bars:
            await stack.wait_ready(bars.update)
        settings = stack.nats_settings
        note = RunFile(
            pid=os.getpid(),
            gateway_url=stack.gateway_url,
            nats_url=settings.nats_url,
            nats_user=settings.nats_user,
            nats_password=settings.nats_password.get_secret_value(),
        )
        write_run_file(self._options.data_dir, note)
        self._print_where(stack)

    def _print_where(self, stack: LocalStack) -> None:
        table = Table("what", "pid", "where", title="Running", title_justify="left")
        nats_pid = stack.nats_pid
        table.add_row("nats", str(nats_pid) if nats_pid else "(not ours)", stack.nats_settings.nats_url)
        for child in stack.children:
            beat = stack.beats[child.instance]
            where = f"http://{beat.address}" + (
                "" if child.service == "gateway" else "/health /ready /metrics"
            )
            if beat.group is not None:
                ranks = ", ".join(str(rank.pid) for rank in beat.group.ranks)
                where = f"{beat.group.group}: {beat.group.model}, ranks {ranks}; {where}"
            table.add_row(child.instance, str(child.pid), where)
        self._console.print(table)
        self._console.print(f"API   {stack.gateway_url}/v1", highlight=False)
        self._console.print(f"Logs  {stack.logs}", highlight=False)

    def _prove(self, url: str) -> None:
        """One answer, streamed: the whole way works."""
        client = ChatClient(url)
        try:
            self._console.print(f"\n[bold]> {PROOF_PROMPT}[/]")
            for text in client.ask(PROOF_PROMPT, max_tokens=PROOF_TOKENS, temperature=0):
                if self._signal.is_set():
                    return
                self._console.print(text, end="", markup=False, highlight=False)
            self._console.print("\n")
        except RyzansteinError as error:
            self._tell(f"The proof failed: {error}")
        finally:
            client.close()

    async def _stop(self, stack: LocalStack) -> None:
        """Stops in order; a second Ctrl-C stops at once."""
        self._console.print("Stopping ...")
        self._signal.clear()
        stopping = asyncio.create_task(stack.stop())
        hurry = asyncio.create_task(self._signal.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await stack.kill()
        hurry.cancel()
        await stopping
        remove_run_file(self._options.data_dir)
        self._console.print("Stopped.")

    def _tell(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False)

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when a signal came first; `work` is cancelled then."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._signal.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None
