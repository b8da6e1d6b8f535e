"""What `control_plane.py` measures: our own stack on the stub engine, and Dynamo's frontend and mock engine.

Both answer the same request with `tokens` output tokens. Of ours the text is known beforehand.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
from tokenizers import Tokenizer

from benchmarks.control_plane.load_client import MARK, http_request
from benchmarks.errors import BenchError
from benchmarks.peers.catalog import Environment, ensure, pip
from benchmarks.peers.servers import free_port
from benchmarks.serve.runner import wait_answered
from benchmarks.serve.sse import Client
from services.cli.supervision.stack import LocalStack, StackPlan
from services.cli.target import StackSettings
from services.executor.rank import FIRST_WORD
from services.executor.worker.stub import stub_token
from shared.config import CommonSettings
from shared.errors import RyzansteinError
from shared.process import die_with_parent

HOST = "127.0.0.1"
SEED = 7
READY_SECONDS = 90.0


def body(model: str, tokens: int, extra: Mapping[str, object]) -> bytes:
    """A chat of one message that is different in every request, as a stream with usage."""
    fields = {
        "model": model,
        "messages": [{"role": "user", "content": f"Question {MARK}: what is the capital of France?"}],
        "max_tokens": tokens,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(fields | dict(extra))


class Ours:
    """NATS, gateway, scheduler, health monitor and executor, as `ryzanstein up` starts them."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | None = None,
        step_ms: float = 0.0,
        variables: Mapping[str, str] | None = None,
        grpc: bool = False,
        engine: str = "stub",
    ) -> None:
        """`model`: whose tokenizer and chat template the gateway uses; None: a token is a byte. It computes with
        the `engine` torch.
        `variables`: RYZANSTEIN_* settings of the services. `grpc`: whether the gateway serves that too."""
        self.name = "ryzanstein"
        self._model = model
        self._variables = {
            "RYZANSTEIN_STUB_STEP_MS": str(step_ms),
            "RYZANSTEIN_LOG_LEVEL": "warning",
            "RYZANSTEIN_MAX_SEQUENCES": "256",
            "RYZANSTEIN_SPECULATION": "off",
            **(variables or {}),
        }
        plan = StackPlan(
            data_dir=folder,
            model="" if model is None else str(model),
            served_model_name="stub",
            host=HOST,
            port=0,
            tp=1,
            replicas=1,
            dtype="auto",
            engine=engine,
            grpc_port=0 if grpc else None,
        )
        self._stack = LocalStack(plan, StackSettings())
        self.port = 0

    async def start(self) -> None:
        before = dict(os.environ)
        os.environ.update(self._variables)
        try:
            await self._stack.start()
            async with asyncio.timeout(READY_SECONDS):
                await self._stack.wait_ready(lambda beats: None)
        except (RyzansteinError, TimeoutError) as error:
            await self._stack.stop()
            raise BenchError(f"Our stack did not start: {error}") from None
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.port = urlsplit(self._stack.gateway_url).port or 0
        await _wait_answered(self.port, body("stub", 1, {}))

    @property
    def grpc_address(self) -> str:
        return self._stack.grpc_address

    @property
    def nats_settings(self) -> CommonSettings:
        return self._stack.nats_settings

    async def stop(self) -> None:
        await self._stack.stop()

    def processes(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = {"nats": [self._stack.nats_pid or 0]}
        for child in self._stack.children:
            root = psutil.Process(child.pid)
            family = [each.pid for each in (root, *root.children(recursive=True))]
            found.setdefault(child.service, []).extend(family)
        return found

    def request(self, tokens: int) -> bytes:
        return http_request(HOST, self.port, body("stub", tokens, {}))

    def text(self, tokens: int) -> str:
        output = [stub_token(SEED, position) for position in range(tokens)]
        if self._model is None:
            return bytes(output).decode()
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        text: str = tokenizer.decode([FIRST_WORD + token for token in output])
        return msgspec.json.encode(text)[1:-1].decode()


class Dynamo:
    """`dynamo.frontend` and `dynamo.mocker` over TCP with file discovery, as in docs/performance.md."""

    name = "dynamo"

    def __init__(self, folder: Path, python: Path, model: Path) -> None:
        """`python`: of the environment with ai-dynamo; `model`: whose tokenizer the frontend uses."""
        self._folder = folder
        self._python = python
        self._model = model
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()

    async def start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "kv").mkdir(parents=True)
        frontend = ("--http-host", HOST, "--http-port", str(self.port))
        mocker = ("--model-path", str(self._model), "--model-name", "stub", "--speedup-ratio", "1000000")
        self._spawn("frontend", *frontend, "--request-plane", "tcp")
        self._spawn("mocker", *mocker)
        await _wait_answered(self.port, body("stub", 1, _EXACTLY), self._check)

    def _spawn(self, part: str, *arguments: str) -> None:
        addresses = ("TCP_RPC_HOST", "TCP_RESPONSE_STREAM_HOST", "EVENT_PLANE_HOST", "SYSTEM_HOST")
        with (self._folder / f"{part}.log").open("wb") as log:
            self._processes[part] = subprocess.Popen(
                [str(self._python), "-m", f"dynamo.{part}", *arguments, "--discovery-backend", "file"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={
                    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                    "DYN_LOG": "off",
                    "HF_HUB_OFFLINE": "1",
                    "DYN_FILE_KV": str(self._folder / "kv"),
                    **{f"DYN_{name}": HOST for name in addresses},
                },
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def _check(self) -> None:
        for part, process in self._processes.items():
            if process.poll() is not None:
                said = (self._folder / f"{part}.log").read_text(errors="replace").strip()[-300:]
                raise BenchError(f"dynamo.{part} ended with code {process.returncode}: {said}")

    async def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def processes(self) -> Mapping[str, list[int]]:
        return {part: [process.pid] for part, process in self._processes.items()}

    def request(self, tokens: int) -> bytes:
        return http_request(HOST, self.port, body("stub", tokens, _EXACTLY))

    def text(self, tokens: int) -> str:
        return ""


def dynamo_python(work: Path, base: str, report: Callable[[str], None]) -> Path:
    """The Python of Dynamo's environment below `work`, made with the interpreter `base` if it is not there.

    For Python 3.11 and newer the package needs another one from NVIDIA's own index. Raises BenchError.
    """
    environment = Environment("dynamo", (pip("ai-dynamo==1.6.0"),), python=base)
    return ensure(environment, work, report) / "bin" / "python"


System = Ours | Dynamo
_EXACTLY = {"ignore_eos": True}  # what Dynamo needs to give as many tokens as are asked for


async def _wait_answered(port: int, content: bytes, check: Callable[[], None] = lambda: None) -> None:
    """Returns when a request is answered with 200."""
    client = Client(f"http://{HOST}:{port}", timeout=5)
    asked = msgspec.json.decode(content.replace(MARK.encode(), b"0"))
    try:
        await wait_answered(lambda: client.post("/v1/chat/completions", asked), READY_SECONDS, check)
    finally:
        client.close()
