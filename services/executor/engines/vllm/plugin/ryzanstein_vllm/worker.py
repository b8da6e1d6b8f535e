"""vLLM as an executor group's engine: `python -m ryzanstein_vllm.worker FD`, started by the group's leader.

It runs in vLLM's own environment, and imports nothing but vLLM and msgspec, which vLLM depends on: whatever vLLM pins
stays as it is. FD is a socket to the leader; each message is a length (4 bytes, little-endian) and so many bytes of
MessagePack.

    leader ──▶ start, generate, abort              ┌─▶ vLLM's scheduler, in vLLM's engine process
    leader ◀── ready, step(deltas), failed         └── one message for each of its steps, for all requests together

The end of the socket is the end of this process and of all that vLLM has started: `_guard` sees to it where this
process is killed.
"""

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

LENGTH = struct.Struct("<I")
MOST_BYTES = 64 << 20  # of one message
OLDEST = (0, 12)  # versions of vLLM before it have another interface
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # vLLM's: 1 for kernels whose sums do not depend on the batch
FAILURES = "KEYED_SAMPLING_FAILURES"  # as in `processor.py`, which takes seconds to import
# Of what requests may ask for, beside adapters without --enable-lora, and vectors where it generates (`ReadyMessage`).
UNSUPPORTED: list[str] = []
# Its operators for CPUs (`vllm.lora.ops.torch_ops`) read the last adapter for rows that have none, number -1.
WRONG_ADAPTERS = "on CPUs requests of the model alone are given the adapters of others; leave --enable-lora out"
TASKS = ("generate", "embed", "classify")
MOST_FAILURES = 256  # that are kept
_GREEDY = 1e-5
_ENDED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes of a process that somebody else has ended
# Ends with the process that it is given, and takes the whole process group along.
_GUARD = """
import os, select, signal, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
finally:
    os.killpg(0, signal.SIGKILL)
"""


class Start(msgspec.Struct, tag="start"):
    """The first message: vLLM's own arguments, as `vllm serve` has them."""

    arguments: list[str]


class Generate(msgspec.Struct, tag="generate"):
    """As `EngineRequest` of the executor's `engines/base.py`."""

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    sampling: dict[str, Any] = {}
    stop_token_ids: list[int] = []
    grammar: dict[str, str] | None = None
    prompt_logprobs: int = -1
    cache_salt: str = ""
    adapter: str = ""
    adapter_directory: str = ""
    pool: str = ""
    normalized: bool = True
    second_segment: int = 0
    runs_on: bool = False  # vLLM knows of no end but `stop_token_ids`


class Abort(msgspec.Struct, tag="abort"):
    ids: list[str]


class ReadyMessage(msgspec.Struct, omit_defaults=True, tag="ready"):
    """As `EngineFacts`."""

    name: str
    vocab_size: int
    context_length: int
    places: int
    kv_tokens: int = 0
    numerics: str = ""
    exact: bool = False
    tasks: tuple[str, ...] = ("generate",)
    embedding_size: int = 0
    labels: list[str] = []
    adapters: int = 0
    unsupported: list[str] = []


class Delta(msgspec.Struct, array_like=True, omit_defaults=True):
    """As `EngineDelta`."""

    id: str
    tokens: list[int] = []
    finish: str = ""
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    cached_tokens: int = 0
    error: str = ""
    code: str = ""
    prompt_scores: bytes = b""
    vector: bytes = b""


class StepMessage(msgspec.Struct, array_like=True, omit_defaults=True, tag="step"):
    """As `EngineStep`."""

    steps: int
    deltas: list[Delta] = []
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0


class FailedMessage(msgspec.Struct, omit_defaults=True, tag="failed"):
    """As `EngineFailed`."""

    error: str
    crashed: bool = True


_commands = msgspec.msgpack.Decoder(Generate | Abort)
_start = msgspec.msgpack.Decoder(Start)


def sampling_arguments(request: Generate, vocab_size: int) -> dict[str, Any]:
    """What `KeyedSampling` is told; {}: the most likely token, which is vLLM's own choice."""
    given = {name: value for name, value in request.sampling.items() if name != "logprobs"}
    if request.grammar is not None:
        given["grammar"] = request.grammar
    chosen = given.get("temperature", 1.0) > _GREEDY and given.get("top_k", 0) != 1
    if not chosen and not given.keys() - {"temperature", "top_k", "top_p", "min_p", "seed"}:
        return {}
    if given.get("min_tokens") or request.grammar is not None:
        given["stop_token_ids"] = request.stop_token_ids
    return {"seed": 0, **given, "prompt_tokens": request.prompt_tokens, "vocab_size": vocab_size, "id": request.id}


