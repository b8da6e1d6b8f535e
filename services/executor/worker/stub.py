"""An engine that computes nothing, at a set speed: for tests and benchmarks of everything around it.

Its text is a pure function, so that every token of a stream can be checked from outside: the token
at output position p of a generation is `stub_token(seed, p, vocab_size)`, whatever the prompt, the
batch, the ring or the attempt; where that may not be drawn, the next letter that may. With a LoRA adapter the seed is
`adapted(seed, digest)`. Tokens are bytes of
lower-case English letters and spaces; with a grammar, what `stub_choice` makes of the tokens that may follow. On a ring
the other ranks get every plan and compute nothing either.
"""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.executor.core.draft_passes import DraftPasses
from services.executor.core.engine import (
    DraftPlan,
    DraftToken,
    EngineSpec,
    Launched,
    ProgressCallback,
    SampledToken,
    SpilledBlock,
    with_tasks,
)
from services.executor.core.prompt_results import Floats, PromptTokenScores, no_scores
from services.executor.core.sampling_state import Mask, SamplingState, TokenBans, random_bits
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.ipc.board import RingBoard
from services.executor.ipc.plan_channel import PlanListener, PlanSender
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.structured_output import masks_of
from shared.errors import ConfigurationError, InternalError, ModelLoadError, reason_of
from shared.messages import ModelCard, TokenLogprobs
from shared.nats.adapters import CONFIG, WEIGHTS

_ALPHABET = b"abcdefghijklmnopqrstuvwxyz      "  # 32 tokens, six of them spaces: words of about five letters
_LARGEST = max(_ALPHABET)

_DRAFTS = 0x5DEECE66D  # sets the chance of a proposal apart from that of the token

STUB_EMBEDDING_SIZE = 32
STUB_LABEL = "relevant"
STUB_EOS_TOKEN = 0  # the stub's end-of-sequence token. It produces it only where a grammar lets the text end
# Tokens that bring a text nearer to its end: else it might grow for ever.
_CLOSING = np.array([STUB_EOS_TOKEN, *b'"]}'], np.int64)
_ASCII = 128


def stub_token(seed: int, position: int, vocab_size: int = 256) -> int:
    """The stub's token at output `position` (from 0, over all attempts) of a generation with `seed`.

    The value of a lower-case ASCII letter or a space: `alphabet[random_bits(seed, position) % 32]`.
    """
    if vocab_size <= _LARGEST:
        raise ConfigurationError(f"The stub engine's vocabulary is {vocab_size} and must be at least {_LARGEST + 1}.")
    return _ALPHABET[random_bits(seed, position) % len(_ALPHABET)]


@lru_cache(maxsize=65536)
def stub_state(token: int) -> Floats:
    """The stub's hidden state of `token`, wherever it stands: numbers in [-1, 1), `STUB_EMBEDDING_SIZE` of them.

    Number i is `random_bits(token, i) / 2**63 - 1`; a text's vector is the mean of its tokens', of length 1.
    """
    bits = [random_bits(token, index) for index in range(STUB_EMBEDDING_SIZE)]
    return np.array([value * 2.0**-63 - 1 for value in bits], np.float32)


def stub_logit(tokens: Sequence[int]) -> float:
    """The logit of the stub's only class, `STUB_LABEL`, for a text: the first number of its tokens' mean state."""
    return float(np.mean([stub_state(token)[0] for token in tokens]))


def stub_named_logprob(position: int, token: int) -> float:
    """The stub's log probability of a `token` that a request names, behind a prompt whose last token has `position`:
    in (-8, 0]."""
    return -random_bits(token, position) * 2.0**-61


_NO_SUMS: Floats = np.zeros((0, STUB_EMBEDDING_SIZE), np.float32)


def _sums(plan: StepPlan) -> Floats:
    if not plan.pools:
        return _NO_SUMS
    pools = as_int32(plan.pools).reshape(-1, 2).tolist()
    sums = np.zeros((len(pools), STUB_EMBEDDING_SIZE), np.float32)
    tokens = as_int32(plan.token_ids).tolist()
    for at, (first, end) in enumerate(pools):
        sums[at] = np.sum([stub_state(token) for token in tokens[first:end]], axis=0)
    return sums


