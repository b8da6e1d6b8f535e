"""A real HTTP server on a loopback socket that answers as a test says, and as each kind of server tells of itself."""

import asyncio
import base64
import json
import re
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from services.executor.engines.server.dialects.base import VOCAB_PADDING

VOCAB = 100


class Exchange:
    """One request, and the stream that answers it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, *events: dict[str, Any] | bytes) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def drop(self) -> None:
        self.writer.transport.abort()

    async def refuse(self, status: int, body: Any) -> None:
        await answer(self.writer, status, body)

    async def closed_by_client(self) -> None:
        while await self._reader.read(1 << 16):
            pass


Script = Callable[[Exchange], Awaitable[None]]


async def answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
    await writer.drain()


class ScriptedServer:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.told: dict[str, Any] = {"/health": {}} | TOLD[kind]  # path to what it answers, or to (status, that)
        self.refused_seeds: tuple[str, ...] = ()  # those that our processor refuses, where it is loaded
        self.tempered = False  # whether its log probabilities are those at the request's temperature
        self.wanted_token = ""  # the authorization that it asks for
        self.script: Script | None = None
        self.task = "embed"  # of a model that generates nothing
        self.vector = [0.5, -2.0, 1e-3]
        self.pooled: list[dict[str, Any]] = []  # requests for vectors
        self.asked: list[str] = []
        self.on_asked: Callable[[str], None] = lambda path: None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed = False

    async def __aenter__(self) -> "ScriptedServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        for _ in range(4):  # turns of the loop: a connection that came is accepted, made, aborted and closed
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        loop, self._killed = asyncio.get_running_loop(), True
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        loop.call_soon(self._server.close)  # Python 3.11 leaves open what it accepted before and begins with after it
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: one that is cancelled before it has begun closes nothing."""
        self._writers.add(writer)
        if self._killed:
            writer.transport.abort()
        else:
            self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self._answer(head.decode(), reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        self.asked.append(path)
        self.on_asked(path)
        if headers.get("authorization", "") != self.wanted_token.lower():
            await answer(writer, 401, {"error": "Unauthorized"})
        elif method == "GET":
            said = self.told.get(path, (404, {}))
            await answer(writer, *(said if isinstance(said, tuple) else (200, said() if callable(said) else said)))
        elif path not in PATHS[self.kind] or self.told.get(path) is False:
            await answer(writer, 404, {"error": {"message": "no such route"}})
        elif json.loads(content).get("stream"):
            await self.script(Exchange(reader, writer))
            return False
        else:
            await self._probed(json.loads(content), writer)
        return True

    async def _probed(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if max(body.get("input_ids", [0])) >= VOCAB:  # SGLang takes it, and dies of it
            self.kill()
            return
        biased = [int(token) for token in body.get("sampling_params", {}).get("logit_bias", {})]
        tokens = biased or body.get("prompt") or body.get("token_ids") or body.get("input") or [0]
        seed = re.search(r"seed\W+?(-?\d+)", json.dumps(body))
        if tokens[0] >= VOCAB or (seed and seed[1] in self.refused_seeds):
            await answer(writer, 400, {"error": {"message": f"token {tokens[0]} or its seed is refused"}})
        elif "task" in body or "content" in body:
            self.pooled.append(body)
            if "content" in body:
                await answer(writer, 200, self.told.get("vector", [{"embedding": [self.vector]}]))
            elif body["task"] == self.task:
                await answer(writer, 200, self.told.get("vector", vector_answer(self.vector)))
            else:
                await answer(writer, 400, {"error": {"message": f"no task {body['task']}"}})
        else:
            hot = self.tempered and body.get("sampling_params", {}).get("temperature", 0) > 1
            tops = {"output_top_logprobs": [[[-4.5 if hot else -0.5, 7, None]]]} if "return_logprob" in body else None
            token = event(self.kind, [7], "length", 1, tops) | {"system_fingerprint": "abc"}
            await answer(writer, 200, self.told.get("token", token))


def vector_answer(*vectors: list[float]) -> dict[str, Any]:
    data = [{"data": base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode()} for one in vectors]
    return {"data": data, "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def event(kind: str, tokens: list[int], finish: str = "", count: int = 0, logprobs: Any = None) -> dict[str, Any]:
    """What servers send for `tokens`, which are the last ones of `count`."""
    if kind == "vllm":
        choice = {"token_ids": tokens, "finish_reason": finish or None, "logprobs": logprobs}
        usage = {"prompt_tokens_details": {"cached_tokens": 3}} if finish else None
        return {"choices": [choice], "usage": usage}
    if kind == "sglang":
        meta = {"completion_tokens": count, "cached_tokens": 3, "finish_reason": {"type": finish} if finish else None}
        return {"output_ids": tokens, "meta_info": meta | (logprobs or {})}
    ending = {"stop": True, "stop_type": {"length": "limit"}.get(finish, "eos"), "timings/cache_n": 3} if finish else {}
    return {"tokens": tokens, "completion_probabilities": logprobs or []} | ending


PATHS = {
    "vllm": ("/v1/completions", "/inference/v1/generate", "/pooling"),
    "sglang": ("/generate",),
    "llama.cpp": ("/completion", "/embedding"),
}
METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\nvllm:generation_tokens_total{} 5\n'
PROPS = {"default_generation_settings": {"n_ctx": 64}, "total_slots": 2, "model_path": "/smol", "build_info": "b9"}
TOLD: dict[str, dict[str, Any]] = {
    "vllm": {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "smol", "root": "/smol", "parent": None, "max_model_len": 64}]},
        "/metrics": METRICS,
        "/inference/v1/generate": False,
        "/pooling": False,
    },
    "sglang": {
        "/model_info": {"model_path": "/smol", "is_generation": True, "weight_version": "default"},
        "/get_server_info": {"version": "0.5.9", "dtype": "bfloat16", "max_running_requests": 2},
        "/v1/models": {"data": [{"max_model_len": 64}]},
    },
    "llama.cpp": {
        "/props": PROPS,
        "/v1/models": {"data": [{"meta": {"n_vocab": VOCAB + VOCAB_PADDING // 2}}]},
        "/slots": [{"id": 0, "n": 1}],
        "/embedding": False,
    },
}