def token_logprobs(found: dict[int, Any], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Of one position: the token's log probability and the `count` most likely ones."""
    top = sorted((one.rank, int(key), float(one.logprob)) for key, one in found.items() if 0 < one.rank <= count)
    return float(found[token].logprob), [(key, logprob) for _, key, logprob in top]


def prompt_scores(positions: list[dict[int, Any] | None], tokens: list[int], count: int) -> bytes:
    """`TokenEntry.prompt_scores` of a prompt; `positions`: vLLM's, the first of which is None."""
    scores = bytearray()
    for token, found in zip(tokens[1:], positions[1:], strict=True):
        assert found is not None, "only the first token has nothing before it"
        own, top = found[token], token_logprobs(found, token, count)[1]
        scores += struct.pack("<fi", own.logprob, own.rank)
        for key, logprob in [*top, *[(0, float("-inf"))] * count][:count]:
            scores += struct.pack("<if", key, logprob)
    return bytes(scores)


class RequestFailures:
    """Why requests have failed in vLLM's engine process, as `KeyedSampling` tells it; such a request ends with a stop
    token."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path)
        self._reasons: dict[str, str] = {}

    def take(self, request_id: str) -> str:
        """Of a request that has ended; empty: it has not failed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                one, reason = msgspec.json.decode(self._socket.recv(65536), type=tuple[str, str])
                self._reasons[one] = reason
                if len(self._reasons) > MOST_FAILURES:  # of requests that were aborted
                    del self._reasons[next(iter(self._reasons))]
        return self._reasons.pop(request_id, "")


class LeaderRequests:
    """Requests of one leader, and what vLLM gives for them."""

    def __init__(self, llm: Any, vocab_size: int, writer: asyncio.StreamWriter, failures: RequestFailures) -> None:
        self._failures = failures
        self._llm = llm
        self._vocab_size = vocab_size
        self._writer = writer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._step = StepMessage(0)
        self._due = False
        self._adapters: dict[str, int] = {}  # vLLM's numbers of them, by digest
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def generate(self, request: Generate) -> None:
        task = asyncio.create_task(self._generate(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    def abort(self, ids: list[str]) -> None:
        for one in ids:
            if (task := self._tasks.get(one)) is not None:
                task.cancel()  # vLLM aborts it then

    def stepped(self, running: int, waiting: int, kv_used: float) -> None:
        """vLLM has computed a step."""
        step = self._step
        step.steps, step.running, step.waiting, step.kv_used = step.steps + 1, running, waiting, kv_used
        self._tell_soon()

    async def _generate(self, request: Generate) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            if request.pool:
                await self._pool(request)
                return
            async for output in self._llm.generate(*self._asked(request), lora_request=self._adapter_of(request)):
                self._add(request, output)
        except EngineDeadError:
            if not self.dead.done():
                self.dead.set_result("vLLM's engine process has ended")
        except (ValueError, TypeError) as error:
            self._refuse(request, "invalid_request", error)
        except Exception as error:  # one request ends, and not the engine
            self._refuse(request, "internal_error", error.__cause__ or error)

    async def _pool(self, request: Generate) -> None:
        segments = {"compressed_token_type_ids": request.second_segment} if request.second_segment else None
        params = pooling_params(request.pool, normalized=request.normalized, extra_kwargs=segments)
        adapter = self._adapter_of(request)
        async for output in self._llm.encode(_prompt(request), params, request.id, lora_request=adapter):
            vector = output.outputs.data.float().cpu().numpy().astype("<f4").tobytes()
            cached = getattr(output, "num_cached_tokens", 0) or 0
            self._tell(Delta(request.id, finish="stop", cached_tokens=cached, vector=vector))

    def _asked(self, request: Generate) -> tuple[Any, Any, str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        logprobs = request.sampling.get("logprobs", -1)
        chosen = sampling_arguments(request, self._vocab_size)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(1, request.max_tokens),
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs if logprobs >= 0 else None,
            prompt_logprobs=request.prompt_logprobs if request.prompt_logprobs >= 0 else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"ryzanstein": chosen} if chosen else None,
        )
        return _prompt(request), params, request.id

    def _adapter_of(self, request: Generate) -> Any:
        """As vLLM knows it: by a number from 1 on, of which there are as many as adapters were ever asked for."""
        if not request.adapter:
            return None
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(request.adapter, len(self._adapters) + 1)
        return LoRARequest(request.adapter, number, request.adapter_directory)

    def _add(self, request: Generate, output: Any) -> None:
        new = output.outputs[0]
        delta = Delta(request.id, list(new.token_ids), cached_tokens=output.num_cached_tokens or 0)
        if new.finish_reason:
            delta.finish = new.finish_reason if new.finish_reason in ("stop", "length") else "error"
            delta.error = "" if delta.finish != "error" else f"vLLM has ended the request: {new.finish_reason}."
        if delta.finish == "stop" and (reason := self._failures.take(request.id)):
            delta = Delta(request.id, finish="error", error=reason, code="invalid_grammar" if request.grammar else "")
        count = request.sampling.get("logprobs", -1)
        if count >= 0 and delta.tokens and new.logprobs:
            delta.logprobs = [
                token_logprobs(found, token, count) for found, token in zip(new.logprobs, delta.tokens, strict=True)
            ]
        if output.prompt_logprobs:
            delta.prompt_scores = prompt_scores(output.prompt_logprobs, request.tokens, request.prompt_logprobs)
        self._tell(delta)

    def _refuse(self, request: Generate, code: str, error: BaseException) -> None:
        self._tell(Delta(request.id, finish="error", error=f"vLLM refuses the request: {_line(error)}", code=code))

    def _tell(self, delta: Delta) -> None:
        self._step.deltas.append(delta)
        self._tell_soon()

    def _tell_soon(self) -> None:
        """Once whoever runs in this turn of the event loop has added what it has."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._due = False
        step, self._step.deltas = msgspec.structs.replace(self._step), []
        try:
            send(self._writer, step)
        except Exception as error:  # in a callback nobody would see it
            if not self.dead.done():
                self.dead.set_result(f"what vLLM gave cannot be told ({error})")


def _prompt(request: Generate) -> Any:
    from vllm import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=request.tokens)
    if request.cache_salt:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def pooling_params(task: str, *, normalized: bool, extra_kwargs: dict[str, Any] | None = None) -> Any:
    """Of vLLM: vectors of length 1 where `normalized`, and logits, which gateways make scores of."""
    from vllm import PoolingParams

    return PoolingParams(task=task, use_activation=task == "embed" and normalized, extra_kwargs=extra_kwargs)


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises `EOFError` where there will be none."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MOST_BYTES:
            raise EOFError(f"a message of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError(str(error)) from None


def engine_of(arguments: list[str]) -> tuple[Any, list["LeaderRequests"]]:
    """vLLM, made of its own arguments, and the list that takes the `LeaderRequests` that is told of its steps."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    told: list[LeaderRequests] = []

    class StepStats(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *more: Any, **named: Any) -> None:
            if told and scheduler_stats is not None:
                stats = scheduler_stats
                told[0].stepped(stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)

        def log_engine_initialized(self) -> None:
            pass

    parser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="--engine-args", exit_on_error=False, allow_abbrev=False)
    )
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))
    if parsed.enable_lora and device() == "cpu":
        raise argparse.ArgumentTypeError(WRONG_ADAPTERS)
    # A server's defaults: on an H100 steps of up to 8192 tokens instead of 2048.
    usage = UsageContext.OPENAI_API_SERVER
    return AsyncLLM.from_engine_args(parsed, usage_context=usage, stat_loggers=[StepStats]), told


