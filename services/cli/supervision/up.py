"""`ryzanstein up`: a whole stack on this machine, from nothing to an answer.

model fetched ─▶ NATS and services ─▶ all ready ─▶ one answer as a smoke test ─▶ serve until Ctrl-C or SIGTERM
            └──▶ converted ─▶ executors ─▶┘
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from services.cli.supervision.early_executor import expect_building
from services.cli.supervision.stack import LocalStack, StackPlan
from services.cli.target import (
    RunFile,
    StackSettings,
    StartedProcess,
    existing_nats,
    lock,
    remove_run_file,
    without_credentials,
    write_run_file,
)
from services.cli.ui import (
    AnswerPrinter,
    LoadBars,
    described_weights,
    draft_left_out,
    megabytes,
    model_bars,
    print_columns,
    say,
)
from shared.config import CommonSettings
from shared.errors import ConfigurationError, PortInUse, RyzansteinError
from shared.model_store.catalog import DEFAULT_MODEL, is_ready
from shared.model_store.packed import packed_files
from shared.model_store.preparation import prepare_model
from shared.model_store.programs import CONVERSION
from shared.models import here
from shared.service.listener import bind, reserve

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT = 20.0


async def find_gpus(visible: str | None) -> list[str]:
    """GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; `visible` is that variable's value."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return among(_listed_by_driver(), visible)
    return among(parse_listing(await _output(program, "-L")), visible)


def parse_listing(listing: str) -> list[str]:
    """The devices in the output of `nvidia-smi -L`: GPUs by index, slices of a divided GPU by their UUID."""
    devices: list[str] = []
    whole = ""
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            whole = gpu[1]
            devices.append(whole)
        elif slice_ := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if devices and devices[-1] == whole:
                devices.pop()
            devices.append(slice_[1])
    return devices


def among(present: Sequence[str], visible: str | None) -> list[str]:
    """Those of `present` that CUDA_VISIBLE_DEVICES names, in its order, up to its first wrong entry, as CUDA
    itself reads it; all of them when it is not set."""
    if visible is None or not present:
        return list(present)
    chosen: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        known = int(name) < len(present) if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not known:
            break
        chosen.append(name)
    return chosen


def assign_gpus(gpus: Sequence[str], *, tp: int, replicas: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each group: `tp` GPUs of its own; empty without GPUs.

    Raises `ConfigurationError` when there are GPUs, and too few.
    """
    if not gpus:
        return []
    if len(gpus) < tp * replicas:
        wanted = f"{replicas} group{'s' * (replicas > 1)} of {tp} rank{'s' * (tp > 1)}"
        raise ConfigurationError(
            f"{wanted} need {tp * replicas} GPUs, and {len(gpus)} can be used here; ask for less with --tp or "
            "--replicas, let CUDA_VISIBLE_DEVICES name more, or set RYZANSTEIN_DEVICE=cpu."
        )
    return [",".join(gpus[first : first + tp]) for first in range(0, tp * replicas, tp)]


def _listed_by_driver() -> list[str]:
    return [str(number) for number, _ in enumerate(_DRIVER.glob("*"))]


async def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing when it fails (as without its driver) or hangs."""
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output.decode(errors="replace") if process.returncode == 0 else ""


T = TypeVar("T")

SMOKE_TEST_PROMPT = "In one sentence: what is a distributed system?"
SMOKE_TEST_TEXT = "A distributed system is"  # of a model without a chat template
SMOKE_TEST_TOKENS = 60
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_EXAMPLES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "Name a river."}]},
    TEXT: {"prompt": "The longest river is", "max_tokens": 20},
    VECTORS: {"input": "The longest river."},
}


GRPC_PORT = 8001