def _scores(plan: StepPlan) -> PromptTokenScores:
    """The stub is sure of every token of a prompt, as of its own; not of those that requests name."""
    if not plan.score_rows:
        return no_scores()
    targets = as_int32(plan.score_targets)
    sure = np.zeros(len(targets), np.float32)
    if plan.score_named:
        positions = as_int32(plan.positions)[as_int32(plan.score_rows)[-plan.score_named :]]
        named = zip(positions.tolist(), targets[-plan.score_named :].tolist(), strict=True)
        sure[-plan.score_named :] = [stub_named_logprob(*one) for one in named]
    top = min(1, plan.score_top)
    tokens = np.zeros((len(targets), plan.score_top), np.int32)
    logprobs = np.full(tokens.shape, -np.inf, np.float32)
    tokens[:, :top], logprobs[:, :top] = targets[:, None], 0.0
    return PromptTokenScores(sure, np.ones(len(targets), np.int32), tokens, logprobs)


def _next_drawable(token: int, bans: TokenBans, settings: "StubSettings") -> int:
    """`token`, or the next of the alphabet that may be drawn, or else of the vocabulary."""
    banned: set[int] = set(bans.banned.tolist())
    allowed: set[int] | None = None if bans.allowed is None else set(bans.allowed.tolist())
    letters: list[int] = sorted({letter + settings.first_token for letter in _ALPHABET})
    at = letters.index(token)
    for choice in chain(letters[at:], letters[:at], range(settings.vocab_size)):
        if choice not in banned and (allowed is None or choice in allowed):
            return choice
    return token


def stub_choice(seed: int, position: int, allowed: NDArray[np.bool_], first_token: int = 0) -> int:
    """The stub's token at output `position` where only the tokens of the mask `allowed` may follow.

    With `bits = random_bits(seed, position)`, the candidates are the allowed tokens, of bytes the ASCII ones
    where there are any; in one case of four (`bits % 4 == 0`) those of them that bring the text to an end, if
    there are any. The token is candidate number `(bits >> 8) % count`, by ascending id.
    """
    bits = random_bits(seed, position)
    candidates = np.flatnonzero(allowed)
    if not first_token and candidates[0] < _ASCII:
        candidates = candidates[candidates < _ASCII]
        closing = candidates[np.isin(candidates, _CLOSING)]
        if bits % 4 == 0 and len(closing):
            candidates = closing
    return int(candidates[(bits >> 8) % len(candidates)])


FAULT_TOKEN = 1  # the token that makes a step end badly, where the stub has a `fault`


def _fail(fault: str) -> None:
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "exit":
        os._exit(3)
    elif fault == "error":
        raise MemoryError("the stub's fault")
    while fault in ("crash", "hang"):
        time.sleep(1.0)


def adapted(seed: int, digest: str) -> int:
    """The seed of what the stub writes with the adapter of that digest; empty: none."""
    return seed ^ int(digest[:16] or "0", 16)


def stub_adapter_digest(directory: Path, max_rank: int = 256) -> str:
    """Of the files that stand for an adapter: a configuration with a rank `r`, and any weights. Raises
    `ModelLoadError`."""
    config, weights = directory / CONFIG, directory / WEIGHTS
    try:
        content = config.read_bytes()
        rank = int(msgspec.json.decode(content, type=dict[str, Any])["r"])
        digest = hashlib.sha256(content + weights.read_bytes()).hexdigest()
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{directory} holds no adapter: {reason_of(error)}.") from None
    if not 1 <= rank <= max_rank:
        raise ModelLoadError(f"{config} has rank {rank}, and --max-adapter-rank allows {max_rank}.")
    return digest


class StubSettings(msgspec.Struct, frozen=True):
    """How fast the stub is, and what it claims to hold."""

    step_ms: float = 0.0  # milliseconds that every step takes
    us_per_token: float = 0.0  # microseconds more for every token computed, prompt tokens included
    block_size: int = 16
    num_blocks: int = 4096
    context_length: int = 8192
    vocab_size: int = 256
    # Added to every token: the first ids of a real vocabulary are single bytes, which give no text.
    first_token: int = 0
    # What a step does that computes `FAULT_TOKEN`: `crash`, `exit`, `hang`, `error`; empty: nothing.
    fault: str = ""
    max_adapters: int = 0
    max_adapter_rank: int = 256
    # Probability that a proposal of its draft model is what it draws; 0: it has none.
    draft_right: float = 0.0
    draft_ms: float = 0.0  # milliseconds that every pass of the draft model takes


