"""vLLM's server, by its token-in token-out route where that is switched on, else by OpenAI's completions route.

    /inference/v1/generate   token_ids ─▶ choices[0].token_ids        with --enable-scale-out or --tokens-only
    /v1/completions          prompt of ids, return_token_ids ─▶ the same, and a text that nobody reads
    /pooling                 input of ids ─▶ a vector, or the logits of classes       of models that generate nothing

With our logits processor loaded the choice is keyed by (seed, position): sampling goes to it, and vLLM is told to be
greedy. Without it vLLM samples by itself. A continuation is a new request there whose output begins anew: what counts
output is refused then, and `seed` gives the same text only to a request that was never continued.
"""

import base64
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.server.client import ServerClient, ServerFault
from services.executor.engines.server.dialects import base
from services.executor.engines.server.dialects.base import Identity, Progress, StreamPiece
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import BATCH_INVARIANT, Numerics
from shared.errors import ConfigurationError
from shared.messages import SamplingParams, TokenLogprobs

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
POOLING = "/pooling"

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


class _Vector(msgspec.Struct):
    data: str  # of little-endian numbers of 32 bits, in base64


class _Pooled(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


class VllmDialect:
    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._model = ""
        self.path = COMPLETIONS
        self.pooling_path = POOLING
        self._processor = False
        self._numbers = 0  # of a vector, or classes

    async def identify(self) -> Identity:
        client = self._client
        version = base.decoded(client, await client.ask("/version"), _Version, "vLLM", "/version")
        model = await base.only_model(client, "vLLM")
        return Identity(
            f"vLLM {version.version}", model.root or model.id, context_length=model.max_model_len or 0, name=model.id
        )

    async def examine(self, identity: Identity, vocab_size: int) -> EngineFacts:
        self._model = identity.name
        self.path = await self._route()
        told = await self._numerics()
        parts = [
            identity.server,
            f"dtype={told.dtype}" if told.dtype else "",
            "batch invariant" if told.invariant else "",
        ]
        facts = EngineFacts(
            name=identity.server,
            vocab_size=vocab_size,
            context_length=identity.context_length,
            places=0,
            kv_tokens=await self._kv_tokens(),
            numerics=" ".join(filter(None, parts)),
            exact=told.exact,
        )
        return await (self._pools(facts) if self.path == POOLING else self._generates(facts))

    async def _route(self) -> str:
        """Of those that the server has the best one. Nothing is computed for an empty request."""
        for route in (GENERATE, COMPLETIONS, POOLING):
            # 403 and 404 are a route that is switched off, or not there.
            if (await self._client.ask(route, {})).status not in (401, 403, 404, 405):
                return route
        return COMPLETIONS

    async def _generates(self, facts: EngineFacts) -> EngineFacts:
        body = await base.check_vocabulary_by_asking(self._client, self.path, self._probe, facts.vocab_size)
        self._processor = await self._has_processor()
        return msgspec.structs.replace(
            facts,
            unsupported=["pooling", *(UNSUPPORTED if self._processor else WITHOUT_PROCESSOR)],
            numerics=f"{facts.numerics} {self._fingerprint(body)}".strip(),
            exact=self._processor and facts.exact,
        )

    async def _pools(self, facts: EngineFacts) -> EngineFacts:
        client = self._client
        for task in ("embed", "classify"):
            answer = await client.ask(POOLING, self._asked_to_pool([0], task))
            if answer.status == 200:
                break
        else:
            raise ConfigurationError(f"{client.name} neither embeds nor classifies: it says {client.sentence(answer)}")
        body = await base.check_vocabulary_by_asking(
            client, POOLING, lambda token: self._asked_to_pool([token], task), facts.vocab_size
        )
        self._numbers = len(_pooled(body)[0]) // 4
        embeds = task == "embed"
        return msgspec.structs.replace(
            facts,
            tasks=(task,),
            embedding_size=self._numbers if embeds else 0,
            labels=[] if embeds else [""] * self._numbers,
            unsupported=base.UNSUPPORTED,
        )

    def body(self, request: EngineRequest) -> dict[str, Any]:
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        if request.pool:
            return salt | self._asked_to_pool(request.tokens, request.pool, normalized=request.normalized)
        sampling = self._sampling(request)
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}} | salt
        if request.sampling.logprobs >= 0:
            sampling["logprobs"] = request.sampling.logprobs
        if self.path == COMPLETIONS:
            body["return_tokens_as_token_ids"] = True
        return body | self._asked(request.tokens, sampling, for_processor(request) if self._processor else None)

    def reader(self, request: EngineRequest) -> base.Reader:
        return partial(read_vector, self._numbers) if request.pool else partial(read, request.sampling.logprobs)

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

    def _asked_to_pool(self, tokens: Sequence[int], task: str, *, normalized: bool = True) -> dict[str, Any]:
        form = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}
        wanted = {"task": task, "use_activation": task == "embed" and normalized, "add_special_tokens": False}
        return {"model": self._model, "input": list(tokens)} | wanted | form

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

    async def _numerics(self) -> Numerics:
        """Told by servers in development mode alone (VLLM_SERVER_DEV_MODE=1); else nothing is known, nor exact."""
        answer = await self._client.ask("/server_info?config_format=json")
        try:
            told = msgspec.json.decode(answer.body)
            config, variables = told["vllm_config"], told.get("vllm_env", {})
            model, cache, device = config["model_config"], config["cache_config"], config["device_config"]
            return Numerics(
                dtype=str(model["dtype"]).removeprefix("torch."),
                quantization=str(model["quantization"] or ""),
                kv_cache=str(cache["cache_dtype"]),
                device=str(device["device"]),
                invariant=bool(variables.get(BATCH_INVARIANT)),
            )
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            return Numerics("", "", "", "", invariant=False)

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
    piece.cached_tokens = _cached(chunk.usage)
    return piece


def read_vector(numbers: int, answer: bytes) -> StreamPiece:
    vector, usage = _pooled(answer)
    piece = base.vector_piece(vector, numbers)
    piece.cached_tokens = _cached(usage)
    return piece


def _pooled(answer: bytes) -> tuple[bytes, _Usage | None]:
    try:
        told = msgspec.json.decode(answer, type=_Pooled)
        (vector,) = told.data
        return base64.b64decode(vector.data, validate=True), told.usage
    except ValueError as error:  # of msgspec, too
        raise ServerFault(f"it sent no vector that can be read ({error})") from None


def _cached(usage: _Usage | None) -> int:
    details = usage.prompt_tokens_details if usage is not None else None
    return (details.cached_tokens or 0) if details is not None else 0


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
