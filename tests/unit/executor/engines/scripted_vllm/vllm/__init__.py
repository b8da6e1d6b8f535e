"""A package of vLLM's name with as much of its interface as our worker uses; its tokens follow a script.

Each token is the one before plus 1, and with a LoRA adapter its number more. What a request's first token makes it do
stands in `SCRIPT`. With --runner pooling a vector is the prompt's first token, and whether something was made of it.
"""

import argparse
import asyncio
import json
import os
import socket
import struct
import sys
import types
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

SCRIPT = {"too long": 90, "dies": 91, "fails": 92, "is ended by vLLM": 93, "cannot be sampled": 94, "never ends": 95}
VOCAB = 100
__version__ = os.environ.get("SCRIPTED_VLLM_VERSION", "0.32.0")


class TokensPrompt(dict[str, Any]):
    pass


class SamplingParams:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class PoolingParams(NamedTuple):
    task: str
    use_activation: bool
    extra_kwargs: Any = None


class _Tensor(list[float]):
    """As much of a tensor as is asked of one."""

    def _same(self) -> "_Tensor":
        return self

    float = cpu = numpy = _same

    def astype(self, dtype: str) -> "_Tensor":
        assert dtype == "<f4"
        return self

    def tobytes(self) -> bytes:
        return struct.pack(f"<{len(self)}f", *self)


class RequestOutputKind(Enum):
    DELTA = 1


class UsageContext(Enum):
    OPENAI_API_SERVER = 1


class EngineDeadError(Exception):
    pass


class LoRARequest(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


class FlexibleArgumentParser(argparse.ArgumentParser):
    pass


class AsyncEngineArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("--model", "--logits-processors", "--generation-config", "--dtype", "--max-model-len"):
            parser.add_argument(name, default="")
        parser.add_argument("--max-num-seqs", type=int, default=256)
        parser.add_argument("--runner", default="generate")
        parser.add_argument("--convert", default="")
        parser.add_argument("--enable-lora", action="store_true")
        parser.add_argument("--max-lora-rank", type=int, default=16)
        parser.add_argument("--no-async-scheduling", action="store_true")
        parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "int8"])
        return parser

    @staticmethod
    def from_cli_args(parsed: argparse.Namespace) -> argparse.Namespace:
        return parsed


def _logprobs(*tokens: int) -> dict[int, Any]:
    return {token: SimpleNamespace(rank=rank, logprob=-float(rank)) for rank, token in enumerate(tokens, 1)}


class AsyncLLM:
    def __init__(self, parsed: argparse.Namespace, loggers: Iterable[Any]) -> None:
        if parsed.kv_cache_dtype == "fp8":
            raise RuntimeError("There is no memory\nfor that.")
        model = SimpleNamespace(
            dtype=f"torch.{parsed.dtype}",
            quantization=None,
            get_vocab_size=lambda: VOCAB,
            max_model_len=64,
            embedding_size=2,
            hf_config=SimpleNamespace(id2label={1: "bad", 0: "good"}),
        )
        self._tasks = (parsed.convert or "embed",) if parsed.runner == "pooling" else ("generate",)
        self.vllm_config = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks=8, block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=parsed.max_num_seqs),
            lora_config=SimpleNamespace(max_loras=1) if parsed.enable_lora else None,
        )
        self._has_kernels = parsed.kv_cache_dtype != "int8"
        self._loggers = [each(self.vllm_config) for each in loggers]
        self._running = 0

    @classmethod
    def from_engine_args(
        cls, parsed: argparse.Namespace, usage_context: UsageContext, stat_loggers: Iterable[Any]
    ) -> "AsyncLLM":
        assert usage_context is UsageContext.OPENAI_API_SERVER
        return cls(parsed, stat_loggers)

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        if not self._has_kernels:
            sys.stdout.write(
                "(EngineCore pid=1) ERROR 11-28 07:57:37 [core.py:1512] RuntimeError: no kernel for that.\n"
            )
            sys.stdout.write("(MainProcess pid=1) ERROR 11-28 07:57:37 [llm.py:906] x.EngineDeadError: See above.\n")
            sys.stdout.flush()
            raise EngineDeadError("It has ended.")
        tokens = list(prompt["prompt_token_ids"])
        self._running += 1
        try:
            for at in range(params.max_tokens):
                await asyncio.sleep(0)
                stats = SimpleNamespace(num_running_reqs=self._running, num_waiting_reqs=0, kv_cache_usage=0.5)
                for each in self._loggers:
                    each.record(stats, None)
                output = await self._output(tokens, params, at)
                if lora_request is not None:
                    assert lora_request.lora_path == f"/adapters/{lora_request.lora_name}"
                    output.outputs[0].token_ids[0] += lora_request.lora_int_id
                yield output
        finally:
            self._running -= 1
            sys.stdout.write(f"over: {request_id}\n")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return (*self._tasks, "token_" + self._tasks[0])

    async def encode(
        self, prompt: dict[str, Any], params: PoolingParams, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        assert params.task in self._tasks
        made = params.extra_kwargs["compressed_token_type_ids"] if params.extra_kwargs else params.use_activation
        for each in self._loggers:
            each.record(SimpleNamespace(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.0), None)
        yield SimpleNamespace(outputs=SimpleNamespace(data=_Tensor([prompt["prompt_token_ids"][0], made])))

    async def _output(self, prompt: list[int], params: Any, at: int) -> Any:
        finish = "length" if at + 1 == params.max_tokens else None
        if prompt[0] == SCRIPT["too long"]:
            raise ValueError("The prompt is\ntoo long.")
        if prompt[0] == SCRIPT["dies"]:
            raise EngineDeadError
        if prompt[0] == SCRIPT["fails"]:
            raise RuntimeError from OSError("a kernel failed")
        if prompt[0] == SCRIPT["is ended by vLLM"]:
            finish = "abort"
        if prompt[0] == SCRIPT["cannot be sampled"]:
            self._tell_failure(params.extra_args["ryzanstein"]["id"])
            finish = "stop"
        if prompt[0] == SCRIPT["never ends"] and at == 1:
            await asyncio.Event().wait()
        token = (prompt[-1] + at + 1) % VOCAB
        chosen = SimpleNamespace(token_ids=[token], finish_reason=finish, logprobs=None)
        if params.logprobs is not None:
            chosen.logprobs = [_logprobs(token, 0)]
        scored = at == 0 and params.prompt_logprobs is not None
        positions = [None, *(_logprobs(each, 0) for each in prompt[1:])] if scored else None
        return SimpleNamespace(outputs=[chosen], num_cached_tokens=2 if at == 0 else None, prompt_logprobs=positions)

    def _tell_failure(self, request_id: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.sendto(json.dumps([request_id, "No token fits."]).encode(), os.environ["KEYED_SAMPLING_FAILURES"])

    def shutdown(self) -> None:
        sys.stdout.write("shut down\n")


class StatLoggerBase:
    pass


def _modules() -> Iterable[types.ModuleType]:
    for name, members in {
        "sampling_params": {"RequestOutputKind": RequestOutputKind},
        "engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "utils.argparse_utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
        "lora.request": {"LoRARequest": LoRARequest},
        "usage.usage_lib": {"UsageContext": UsageContext},
        "v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
        "platforms": {"current_platform": SimpleNamespace(device_type=os.environ.get("SCRIPTED_VLLM_DEVICE", "cpu"))},
    }.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            yield types.ModuleType(".".join(("vllm", *parts[:depth])))
        module = types.ModuleType(f"vllm.{name}")
        module.__dict__.update(members)
        yield module


for _module in _modules():
    sys.modules.setdefault(_module.__name__, _module)