class Numerics(NamedTuple):
    """What decides whether the same request has the same text in any batch, and continued after any of its tokens."""

    dtype: str
    quantization: str
    kv_cache: str  # dtype of its cache; auto: that of the model
    device: str
    invariant: bool  # whether VLLM_BATCH_INVARIANT is set, which has kernels for GPUs alone

    @property
    def exact(self) -> bool:
        """In fp32 throughout, sums of another batch differ by too little to be seen."""
        whole = self.dtype == "float32" and not self.quantization and self.kv_cache in ("auto", "float32")
        return whole or (self.invariant and self.device == "cuda")


def device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def facts_of(llm: Any, supported: Sequence[str]) -> ReadyMessage:
    """What vLLM computes with, and which of its tasks are `supported`."""
    import vllm

    config = llm.vllm_config
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    numerics = Numerics(
        str(model.dtype).removeprefix("torch."),
        model.quantization or "",
        cache.cache_dtype,
        device(),
        os.environ.get(BATCH_INVARIANT, "0") not in ("", "0"),
    )
    parts = (
        f"vllm {vllm.__version__}",
        numerics.dtype,
        f"quantization {model.quantization}",
        f"kv {cache.cache_dtype}",
        f"tp {parallel.tensor_parallel_size}",
        f"pp {parallel.pipeline_parallel_size}",
        numerics.device,
        "batch invariant" if numerics.invariant else "",
    )
    blocks = cache.num_gpu_blocks or 0
    adapters = config.lora_config.max_loras if config.lora_config else 0
    tasks = tuple(task for task in TASKS if task in supported)
    cannot = {"adapter": not adapters, "pooling": tasks == ("generate",)}
    named = getattr(model.hf_config, "id2label", None) or {}
    return ReadyMessage(
        name=f"vLLM {vllm.__version__}",
        vocab_size=model.get_vocab_size(),
        context_length=model.max_model_len,
        places=config.scheduler_config.max_num_seqs,
        kv_tokens=blocks * cache.block_size * parallel.data_parallel_size,
        numerics=", ".join(filter(None, parts)),
        exact=numerics.exact,
        tasks=tasks,
        embedding_size=model.embedding_size if "embed" in tasks else 0,
        labels=[str(named[at]) for at in sorted(named)] if "classify" in tasks else [],
        adapters=adapters,
        unsupported=[*UNSUPPORTED, *(name for name, true in cannot.items() if true)],
    )


