"""llama.cpp's server: `/completion`, with a prompt of token ids, and `/embedding` where it was started with
`--embeddings`.

It knows no stop tokens but the model's own: the engine ends an answer at those of the request by itself. Its penalties
count the prompt, and its grammars begin with the output of a request: none of both survives a continuation. Its seed
has 32 bits, and its generator begins anew with a continuation: that is another draw, and with temperature 0 the same
text as far as the sums of another batch let it be.
"""

from array import array
from functools import partial
from typing import Any

import msgspec

from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.server.client import ServerClient
from services.executor.engines.server.dialects import base
from services.executor.engines.server.dialects.base import Identity, Progress, StreamPiece

UNSUPPORTED = ["grammar", "penalties", "bad_words", "allowed_token_ids", "min_tokens", "prompt_logprobs", "cache_salt"]
UNSUPPORTED += base.UNSUPPORTED
EMBEDDING = "/embedding"

_RANDOM_SEED = 0xFFFFFFFF  # stands for "any" there
# Its last event has the prompt's text in it, and all settings, unless the fields are named.
_FIELDS = ["tokens", "stop", "stop_type", "completion_probabilities", "timings/cache_n"]


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Settings
    total_slots: int
    model_path: str
    build_info: str = ""
    model_ftype: str = ""


class _Event(msgspec.Struct):
    tokens: list[int] | None = None
    stop: bool = False
    stop_type: str = ""
    completion_probabilities: list[base.Candidate] = []
    cached: int = msgspec.field(default=0, name="timings/cache_n")
    error: base.ServerFailure | None = None


class _Embedding(msgspec.Struct):
    embedding: list[list[float]]  # one vector, or one for each token where nothing pools them


class LlamaCppDialect:
    path = "/completion"
    pooling_path = EMBEDDING

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._props: _Props | None = None
        self._numbers = 0  # of a vector; 0: it gives none

    async def identify(self) -> Identity:
        client = self._client
        props = base.decoded(client, await client.ask("/props"), _Props, "llama.cpp", "/props")
        model = await base.only_model(client, "llama.cpp")
        self._props = props
        return Identity(
            f"llama.cpp {props.build_info}".strip(),
            props.model_path,
            vocab_size=model.meta.n_vocab if model.meta is not None else 0,
            context_length=props.default_generation_settings.n_ctx,
        )

    async def examine(self, identity: Identity, vocab_size: int) -> EngineFacts:
        props = self._props
        assert props is not None, "`identify` has asked for them"
        told = identity.vocab_size
        if told and abs(told - vocab_size) > base.VOCAB_PADDING:
            raise base.other_vocabulary(self._client, f"has a vocabulary of {told} tokens", vocab_size)
        answer = await self._client.ask(self.path, {"prompt": [0], "n_predict": 1, "return_tokens": True})
        event = base.decoded(self._client, answer, _Event, "llama.cpp", self.path)
        if len(event.tokens or []) != 1:
            raise base.exchanges_no_tokens(self._client, "llama.cpp", "return_tokens is ignored")
        self._numbers = await self._embedding_size()
        return EngineFacts(
            name=identity.server,
            vocab_size=vocab_size,
            context_length=identity.context_length,
            tasks=("generate", "embed") if self._numbers else ("generate",),
            embedding_size=self._numbers,
            unsupported=UNSUPPORTED if self._numbers else ["pooling", *UNSUPPORTED],
            numerics=" ".join(filter(None, [identity.server, props.model_ftype])),
            places=props.total_slots,
            kv_tokens=props.total_slots * identity.context_length,
        )

    async def _embedding_size(self) -> int:
        answer = await self._client.ask(EMBEDDING, {"content": [0, 0]})
        if answer.status != 200:
            return 0
        (told,) = base.decoded(self._client, answer, tuple[_Embedding], "llama.cpp", EMBEDDING)
        return len(told.embedding[0]) if len(told.embedding) == 1 else 0

    def body(self, request: EngineRequest) -> dict[str, Any]:
        if request.pool:
            return {"content": list(request.tokens), "embd_normalize": 2 if request.normalized else -1}
        sampling = request.sampling
        return {
            "prompt": list(request.tokens),
            "n_predict": request.max_tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "n_probs": max(1, sampling.logprobs) if sampling.logprobs >= 0 else 0,
            "response_fields": _FIELDS,
            # It has defaults of its own for all of these, and samplers that nobody asks for here.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed % _RANDOM_SEED,
            "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
            "ignore_eos": request.runs_on or not request.stop_token_ids,
        }

    def reader(self, request: EngineRequest) -> base.Reader:
        return partial(read_vector, self._numbers) if request.pool else partial(read, request.sampling.logprobs)

    async def progress(self) -> Progress:
        """By what its slots tell of themselves, unless that is switched off. They know no share of the cache."""
        answer = await self._client.ask("/slots")
        return answer.body.hex() if answer.status == 200 else "", 0.0


def read_vector(numbers: int, answer: bytes) -> StreamPiece:
    (told,) = msgspec.json.decode(answer, type=tuple[_Embedding])
    vector = array("f", told.embedding[0]) if told.embedding else array("f")
    return base.vector_piece(vector.tobytes(), numbers)


def read(wanted: int, event: bytes) -> StreamPiece:
    told = msgspec.json.decode(event, type=_Event)
    if told.error is not None:
        return told.error.piece()
    piece = StreamPiece(tokens=told.tokens or [], cached_tokens=told.cached)
    if told.stop:
        piece.finish = "length" if told.stop_type == "limit" else "stop"
    if wanted >= 0 and piece.tokens:
        piece.logprobs = base.of_candidates(len(piece.tokens), told.completion_probabilities, wanted)
    return piece
