"""OpenVINO GenAI behind the part of OpenAI's chat completions that the load client uses.

Runs in the peer's own environment, where nothing of this repository is installed: a script, not a module.
It is as thin as it can be, so that the engine is measured and not the shim: one thread steps the pipeline,
and after each step hands all new tokens to the event loop at once.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import openvino
import openvino_genai
import tokenizers
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream

# KV cache: some 80,000 tokens of the model that is compared, many times what the workloads hold at once.
_CACHE_GB = 1


@dataclass
class Generation:
    """One request: what it asks for, and where its tokens go; an empty list is the end."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    tokens: "asyncio.Queue[list[int]]" = field(default_factory=asyncio.Queue)


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, weights: Path, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.enable_prefix_caching = True
        # A processor without bf16 instructions has its pipeline refuse them; f32 is its default there.
        precision = "bf16" if "_bf16" in Path("/proc/cpuinfo").read_text() else "f32"
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(weights), scheduler, "CPU", properties)
        self._waiting: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._running: dict[int, tuple[Any, Generation]] = {}
        self._made = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()

    def submit(self, generation: Generation) -> None:
        self._waiting.put(generation)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._admit(wait=not self._running)
            self._pipeline.step()
            loop.call_soon_threadsafe(_deliver, self._collect())

    def _admit(self, *, wait: bool) -> None:
        """Take all that waits; with `wait` at least one."""
        while wait or not self._waiting.empty():
            generation = self._waiting.get()
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = generation.max_tokens
            config.ignore_eos = generation.ignore_eos
            config.do_sample = False
            prompt = openvino.Tensor(np.array([generation.prompt], dtype=np.int64))
            self._made += 1
            handle = self._pipeline.add_request(self._made, prompt, config)
            self._running[self._made] = (handle, generation)
            wait = False

    def _collect(self) -> list[tuple[Generation, list[int]]]:
        """New tokens of all running requests; those that have ended leave."""
        found: list[tuple[Generation, list[int]]] = []
        for number, (handle, generation) in list(self._running.items()):
            while handle.can_read():
                outputs = handle.read().values()
                found += [(generation, list(out.generated_ids)) for out in outputs if out.generated_ids]
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                found.append((generation, []))
                del self._running[number]
        return found


def _deliver(found: list[tuple[Generation, list[int]]]) -> None:
    for generation, tokens in found:
        generation.tokens.put_nowait(tokens)


class Api:
    """The endpoints."""

    def __init__(self, engine: Engine, model: Path, name: str) -> None:
        self._engine = engine
        self._name = name
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        # What it renders goes to a tokenizer and to no browser.
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)  # noqa: S701
        self._template = environment.from_string((model / "chat_template.jinja").read_text())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        text = self._template.render(messages=body["messages"], add_generation_prompt=True)
        prompt = self._tokenizer.encode(text, add_special_tokens=False).ids
        generation = Generation(prompt, body.get("max_tokens", 128), body.get("ignore_eos", False))
        self._engine.submit(generation)
        if body.get("stream"):
            return StreamingResponse(self._stream(generation), media_type="text/event-stream")
        tokens: list[int] = []
        while new := await generation.tokens.get():
            tokens += new
        message = {"role": "assistant", "content": self._tokenizer.decode(tokens)}
        choice = {"index": 0, "message": message, "finish_reason": _reason(generation, len(tokens))}
        return JSONResponse({"choices": [choice], "usage": _usage(generation, len(tokens))})

    async def _stream(self, generation: Generation) -> AsyncIterator[bytes]:
        decode = DecodeStream(skip_special_tokens=True)
        count = 0
        while tokens := await generation.tokens.get():
            count += len(tokens)
            pieces = [decode.step(self._tokenizer, token) for token in tokens]
            if text := "".join(piece for piece in pieces if piece):
                yield self._event([{"index": 0, "delta": {"content": text}, "finish_reason": None}])
        reason = _reason(generation, count)
        yield self._event([{"index": 0, "delta": {}, "finish_reason": reason}])
        yield self._event([], usage=_usage(generation, count)) + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"object": "chat.completion.chunk", "model": self._name, "choices": choices, **more}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _reason(generation: Generation, count: int) -> str:
    return "length" if count >= generation.max_tokens else "stop"


def _usage(generation: Generation, count: int) -> dict[str, int]:
    prompt = len(generation.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a GGUF file with OpenVINO GenAI.")
    parser.add_argument("--model", type=Path, required=True, help="Directory with tokenizer and template.")
    parser.add_argument("--weights", type=Path, required=True, help="The GGUF file.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options.weights, options.threads)
    api = Api(engine, options.model, options.model.name)
    routes = [Route("/v1/models", api.models), Route("/v1/chat/completions", api.chat, methods=["POST"])]
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, host="127.0.0.1", port=options.port, access_log=False, lifespan="off")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine.start(runner.get_loop())
        runner.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
