"""vLLM's server, by its token-in token-out route where that is switched on, else by OpenAI's completions route.

    /inference/v1/generate   token_ids ─▶ choices[0].token_ids        with --enable-scale-out or --tokens-only
    /v1/completions          prompt of ids, return_token_ids ─▶ the same, and a text that nobody reads

With our logits processor loaded the choice is keyed by (seed, position): sampling goes to it, and vLLM is told to be
greedy. Without it vLLM samples by itself. A continuation is a new request there whose output begins anew: what counts
output is refused then, and `seed` gives the same text only to a request that was never continued.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.server.client import ServerClient, ServerFault
from services.executor.engines.server.dialects import base
from services.executor.engines.server.dialects.base import Identity, Progress, StreamPiece
from shared.errors import ConfigurationError
from shared.messages import SamplingParams, TokenLogprobs

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"

_KV_USED = "vllm:kv_cache_usage_perc"
_PROGRESS = (
    _KV_USED,  # grows with each part of a long prompt, for which no other one does
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
_CACHE = r'^vllm:cache_config_info.*?\bblock_size="(\d+)".*?\bnum_gpu_blocks="(\d+)"'
# Its route for completions streams no prompt's log probabilities, and the other one has no field for them.
UNSUPPORTED = ["prompt_logprobs", *base.UNSUPPORTED]
WITHOUT_PROCESSOR = ["grammar", "penalties", "bad_words", *UNSUPPORTED]


class _Version(msgspec.Struct):
    version: str


class _Logprobs(msgspec.Struct):
    content: list[base.Candidate] | None = None  # of the token route
    tokens: list[str] = []  # of completions, as `token_id:7`
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: base.ServerFailure | None = None
    system_fingerprint: str | None = None


class VllmDialect:
    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._model = ""
        self.path = COMPLETIONS
        self._processor = False

    async def identify(self) -> Identity:
        client = self._client
        version = base.decoded(client, await client.ask("/version"), _Version, "vLLM", "/version")
        model = await base.only_model(client, "vLLM")
        return Identity(
            f"vLLM {version.version}", model.root or model.id, context_length=model.max_model_len or 0, name=model.id
        )

    async def examine(self, identity: Identity, vocab_size: int) -> EngineFacts:
        self._model = identity.name
        # Nothing is computed for an empty request. 403 and 404 are a route that is switched off, or not there.
        offered = (await self._client.ask(GENERATE, {})).status not in (401, 403, 404, 405)
        self.path = GENERATE if offered else COMPLETIONS
        body = await base.check_vocabulary_by_asking(self._client, self.path, self._probe, vocab_size)
        fingerprint = self._fingerprint(body)
        self._processor = await self._has_processor()
        dtype = await self._dtype()
        return EngineFacts(
            name=identity.server,
            vocab_size=vocab_size,
            context_length=identity.context_length,
            places=0,
            unsupported=UNSUPPORTED if self._processor else WITHOUT_PROCESSOR,
            numerics=" ".join(filter(None, [identity.server, fingerprint, f"dtype={dtype}" if dtype else ""])),
            kv_tokens=await self._kv_tokens(),
            exact=self._processor and dtype == "float32",
        )

    def body(self, request: EngineRequest) -> dict[str, Any]:
        sampling = self._sampling(request)
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if request.sampling.logprobs >= 0:
            sampling["logprobs"] = request.sampling.logprobs
        if self.path == COMPLETIONS:
            body["return_tokens_as_token_ids"] = True
        return body | self._asked(request.tokens, sampling, for_processor(request) if self._processor else None)

    def reader(self, request: EngineRequest) -> base.Reader:
        return partial(read, request.sampling.logprobs)

    async def progress(self) -> Progress:
        return base.progress_of((await self._client.ask("/metrics")).body, _PROGRESS, _KV_USED)

    def _sampling(self, request: EngineRequest) -> dict[str, Any]:
        """All that a server's own defaults could change is named, also where it is neutral."""
        wanted = SamplingParams(temperature=0.0) if self._processor else request.sampling
        sampling: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
            "top_p": wanted.top_p,
            "min_p": wanted.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": _signed(wanted.seed),
            # The end-of-sequence ids are among the stop tokens, unless they are to be ignored.
            "ignore_eos": True,
            "stop_token_ids": request.stop_token_ids,
            "min_tokens": base.min_tokens(request, wanted.min_tokens),
        }
        if wanted.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in wanted.logit_bias.items()}
        if wanted.allowed_token_ids:
            sampling["allowed_token_ids"] = wanted.allowed_token_ids
        return sampling

    def _asked(self, tokens: Sequence[int], sampling: dict[str, Any], extra: dict[str, Any] | None) -> dict[str, Any]:
        """The form of the route."""
        if self.path == GENERATE:
            extras = {"extra_args": {"ryzanstein": extra}} if extra else {}
            return {"token_ids": list(tokens), "sampling_params": sampling | {"detokenize": False} | extras}
        # This route takes numbers and strings of extra arguments, and nothing nested.
        xargs = {"vllm_xargs": {"ryzanstein": msgspec.json.encode(extra).decode()}} if extra else {}
        return {"prompt": list(tokens), "return_token_ids": True} | sampling | xargs

    def _probe(self, token: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Asks for one token, in one piece."""
        return {"model": self._model} | self._asked([token], {"max_tokens": 1, "temperature": 0.0}, extra)

    def _fingerprint(self, body: bytes) -> str:
        try:
            chunk = msgspec.json.decode(body, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise base.exchanges_no_tokens(self._client, "vLLM", str(error)) from None
        if len(chunk.choices) != 1 or len(chunk.choices[0].token_ids or []) != 1:
            raise base.exchanges_no_tokens(self._client, "vLLM", "return_token_ids is ignored")
        return chunk.system_fingerprint or ""

    async def _has_processor(self) -> bool:
        """Ours refuses a seed below 0; where it is not loaded nobody looks at the argument."""
        if (await self._client.ask(self.path, self._probe(0, {"seed": -1, "prompt_tokens": 1}))).status != 400:
            return False
        answer = await self._client.ask(self.path, self._probe(0, {"seed": 1, "prompt_tokens": 1}))
        if answer.status != 200:
            raise ConfigurationError(
                f"{self._client.name} has a logits processor that does not know what it is told "
                f"({self._client.sentence(answer)}): install the ryzanstein_vllm of this version beside vLLM"
            )
        return True

    async def _dtype(self) -> str:
        """Told by servers in development mode alone; empty: not known."""
        answer = await self._client.ask("/server_info?config_format=json")
        try:
            told = msgspec.json.decode(answer.body)["vllm_config"]["model_config"]["dtype"]
        except (msgspec.MsgspecError, LookupError, TypeError):
            return ""
        return str(told).removeprefix("torch.")

    async def _kv_tokens(self) -> int:
        """Of all engines behind the server."""
        page = (await self._client.ask("/metrics")).body.decode(errors="replace")
        return sum(int(size) * int(blocks) for size, blocks in re.findall(_CACHE, page, re.MULTILINE))


def read(wanted: int, event: bytes) -> StreamPiece:
    chunk = msgspec.json.decode(event, type=_Chunk)
    if chunk.error is not None:
        return chunk.error.piece()
    piece = StreamPiece()
    if chunk.choices:
        choice = chunk.choices[0]
        piece = base.ending(choice.finish_reason or "")
        piece.tokens = choice.token_ids or []
        if wanted >= 0 and piece.tokens:
            piece.logprobs = _logprobs(choice.logprobs or _Logprobs(), len(piece.tokens), wanted)
    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
        piece.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return piece


def _logprobs(told: _Logprobs, tokens: int, wanted: int) -> list[TokenLogprobs]:
    if told.content is not None:
        return base.of_candidates(tokens, told.content, wanted)
    tops = [[(_token_of(name), value) for name, value in (top or {}).items()] for top in told.top_logprobs]
    return base.ranked(tokens, told.token_logprobs, tops or [None] * tokens, wanted)


def for_processor(request: EngineRequest) -> dict[str, Any]:
    """What our logits processor is told: what is not neutral, the request's endings, and where its output begins."""
    wishes: dict[str, Any] = msgspec.to_builtins(request.sampling, str_keys=True)
    wishes.pop("logprobs", None)
    wishes |= {"seed": request.sampling.seed, "prompt_tokens": request.prompt_tokens}
    if request.stop_token_ids:
        wishes["stop_token_ids"] = request.stop_token_ids
    if request.grammar is not None:
        wishes["grammar"] = {"kind": request.grammar.kind, "text": request.grammar.text}
    return wishes


def _token_of(name: str) -> int:
    prefix, _, token = name.partition(":")
    if prefix != "token_id" or not token.isdecimal():
        raise ServerFault("it sent log probabilities of texts, where token ids were asked for")
    return int(token)


def _signed(seed: int) -> int:
    """Of 64 bits, as it takes them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
