"""SGLang's server: `/generate`, with `input_ids`.

Tried against 0.5.23 on a CPU: what does not fit is told as a fault of one request, and never taken for tokens.

    data: {"output_ids": [...], "meta_info": {"completion_tokens": 7, "finish_reason": null, ...}}

`output_ids` are all tokens so far, or with --incremental-streaming-output those that are new: `completion_tokens` tells
which. A seed is of use with --enable-deterministic-inference alone, where SGLang draws by (seed, position) itself.
"""

from typing import Any

import msgspec

from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.server.client import ServerAnswer, ServerClient, ServerFault
from services.executor.engines.server.dialects import base
from services.executor.engines.server.dialects.base import Identity, Progress, StreamPiece
from shared.messages import TokenLogprobs

# A salt that an older version leaves out of its cache's keys would be no error there.
UNSUPPORTED = ["grammar", "penalties", "bad_words", "allowed_token_ids", "prompt_logprobs", "cache_salt"]
UNSUPPORTED += ["pooling", *base.UNSUPPORTED]
# Without SGLANG_RETURN_ORIGINAL_LOGPROB=1 log probabilities are those at the request's temperature.
TEMPERED = ["logprobs"]

_KV_USED = "sglang:token_usage"
# The first two grow with each part of a long prompt; the others once requests are over, or now and then.
_PROGRESS = (
    _KV_USED,
    "sglang:realtime_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:gen_throughput",
)
_HOT = 100.0  # a temperature at which all tokens are about as likely


class _ModelInfo(msgspec.Struct):
    model_path: str
    is_generation: bool
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    version: str = ""
    dtype: str = ""
    quantization: str | None = None
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None
    max_req_input_len: int | None = None  # a prompt has fewer tokens
    enable_deterministic_inference: bool = False


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None  # of what is aborted


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    cached_tokens: int = 0
    # Of each token: its log probability, its id, and its text or nothing.
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] = []


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: base.ServerFailure | None = None


class SglangDialect:
    path = "/generate"
    pooling_path = ""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._seeded = False
        self._answered = 0

    async def identify(self) -> Identity:
        model = base.decoded(self._client, await self._info("model_info"), _ModelInfo, "SGLang", "/model_info")
        if not model.is_generation:
            raise base.exchanges_no_tokens(self._client, "SGLang", f"{model.model_path} generates nothing")
        told = await self._server()
        listed = await base.only_model(self._client, "SGLang")
        weights = "" if model.weight_version in (None, "default") else f" of weights {model.weight_version}"
        return Identity(
            f"SGLang {told.version}".strip(), model.model_path + weights, context_length=listed.max_model_len or 0
        )

    async def examine(self, identity: Identity, vocab_size: int) -> EngineFacts:
        def probe(token: int) -> dict[str, Any]:
            # A prompt of it would end the server: this is all of a request that is compared with its vocabulary.
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "logit_bias": {str(token): 0.0}}
            return {"input_ids": [0], "sampling_params": sampling}

        body = await base.check_vocabulary_by_asking(self._client, self.path, probe, vocab_size)
        if len(self._event(body).output_ids or []) != 1:
            raise base.exchanges_no_tokens(self._client, "SGLang", "an answer has no output_ids")
        told = await self._server()
        self._seeded = told.enable_deterministic_inference
        tempered = abs(await self._likeliest(0.0) - await self._likeliest(_HOT)) > 0.5
        return EngineFacts(
            name=identity.server,
            vocab_size=vocab_size,
            # It computes no prompt of its whole context, which a continuation of an answer may be.
            context_length=told.max_req_input_len or identity.context_length,
            unsupported=[*UNSUPPORTED, *TEMPERED] if tempered else UNSUPPORTED,
            numerics=" ".join(filter(None, [identity.server, f"dtype={told.dtype}", told.quantization])),
            places=told.max_running_requests or 0,
            kv_tokens=told.max_total_num_tokens or 0,
        )

    def body(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": request.stop_token_ids,
            # Its stop tokens go with it: then the connection is closed behind one.
            "ignore_eos": request.runs_on or not request.stop_token_ids,
            "min_new_tokens": base.min_tokens(request, sampling.min_tokens),
            "no_stop_trim": True,
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if self._seeded:
            params["sampling_seed"] = sampling.seed % (1 << 63)
        body = {"input_ids": list(request.tokens), "stream": True, "sampling_params": params}
        if sampling.logprobs >= 0:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}
        return body

    def reader(self, request: EngineRequest) -> base.Reader:
        return SglangReader(request.sampling.logprobs).read

    async def progress(self) -> Progress:
        answer = await self._client.ask("/metrics")
        if answer.status == 200:
            return base.progress_of(answer.body, _PROGRESS, _KV_USED)
        # Without --enable-metrics. This one is answered by what computes, between two of its steps.
        self._answered += (await self._info("server_info")).status == 200
        return f"answer {self._answered}", 0.0

    async def _likeliest(self, temperature: float) -> float:
        """The log probability of the likeliest token, as told at this temperature."""
        sampling = {"max_new_tokens": 1, "temperature": temperature}
        asked = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 1}
        answer = await self._client.ask(self.path, asked | {"logprob_start_len": -1})
        meta = base.decoded(self._client, answer, _Event, "SGLang", self.path).meta_info
        tops = meta.output_top_logprobs[-1:] if meta is not None else []
        return max((top[0] for top in tops[0]), default=0.0) if tops and tops[0] else 0.0

    async def _server(self) -> _ServerInfo:
        return base.decoded(self._client, await self._info("server_info"), _ServerInfo, "SGLang", "/server_info")

    async def _info(self, name: str) -> ServerAnswer:
        """By its name of today, or as it was called before."""
        answer = await self._client.ask(f"/{name}")
        return await self._client.ask(f"/get_{name}") if answer.status == 404 else answer

    def _event(self, body: bytes) -> _Event:
        try:
            return msgspec.json.decode(body, type=_Event)
        except msgspec.MsgspecError as error:
            raise base.exchanges_no_tokens(self._client, "SGLang", str(error)) from None


