"""What a dialect is: how one kind of server is asked for tokens, and what it tells of itself.

start ─────▶ identify ─▶ Identity        who answers: compared ever after
             examine  ─▶ EngineFacts     what it can do, found out by asking it
submit ────▶ path, body ─▶ the request   ─▶ Reader(event) ─▶ StreamPiece     tokens, ending
each second  progress ─▶ Progress        whether it computes, also while no token comes
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.server.client import ServerAnswer, ServerClient, ServerFault
from shared.errors import ConfigurationError, ModelLoadError, Unavailable
from shared.messages import TokenLogprobs

# Vocabularies are padded differently by those who convert a model: so many ids more or fewer are the same one.
VOCAB_PADDING = 1024

# What no server is asked for so far (`EngineFacts.unsupported`), beside vectors where it gives none: where the second
# of two texts begins is not told to any, as their routes for pairs take texts.
UNSUPPORTED = ["second_segment", "adapter"]

# A mark that differs from the last one where the server has computed something since, empty where it does not tell; and
# the used share of its KV cache.
Progress = tuple[str, float]
Tops = list[tuple[int, float]] | None  # tokens and their log probabilities
T = TypeVar("T")


class Identity(msgspec.Struct, frozen=True):
    """Who answers at the URL. Where it changes under us, answers would go on with another model's tokens."""

    server: str  # with its version, such as `vLLM 0.32.0`
    model: str
    vocab_size: int = 0  # 0: not told
    context_length: int = 0  # 0: not told
    name: str = ""  # by which requests name the model, where they do

    def __str__(self) -> str:
        of = [f"{self.context_length} tokens of context"] if self.context_length else []
        of += [f"a vocabulary of {self.vocab_size}"] if self.vocab_size else []
        return f"{self.server} with {self.model}" + (f" ({', '.join(of)})" if of else "")


class StreamPiece(msgspec.Struct):
    """What one event says."""

    tokens: list[int] = []
    finish: Literal["", "stop", "length"] = ""
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    vector: bytes = b""  # as `EngineDelta.vector`
    error: str = ""  # what the server says went wrong in the middle of it
    code: str = "internal_error"


class ServerFailure(msgspec.Struct):
    """An error, in the form that OpenAI gave it. It comes as an event where the stream has begun already."""

    message: str = ""
    code: int | str | None = None

    def piece(self) -> StreamPiece:
        refused = isinstance(self.code, int) and 400 <= self.code < 500
        return StreamPiece(error=f"it says: {self.message}", code="invalid_request" if refused else "internal_error")


class Candidate(msgspec.Struct):
    """A token with its log probability, and the most likely ones at its position."""

    logprob: float
    token_id: int = -1  # vLLM's name for it
    id: int = -1  # llama.cpp's
    top_logprobs: list["Candidate"] = []


class ModelMeta(msgspec.Struct):
    n_vocab: int = 0


class ServerModel(msgspec.Struct):
    """What all kinds tell at /v1/models, each a part of it."""

    id: str = ""
    root: str = ""
    parent: str | None = None  # of an adapter, the model's id
    max_model_len: int | None = None
    meta: ModelMeta | None = None


class ServerModels(msgspec.Struct):
    data: list[ServerModel]


# Reads the events of one stream, or the answer that is a vector. Raises `msgspec.MsgspecError` or `ServerFault` where
# they make no sense.
Reader = Callable[[bytes], StreamPiece]


class ServerDialect(Protocol):
    @property
    def path(self) -> str:
        """Where requests go to; known after `examine`."""
        ...

    @property
    def pooling_path(self) -> str:
        """Where requests for a vector go to, if they go anywhere."""
        ...

    async def identify(self) -> Identity:
        """Raises `ConfigurationError` where another kind of server answers."""
        ...

    async def examine(self, identity: Identity, vocab_size: int) -> EngineFacts:
        """Asks for a token or two; `places` of 0 are not told. Raises `ConfigurationError`, or `ModelLoadError` for
        another model's vocabulary."""
        ...

    def body(self, request: EngineRequest) -> dict[str, Any]: ...

    def reader(self, request: EngineRequest) -> Reader: ...

    async def progress(self) -> Progress: ...


def decoded(client: ServerClient, answer: ServerAnswer, kind: type[T], server: str, path: str) -> T:
    """The answer as what `server` would have said."""
    expect_ready(client, answer)
    try:
        if answer.status == 200:
            return msgspec.json.decode(answer.body, type=kind)
        said = f"answers {answer.status}"
    except msgspec.MsgspecError as error:
        said = f"answers something else ({error})"
    raise ConfigurationError(
        f"{client.name} does not answer as {server} does ({path} {said}): set the engine's kind to what runs there"
    )


