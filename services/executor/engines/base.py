"""The door between a group's leader and an engine that schedules for itself: vLLM, or a server behind a URL.

    EngineRequest ──submit──▶ engine ──▶ EngineStep(deltas)        token ids in, token ids out
    id            ──abort───▶

Our own engines compute the steps that the leader plans (`core/engine.py`). These take requests, batch them by their own
rules and give tokens as they come; the leader keeps what makes an answer a log: positions, attempts, endings, claims.

A continuation of an answer is a new request whose `tokens` have the answer so far behind the prompt. To the engine both
are prompt; whatever counts output (penalties, `min_tokens`, bad words, grammars) counts from `prompt_tokens` on.

    tokens    [ prompt ........ | output of earlier attempts ]     ──▶ deltas: what follows, at most `max_tokens`
                                ▲ prompt_tokens
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from shared.messages import Grammar, SamplingParams, TokenLogprobs


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="generate"):
    """What an engine is asked to generate. It has no texts: stop strings and tokenizers are the gateway's."""

    id: str  # of this submission alone
    tokens: Sequence[int]  # the prompt, then the output so far
    prompt_tokens: int  # how many of them are the prompt
    max_tokens: int  # further tokens, at most; 0: only the prompt's log probabilities are wanted
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []  # each ends the answer, and is its last token
    grammar: Grammar | None = None  # which all of the output matches, also what is in `tokens`
    prompt_logprobs: int = -1  # as `GenerationRequest.prompt_logprobs`
    cache_salt: str = ""  # prefixes are shared between requests of the same salt alone
    adapter: str = ""  # digest of the LoRA adapter that computes it; empty: the model alone
    adapter_directory: str = ""  # of its files, as peft writes them, which stay while the request lives
    pool: Literal["", "embed", "classify"] = ""  # the prompt's vector or its classes' logits are wanted, and no tokens
    normalized: bool = True  # whether that vector is brought to length 1
    second_segment: int = 0  # as `GenerationRequest.second_segment`
    runs_on: bool = False  # behind the model's own end, which is then none of `stop_token_ids`


class EngineAbort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody wants these any more. What comes of them afterwards is ignored."""

    ids: list[str]


class EngineDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The next tokens of one request, and how it ended."""

    id: str
    tokens: list[int] = []
    finish: Literal["", "stop", "length", "error"] = ""
    logprobs: list[TokenLogprobs] | None = None  # one for each token, where the request asks for them
    cached_tokens: int = 0  # tokens of the prompt that were in the engine's prefix cache
    error: str = ""  # one sentence, with finish "error"
    code: str = ""  # of `shared.errors`; empty: an internal error
    prompt_scores: bytes = b""  # as `TokenEntry.prompt_scores`
    vector: bytes = b""  # as `TokenEntry.vector`, with finish "stop"


class EngineStep(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="step"):
    """What an engine has done since it told last."""

    steps: int  # computed since it started: the sign that it goes on, also while no token comes
    deltas: list[EngineDelta] = []
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0  # share of its KV cache


class EngineFacts(msgspec.Struct, frozen=True, omit_defaults=True, tag="ready"):
    """What an engine tells of itself once it can generate."""

    name: str  # with its version, such as `vLLM 0.32.0`
    vocab_size: int
    context_length: int  # prompt and output
    places: int  # requests that it computes at a time
    kv_tokens: int = 0  # tokens that its KV cache holds; 0: not known
    numerics: str = ""  # all that the bits of its results depend on: version, dtype, quantization, device
    # Whether the same request gives the same text in any batch, and continued after any of its tokens.
    exact: bool = False
    tasks: tuple[str, ...] = ("generate",)  # of generate, embed, classify
    embedding_size: int = 0
    labels: list[str] = []  # of a classifier, in the order of its logits; empty names where it tells none
    adapters: int = 0  # LoRA adapters that it computes with at a time; 0: it takes none
    unsupported: list[str] = []  # what of a request it cannot do: names of `shared.engine_features.FEATURES`


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Why it ends: one sentence."""

    error: str
    crashed: bool = True  # whether what it computed may be why; False: somebody ended a process of it


class ServingEngine(Protocol):
    """Life: `start` once, then `submit`, `abort` and `next` in any order, `stop` at last. One event loop."""

    async def start(self) -> EngineFacts:
        """Until it can generate. Raises `ModelLoadError`, `ConfigurationError` or `EngineUnavailable` with what to
        do."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Its tokens come with `next`. Never waits."""
        ...

    def abort(self, ids: list[str]) -> None:
        """Never waits; unknown ids are ignored."""
        ...

    async def next(self) -> EngineStep:
        """Waits for the next step, or for several that have come since. Raises `RingLost` where the engine is gone,
        `InternalError` where what it computed may be why: it is of no more use then."""
        ...

    def is_stopped(self) -> bool:
        """Whether some process of it is stopped, as far as can be seen from here: no step will come of it."""
        ...

    async def stop(self) -> None:
        """Frees everything. Safe to call twice, and after a failure."""
        ...