class Up:
    """One run of the command."""

    def __init__(
        self, plan: StackPlan, settings: StackSettings, console: Console, *, nats_url: str = "", smoke_test: bool
    ) -> None:
        """`plan`: as the options say, `model` by any of its names. `grpc_port`, where none is asked for: the usual
        one, or another where that is taken or `port` is the system's to choose."""
        self._plan = plan
        self._nats_url = nats_url
        self._smoke_test = smoke_test
        self._settings = settings
        self._console = console
        self._signal = asyncio.Event()
        # What makes the model ready, once it has begun.
        self._model: asyncio.Task[tuple[str, str]] | None = None
        self._keyed = bool(settings.api_key.get_secret_value())

    async def run(self) -> int:
        """Runs the stack until a signal comes; returns the exit code. Nothing is left running."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal.set)
        with lock(self._plan.data_dir):
            shared = self._settings.gateways > 1
            if self._plan.port or shared:  # say that it is taken before minutes go into a download
                reserve(self._plan.host, self._plan.port, shared=shared).close()
            if self._plan.grpc_port:
                bind(self._plan.host, self._plan.grpc_port, option="--grpc-port").close()
            plan = await self._unless_stopped(self._prepare())
            if plan is None:
                return 130
            try:
                await self._run_stack(LocalStack(plan, self._settings))
            finally:
                await self._cancel_model()
        return 0

    async def _prepare(self) -> StackPlan:
        """Everything that can be found wrong, or takes long, before a service is started; a model that is there and
        has to be converted is, beside them."""
        nats, gpus = self._existing_nats(), await self._gpus()
        fetched = asyncio.Event()
        self._model = asyncio.create_task(self._prepare_model(fetched))
        self._model.add_done_callback(lambda task: fetched.set())
        try:
            await fetched.wait()
        except asyncio.CancelledError:
            await self._cancel_model()
            raise
        plan = msgspec.structs.replace(self._plan, nats=nats, gpus=gpus, grpc_port=self._grpc_port())
        return await self._with_model(plan) if self._model.done() else plan

    async def _with_model(self, plan: StackPlan) -> StackPlan:
        """Waits for the model. Raises what kept it from being made ready."""
        assert self._model is not None, "it is being made ready"
        name, directory = await self._model
        return msgspec.structs.replace(plan, model=directory, served_model_name=self._plan.served_model_name or name)

    async def _cancel_model(self) -> None:
        if self._model is not None:
            self._model.cancel()
            await asyncio.wait([self._model])

    def _grpc_port(self) -> int:
        """Nobody who does not ask for a port should be kept from starting by it."""
        plan = self._plan
        if plan.grpc_port is not None:
            return plan.grpc_port
        if not plan.port:
            return 0
        try:
            bind(plan.host, GRPC_PORT, option="--grpc-port").close()
        except PortInUse:
            return 0
        return GRPC_PORT

    def _existing_nats(self) -> CommonSettings | None:
        """The NATS that the option names, else the settings (environment or file); None: one of our own."""
        url = self._nats_url
        if not url and "nats_url" in self._settings.model_fields_set:
            url = self._settings.nats_url
        return existing_nats(self._settings, url) if url else None

    async def _gpus(self) -> list[str]:
        plan = self._plan
        if plan.engine == "stub" or plan.engine_url or self._settings.device == "cpu":
            return []
        gpus = await find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        each = plan.tp
        if not plan.has_rings or plan.further:  # vLLM shards by itself; further models may need what the first leaves
            each = max(each, len(gpus) // plan.replicas)
        return assign_gpus(gpus, tp=each, replicas=plan.replicas)

    async def _prepare_model(self, fetched: asyncio.Event) -> tuple[str, str]:
        """(served name, directory). Sets `fetched` once the model's files are there, whatever is still made of them."""
        plan = self._plan
        if plan.engine == "stub":
            return "stub", ""
        if not plan.model:
            return "", ""
        store = self._settings.store
        if not is_ready(plan.model, store):
            expect_building()
        with model_bars(self._console) as report:

            def reported(stage: str, done: int, total: int) -> None:
                if stage in CONVERSION:
                    fetched.set()
                report(stage, done, total)

            name, directory = await prepare_model(here(plan.model), store, reported)
        if not any(file.model == directory.resolve() for file in packed_files(store.packed)):
            expect_building()
        return name, str(directory)

    async def _run_stack(self, stack: LocalStack) -> None:
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self._unless_stopped(self._bring_up(stack))
            watching = asyncio.create_task(stack.watch(self._tell))
            tasks.append(watching)
            if not self._signal.is_set():
                declaring = asyncio.create_task(self._declare(stack))
                tasks.append(declaring)
                await self._show(stack, declaring)
            if not self._signal.is_set():
                self._say("Serving. Press Ctrl-C to stop.")
                await self._unless_stopped(asyncio.shield(watching))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop(stack)

    async def _show(self, stack: LocalStack, declaring: "asyncio.Task[float | None]") -> None:
        """One answer, and how to get another. The executors' own model is asked while the registry is written; where
        they have none, the first that is loaded."""
        model, path = stack.plan.served_model_name, CHAT
        if model:
            path = await self._prove_unless_stopped(stack, model)
        since = await self._unless_stopped(asyncio.shield(declaring))
        further = await self._unless_stopped(self._wait_further(stack, since)) if since else ""
        if not model and further:
            model = further
            path = await self._prove_unless_stopped(stack, model)
        if model and path and not self._signal.is_set():
            self._print_request(stack, model, path=path)
        if stack.plan.served_model_name == DEFAULT_MODEL and self._smoke_test:
            await self._unless_stopped(self._name_better())

    async def _name_better(self) -> None:
        """To whom the built-in model is served."""
        from services.cli.recommended_models import better_model

        if line := await better_model(DEFAULT_MODEL, self._settings.store):
            self._say(f"{line}\n")

    async def _prove_unless_stopped(self, stack: LocalStack, model: str) -> str:
        """As `_prove`."""
        if self._signal.is_set():
            return CHAT
        asking = self._prove(stack, model) if self._smoke_test else self._path_of(stack, model)
        path = await self._unless_stopped(asking)
        return CHAT if path is None else path

    async def _path_of(self, stack: LocalStack, model: str) -> str:
        """As `_prove`, by what its group says that it does."""
        card = await stack.card(model)
        if card is None or card.does("generate"):
            return CHAT
        return VECTORS if card.does("embed") else ""

    async def _bring_up(self, stack: LocalStack) -> None:
        assert self._model is not None, "it is being made ready"
        whole = self._model.done()
        await stack.start(executors=whole)
        self._leave_note(stack, "")
        if not whole:
            await stack.start_executors(await self._with_model(stack.plan))
            self._leave_note(stack, "")
        await stack.withdraw_models()
        with LoadBars(self._console) as bars:
            await stack.wait_ready(bars.update)
        self._leave_note(stack, stack.gateway_url)
        self._print_where(stack)

    async def _declare(self, stack: LocalStack) -> float | None:
        """Writes the models of this start into the registry, and takes those of an earlier one out of it. When, in unix
        seconds; None: it could not, which is told and keeps nothing from being served."""
        from services.cli.supervision.declaration import declare

        try:
            return await declare(stack.models(), stack.plan)
        except RyzansteinError as error:
            self._tell(error.message)
            return None

    async def _wait_further(self, stack: LocalStack, since: float) -> str:
        """The first of the models beside the executors' own that takes requests; empty: none."""
        from services.cli.supervision.declaration import wait_further

        return await wait_further(stack.models(), stack.plan, since, self._console, self._tell)

    def _leave_note(self, stack: LocalStack, gateway_url: str) -> None:
        settings = stack.nats_settings
        note = RunFile(
            pid=os.getpid(),
            gateway_url=gateway_url,
            nats_url=settings.nats_url,
            nats_user=settings.nats_user,
            nats_password=settings.nats_password.get_secret_value(),
            certificate=self._settings.tls_certificate,
            model=stack.plan.served_model_name,
            directory=stack.plan.model,
            started=[StartedProcess(child.service, child.instance, child.pid or 0) for child in stack.children],
        )
        write_run_file(self._plan.data_dir, note)

    def _print_where(self, stack: LocalStack) -> None:
        nats = without_credentials(stack.nats_settings.nats_url)
        rows = [("what", "pid", "where"), ("nats", str(stack.nats_pid or "-"), nats)]
        for child in stack.children:
            beat = stack.beats[child.instance]
            secure = child.service == "gateway" and self._settings.tls_certificate
            address = stack.ops_addresses.get(child.instance, beat.address)
            rows.append((child.instance, str(child.pid), f"{'https' if secure else 'http'}://{address}"))
            if beat.group is not None:
                ranks = " ".join(str(rank.pid) for rank in beat.group.ranks)
                rows.append((f"  {beat.group.group}", "", f"{beat.group.model}, ranks {ranks}"))
        print_columns(self._console, rows, right=(1,))
        self._say("Each service answers /health, /ready and /metrics at its address.")
        self._say(f"API   {stack.gateway_url}/v1, and in a browser {stack.gateway_url}/")
        self._say(f"gRPC  {stack.grpc_address}")
        self._say(f"Logs  {stack.logs}")
        if bound := sum(beat.group.kv_bytes for beat in stack.beats.values() if beat.group is not None):
            self._say(f"KV    the cache grows with use, to {megabytes(bound)} (RYZANSTEIN_KV_MEMORY, in bytes a rank)")

        for beat in stack.beats.values():
            if beat.group is not None and beat.group.streamed is not None:
                self._say(f"Weights  {described_weights(beat.group.streamed)} (RYZANSTEIN_WEIGHTS_MEMORY)")
            if beat.group is not None and (left_out := draft_left_out(beat.group.traits)):
                self._say(f"Draft    {left_out}")

    def _print_request(self, stack: LocalStack, model: str, *, path: str) -> None:
        """A request that can be pasted into another terminal."""
        body = {"model": model, **_EXAMPLES[path]}
        command = ["curl", f"{stack.gateway_url}{path}"]
        if self._settings.tls_certificate:
            command += ["--cacert", self._settings.tls_certificate]
        command += ["-H", "content-type: application/json"]
        self._say("Try it from another terminal:")
        key = ' -H "authorization: Bearer $RYZANSTEIN_API_KEY"' if self._keyed else ""
        self._say(f"  {shlex.join(command)}{key} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n")

    async def _prove(self, stack: LocalStack, model: str) -> str:
        """One answer, streamed: the whole way works. Returns the path that the model is asked at, as far as that is
        known; empty: none of those that there is an example of."""
        # With httpx: the services are to start before it.
        from services.cli.chat_client import GeneratesNoText, KeyNeeded, NoChatTemplate, TemplateRefused

        path, url = CHAT, stack.gateway_url
        if self._settings.tls_client_ca:
            self._say("(no smoke test: clients need a certificate)")
            return path
        try:
            try:
                await self._show_answer(url, model, SMOKE_TEST_PROMPT)
            except (NoChatTemplate, TemplateRefused):
                path = TEXT
                self._say("(the model has no chat template that takes a question: it completes a text instead)")
                await self._show_answer(url, model, SMOKE_TEST_TEXT, plain=True)
        except GeneratesNoText as error:
            path = await self._path_of(stack, model)
            self._say(f"(no answer to show: {error})")
        except KeyNeeded:
            self._keyed = True
            self._say("(not asked: the stack has API keys; set RYZANSTEIN_API_KEY to one of them for that)")
        except RyzansteinError as error:
            raise ConfigurationError(
                f"The stack started, but the smoke test failed ({error}); see the logs in "
                f"{self._plan.data_dir / 'logs'}, or serve anyway with --no-smoke-test."
            ) from None
        self._say("")
        return path

    async def _show_answer(self, url: str, model: str, prompt: str, *, plain: bool = False) -> None:
        """Raises as `answer_once`."""
        from services.cli.chat_client import answer_once
        from services.cli.target import trust_of

        self._say(f"\n> {prompt}", "bold")
        printer = AnswerPrinter(self._console)
        key, trust = self._settings.api_key.get_secret_value(), trust_of(self._settings.tls_certificate)
        try:
            async for text in answer_once(
                url, prompt, max_tokens=SMOKE_TEST_TOKENS, model=model, api_key=key, trust=trust, plain=plain
            ):
                printer.write(text)
        finally:
            printer.end()

    async def _stop(self, stack: LocalStack) -> None:
        """Stops in order; a second Ctrl-C stops at once."""
        self._say("Stopping; running requests may finish. Press Ctrl-C again to stop at once.")
        self._signal.clear()
        stopping = asyncio.create_task(stack.stop())
        hurry = asyncio.create_task(self._signal.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await stack.kill()
        hurry.cancel()
        await stopping
        remove_run_file(self._plan.data_dir)
        self._say("Stopped.")

    def _tell(self, text: str) -> None:
        self._say(text, "yellow")

    def _say(self, text: str, style: str | None = None) -> None:
        say(self._console, text, style)

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