class SglangReader:
    def __init__(self, logprobs: int) -> None:
        self._wanted = logprobs
        self._sent = 0

    def read(self, event: bytes) -> StreamPiece:
        told = msgspec.json.decode(event, type=_Event)
        if told.error is not None:
            return told.error.piece()
        if told.meta_info is None or told.output_ids is None:
            raise ServerFault("it sent an event without output_ids")
        return self._piece(told.output_ids, told.meta_info)

    def _piece(self, ids: list[int], meta: _Meta) -> StreamPiece:
        finish = meta.finish_reason
        if finish is not None and (finish.type == "abort" or isinstance(finish.matched, str)):
            return _aborted(finish)  # whose tokens are filler
        piece = base.ending(finish.type) if finish is not None else StreamPiece()
        if finish is not None and isinstance(finish.matched, int) and ids[-1:] != [finish.matched]:
            ids = [*ids, finish.matched]  # taken off as the end of a text would be
        total, fresh = meta.completion_tokens, meta.completion_tokens - self._sent
        piece.tokens = ids[self._sent :] if len(ids) == total else ids
        if len(piece.tokens) != fresh:
            raise ServerFault(f"it sent {len(ids)} tokens, and counts {total} after {self._sent}")
        piece.cached_tokens = meta.cached_tokens
        if self._wanted >= 0 and fresh:
            piece.logprobs = self._logprobs(meta, fresh)
        self._sent = total
        return piece

    def _logprobs(self, meta: _Meta, fresh: int) -> list[TokenLogprobs]:
        chosen = [logprob for logprob, _, _ in meta.output_token_logprobs[-fresh:]]
        tops = [[(token, logprob) for logprob, token, _ in top or []] for top in meta.output_top_logprobs[-fresh:]]
        return base.ranked(fresh, chosen, tops or [None] * fresh, self._wanted)


def _aborted(finish: _Finish) -> StreamPiece:
    if isinstance(finish.matched, str):  # no stop string is asked for: so it tells of logits that are no numbers
        return StreamPiece(error=f"it ended the request: {finish.matched}")
    code = base.code_of(finish.status_code or 503)
    return StreamPiece(error=f"it aborted the request: {finish.message or 'it says no reason'}", code=code)