class StubEngine:
    """`services.executor.core.engine.Engine` without a model."""

    def __init__(
        self,
        settings: StubSettings,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        fail: Callable[[str], None] = _fail,
    ) -> None:
        """`sleep` takes seconds; it runs in the thread that calls `execute`. `clock`: of the same time. `fail`: does
        what the setting `fault` says. Raises `ConfigurationError` for a vocabulary that is too small."""
        stub_token(0, 0, settings.vocab_size - settings.first_token)
        self._settings = settings
        self._sleep = sleep
        self._clock = clock
        self._fail = fail
        self._busy_until = 0.0
        self._loaded = False
        self._pooled = _NO_SUMS
        self._scored = no_scores()
        self._adapters = [""] * settings.max_adapters  # digests by slot

    def load(self, progress: ProgressCallback) -> EngineSpec:
        """At once: there are no weights."""
        progress(1, 1)
        self._loaded = True
        settings = self._settings
        return EngineSpec(
            settings.block_size,
            settings.num_blocks,
            settings.context_length,
            settings.vocab_size,
            pooling="mean",
            embedding_size=STUB_EMBEDDING_SIZE,
            exact=True,
            max_adapters=settings.max_adapters,
            labels=[STUB_LABEL],
            activation="sigmoid",
            sparse=["pages", "window"],
            drafts=settings.draft_right > 0,
        )

    def recovered(self) -> list[SpilledBlock]:
        return []

    def adapter_digest(self, directory: Path) -> str:
        return stub_adapter_digest(directory, self._settings.max_adapter_rank)

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        """Waits as long as the settings say, then one token per row that is sampled."""
        self._check(plan, samples)
        seeds = self._seeds(plan, samples)
        self._pooled, self._scored = _sums(plan), _scores(plan)
        self._sleep(self.seconds(plan))
        return self._drawn(samples, seeds)

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        """As on a GPU: the step takes its time from now on, or from when the one before it is over. Its text does
        not depend on the tokens that it computes."""
        self._check(plan, samples)
        self._busy_until = max(self._busy_until, self._clock()) + self.seconds(plan)
        return Later(partial(self._finish, plan, samples, self._seeds(plan, samples), self._busy_until))

    def draft(self, plan: DraftPlan, samples: Sequence[SamplingState]) -> list[list[DraftToken]]:
        """What it will draw without grammar and edits of logits, or another letter, as `draft_right` has it."""
        if not self._settings.draft_right:
            raise InternalError("The stub engine has no draft model.")
        self._sleep(plan.count * self._settings.draft_ms / 1e3)
        return [[self._proposal(state, ahead) for ahead in range(plan.count)] for state in samples]

    def _proposal(self, state: SamplingState, ahead: int) -> DraftToken:
        settings, seed, position = self._settings, state.params.seed, state.position + ahead
        token = stub_token(seed, position, settings.vocab_size)
        if random_bits(seed ^ _DRAFTS, position) * 2.0**-64 >= settings.draft_right:
            token = _ALPHABET[(_ALPHABET.index(token) + 1) % len(set(_ALPHABET))]
        return DraftToken(token + settings.first_token, settings.draft_right)

    def _finish(
        self, plan: StepPlan, samples: Sequence[SamplingState], seeds: Sequence[int], at: float
    ) -> list[SampledToken]:
        """Waits until `at`, when a step that was launched is over."""
        self._pooled, self._scored = _sums(plan), _scores(plan)
        self._sleep(max(0.0, at - self._clock()))
        return self._drawn(samples, seeds)

    def _check(self, plan: StepPlan, samples: Sequence[SamplingState]) -> None:
        if not self._loaded:
            raise InternalError("The stub engine was asked for a step while it is not loaded.")
        if len(plan.sample_rows) // 4 != len(samples):
            raise InternalError(
                f"Step {plan.step} samples {len(plan.sample_rows) // 4} rows for {len(samples)} sequences."
            )
        if self._settings.fault and FAULT_TOKEN in as_int32(plan.token_ids):
            self._fail(self._settings.fault)

    def seconds(self, plan: StepPlan) -> float:
        """That the step takes."""
        tokens = len(plan.token_ids) // 4
        following = self._settings.draft_ms / 1e3 if plan.followed else 0.0
        return self._settings.step_ms / 1e3 + tokens * self._settings.us_per_token / 1e6 + following

    def _seeds(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[int]:
        """Of each row that is sampled; what the plan loads is loaded."""
        for slot, directory in plan.adapter_loads:
            self._adapters[slot] = Path(directory).name
        seeds = [state.params.seed for state in samples]
        if not plan.adapters:
            return seeds
        slots = np.repeat(as_int32(plan.adapters), as_int32(plan.query_lens))[as_int32(plan.sample_rows)]
        return [
            adapted(seed, self._adapters[slot] if slot >= 0 else "")
            for seed, slot in zip(seeds, slots.tolist(), strict=True)
        ]

    def _drawn(self, samples: Sequence[SamplingState], seeds: Sequence[int]) -> list[SampledToken]:
        masks = masks_of(samples)
        return [
            self._sample(state, seed, masks.get(row))
            for row, (state, seed) in enumerate(zip(samples, seeds, strict=True))
        ]

    def pooled(self) -> Floats:
        return self._pooled

    def scored(self) -> PromptTokenScores:
        return self._scored

    def close(self) -> None:
        self._loaded = False

    def _sample(self, state: SamplingState, seed: int, allowed: Mask | None) -> SampledToken:
        settings = self._settings
        if allowed is not None:
            token = stub_choice(seed, state.position, allowed, settings.first_token)
        else:
            token = stub_token(seed, state.position, settings.vocab_size) + settings.first_token
            if state.bans is not None:
                token = _next_drawable(token, state.bans, settings)
        wanted = state.params.logprobs
        # The stub is sure of its token: probability 1.
        logprobs = TokenLogprobs(0.0, [(token, 0.0)] if wanted else []) if wanted >= 0 else None
        return SampledToken(token, logprobs)


class Later(NamedTuple):
    """`Launched`."""

    result: Callable[[], list[SampledToken]]


JOIN_TIMEOUT = 60.0


class StubRing:
    """`Engine` of the leader of a ring that only pretends."""

    def __init__(
        self,
        stub: StubEngine,
        spec: RankSpec,
        board: RingBoard,
        listener: PlanListener,
        announce: Callable[[Rendezvous], None],
        directory: Path | None = None,
    ) -> None:
        """`directory`: of the model whose tokenizer clients' text goes through; None: a token is a byte."""
        self._stub = stub
        self._directory = directory
        self._spec = spec
        self._board = board.rank(0)
        self._listener = listener
        self._announce = announce
        self._sender = PlanSender([])

    def load(self, progress: ProgressCallback) -> EngineSpec:
        self._announce(Rendezvous(self._listener.host, self._listener.port, self._listener.secret))
        self._sender = self._listener.accept(self._spec.world_size - 1, JOIN_TIMEOUT)
        self._engine_spec = self._stub.load(progress)
        return self._engine_spec

    def card(self, model: str) -> tuple[ModelCard, bytes]:
        """Without a directory: no tokenizer (a token is a byte)."""
        spec = self._engine_spec
        if self._directory is not None:
            from services.executor.model.card import read_card  # with transformers, which takes seconds

            return read_card(self._directory, model, spec)
        card = ModelCard(
            model,
            spec.context_length,
            spec.vocab_size,
            [STUB_EOS_TOKEN],
            "",
            int(time.time()),
            adapter_widths={"q_proj": 1},
        )
        return with_tasks(card, spec), b""

    def recovered(self) -> list[SpilledBlock]:
        return self._stub.recovered()

    def adapter_digest(self, directory: Path) -> str:
        return self._stub.adapter_digest(directory)

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self._board.begin(plan.step)
        try:
            self._sender.send(plan)
            return self._board.run(plan, partial(self._stub.execute, plan, samples))
        finally:
            self._board.end(plan.step)

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        self._board.begin(plan.step)
        self._sender.send(plan)
        return Later(partial(self._finish, plan, self._stub.launch(plan, samples)))

    def _finish(self, plan: StepPlan, launched: Launched) -> list[SampledToken]:
        try:
            return self._board.run(plan, launched.result)
        finally:
            self._board.end(plan.step)

    def draft(self, plan: DraftPlan, samples: Sequence[SamplingState]) -> list[list[DraftToken]]:
        passes, last = DraftPasses(plan, self._engine_spec.block_size), plan.plan.step + plan.count - 1
        try:
            for number in range(plan.count):
                each = passes.plan(number, [0] * len(samples))
                self._board.begin(each.step)
                self._sender.send(each)
            return self._stub.draft(plan, samples)
        finally:
            self._board.end(last)

    def pooled(self) -> Floats:
        return self._stub.pooled()

    def scored(self) -> PromptTokenScores:
        return self._stub.scored()

    def close(self) -> None:
        self._sender.close()
        self._stub.close()