async def serve(line: socket.socket) -> None:
    with tempfile.TemporaryDirectory(prefix="ryzanstein-vllm-") as directory:
        os.environ[FAILURES] = f"{directory}/failures"  # vLLM's processes have it from here
        await _serve(line, RequestFailures(os.environ[FAILURES]))


async def _serve(line: socket.socket, failures: RequestFailures) -> None:
    reader, writer = await asyncio.open_connection(sock=line)
    start = _start.decode(await receive(reader))
    try:
        llm, told = engine_of(start.arguments)
    except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        await _fail(writer, f"vLLM does not take these --engine-args: {error}")
        return
    except Exception as error:  # said in one sentence; vLLM has logged the rest
        await _fail(writer, f"vLLM did not start: {_line(error)}")
        return
    processes = multiprocessing.active_children()  # vLLM's
    try:
        supported = await llm.get_supported_tasks()
        await _warm_up(llm, supported)
    except Exception as error:
        await _fail(writer, f"vLLM started, and failed at its first request: {_line(error)}")
        return
    facts = facts_of(llm, supported)
    gc.collect()
    gc.freeze()  # as vLLM's own server does: else a look at all that was imported is a pause of every stream
    engine = LeaderRequests(llm, facts.vocab_size, writer, failures)
    told.append(engine)
    send(writer, facts)
    commands = asyncio.create_task(_obey(reader, engine))
    ends: set[asyncio.Future[Any]] = {commands, engine.dead}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if engine.dead.done():
        codes = [one.exitcode for one in processes if one.exitcode is not None]
        await _fail(writer, engine.dead.result(), crashed=not codes or any(code not in _ENDED for code in codes))
    with contextlib.suppress(Exception):
        llm.shutdown()


async def _warm_up(llm: Any, tasks: Sequence[str]) -> None:
    """vLLM compiles what counts log probabilities when it first does: not beside streams, whose steps wait for it."""
    from vllm import SamplingParams, TokensPrompt

    if "generate" not in tasks:
        task = next(task for task in TASKS if task in tasks)
        params = pooling_params(task, normalized=True)
        async for _ in llm.encode(TokensPrompt(prompt_token_ids=[1, 2, 3]), params, "warm-up"):
            pass
        return
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    async for _ in llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), params, "warm-up"):
        pass


async def _obey(reader: asyncio.StreamReader, engine: LeaderRequests) -> None:
    with contextlib.suppress(EOFError):
        while True:
            command = _commands.decode(await receive(reader))
            if isinstance(command, Abort):
                engine.abort(command.ids)
            else:
                engine.generate(command)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


async def _fail(writer: asyncio.StreamWriter, error: str, *, crashed: bool = True) -> None:
    send(writer, FailedMessage(error, crashed))
    with contextlib.suppress(ConnectionError):
        await writer.drain()


def _guard() -> None:
    """Nothing that vLLM starts outlives this process, which ends with the leader."""
    if hasattr(os, "pidfd_open"):
        subprocess.Popen([sys.executable, "-S", "-c", _GUARD, str(os.getpid())])  # noqa: S603  # our own


def main(fd: int) -> int:
    """The process. `fd`: the socket to the leader."""
    _guard()
    try:
        import vllm
    except ImportError as error:
        asyncio.run(_cannot(fd, f"{sys.executable} has no vLLM that can be imported ({error})"))
        return 1
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdecimal())
    if len(version) == 2 and version < OLDEST:
        asyncio.run(_cannot(fd, f"vLLM {vllm.__version__} is too old; install {'.'.join(map(str, OLDEST))} or newer"))
        return 1
    asyncio.run(serve(socket.socket(fileno=fd)))
    return 0


async def _cannot(fd: int, error: str) -> None:
    _, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    await _fail(writer, error)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