async def only_model(client: ServerClient, server: str) -> ServerModel:
    """The model that is served, whatever adapters and other names it has."""
    listed = decoded(client, await client.ask("/v1/models"), ServerModels, server, "/v1/models")
    for model in listed.data:
        if model.parent is None:
            return model
    raise exchanges_no_tokens(client, server, "it serves no model")


def other_vocabulary(client: ServerClient, has: str, vocab_size: int) -> ModelLoadError:
    return ModelLoadError(
        f"{client.name} {has}, where the model's directory has one of {vocab_size}: point the group at the model that "
        "runs there, or start the server with this one"
    )


async def check_vocabulary_by_asking(
    client: ServerClient, path: str, probe: Callable[[int], dict[str, Any]], vocab_size: int
) -> bytes:
    """For servers that do not tell: the vocabulary's last token is taken, one far beyond it is not. Returns what comes
    for the last one."""
    answer = await client.ask(path, probe(vocab_size - 1))
    expect_ready(client, answer)
    if answer.status != 200:
        said = client.sentence(answer)
        raise other_vocabulary(client, f"does not continue the token id {vocab_size - 1} ({said})", vocab_size)
    if (await client.ask(path, probe(vocab_size + VOCAB_PADDING))).status == 200:
        raise other_vocabulary(client, f"takes token id {vocab_size + VOCAB_PADDING}", vocab_size)
    return answer.body


def expect_ready(client: ServerClient, answer: ServerAnswer) -> None:
    client.refuse_unauthorized(answer)
    if answer.status >= 500:
        raise Unavailable(
            f"{client.name} is not ready ({answer.status}: {client.sentence(answer)}): wait until its model is loaded"
        )


def exchanges_no_tokens(client: ServerClient, server: str, detail: str) -> ConfigurationError:
    return ConfigurationError(
        f"{client.name} answers as {server} does, but exchanges no token ids ({detail}): answers that are continued "
        "elsewhere need them, so serve the model with a version that has them"
    )


def progress_of(page: bytes, names: Collection[str], kv_used: str) -> Progress:
    """By the metrics `names` of a Prometheus page, which change as the server computes and at no other time."""
    lines = [line for line in page.decode(errors="replace").splitlines() if re.split("[{ ]", line)[0] in names]
    shares = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(kv_used)]
    # Engines beside each other have a cache each.
    return "\n".join(lines), sum(shares) / len(shares) if shares else 0.0


def min_tokens(request: EngineRequest, wanted: int) -> int:
    """What is left of them: tokens that earlier attempts have put out are prompt to the server."""
    return min(max(0, wanted - len(request.tokens) + request.prompt_tokens), request.max_tokens)


def ranked(tokens: int, chosen: Sequence[float | None], tops: Sequence[Tops], wanted: int) -> list[TokenLogprobs]:
    """Of each of `tokens` the `wanted` most likely ones: servers add the chosen one, or keep an order of their own."""
    if not tokens == len(chosen) == len(tops):
        raise ServerFault(f"it sent {len(chosen)} log probabilities for {tokens} tokens")
    return [
        TokenLogprobs(logprob or 0.0, sorted(dict(top or []).items(), key=lambda pair: -pair[1])[:wanted])
        for logprob, top in zip(chosen, tops, strict=True)
    ]


def of_candidates(tokens: int, told: list[Candidate], wanted: int) -> list[TokenLogprobs]:
    tops = [[(max(other.token_id, other.id), other.logprob) for other in one.top_logprobs] for one in told]
    return ranked(tokens, [one.logprob for one in told], tops, wanted)


def vector_piece(vector: bytes, numbers: int) -> StreamPiece:
    """`vector`: of numbers of 32 bits, as many as at the start."""
    if len(vector) != 4 * numbers:
        raise ServerFault(f"it sent a vector of {len(vector) // 4} numbers, where it had {numbers} at the start")
    return StreamPiece(finish="stop", vector=vector)


def code_of(status: int) -> str:
    """The error of a request that is answered with it."""
    if status in (408, 425, 429, 502, 503, 504):
        return "unavailable"
    return "invalid_request" if 400 <= status < 500 else "internal_error"


def ending(finish: str) -> StreamPiece:
    """`finish` as servers with OpenAI's names tell it. What else they have, such as `abort`, is no ending of ours."""
    if finish in ("stop", "length"):
        return StreamPiece(finish=finish)  # type: ignore[arg-type]
    return StreamPiece(error=f"it ended the request with {finish!r}", code="unavailable") if finish else StreamPiece()
