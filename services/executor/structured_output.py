"""Structured output: grammars are compiled, and kept for the next requests, and masks computed beside the steps (ADR
0013).

event loop   accepted ─────▶ ... ─────▶ released to the batcher    step: plan ─┬─▶ engine ─▶ sampler
compiling        └─▶ compiled, earlier tokens replayed ──┘                     │              ▲
masks                                                                          └─▶ masks ─────┘

`GrammarState`: where one generation stands in its grammar, and which tokens may follow.

    advance(token) ──▶ position p ──▶ the mask of position p: computed while the ring computes the logits
                                      allowed() waits for it, beside the sampler

    drafts   t │ d1 d2 d3     `DraftMatcher`: another matcher goes along the drafts, a mask behind each, and back to t
                 ▲            (`DraftMasks`); before, it has said which drafts fit, and which text is forced

The state is a function of grammar and tokens alone: an attempt that continues another's tokens replays them.
"""

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile

import msgspec
import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from services.executor.core.engine import GrammarFailed
from services.executor.core.sampling_state import Int64Array, Mask, SamplingState
from shared.errors import InternalError, InvalidGrammar, RyzansteinError
from shared.grammars import GrammarCheck, limits, shortened, source_of
from shared.limits import GRAMMAR_BYTES
from shared.messages import GenerationRequest, Grammar, ModelCard, TokenizerBundle
from shared.tasks import RoundRobin

log = structlog.get_logger(__name__)


class Vocabulary:
    """Made once per ring: it takes a fifth of a second for 50,000 tokens, and the interpreter with it."""

    def __init__(self, tokenizer: LLTokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size  # tokens that the model has logits for
        self.words = (tokenizer.vocab_size + 31) // 32  # 32-bit words of a mask
        self.eos = frozenset(token for token in tokenizer.eos_tokens if token < size)

    def unpack(self, words: NDArray[np.int32], mute: Int64Array) -> Mask | None:
        """bool [vocabulary] of a mask as the library writes it: bit t of little-endian words is token t. None where no
        token is left. The tokens `mute` are left only where there are no others: these end the text all the same."""
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(self.size, 32 * len(words)))
        allowed = bits.view(np.bool_)
        if len(allowed) < self.size:
            allowed = np.concatenate((allowed, np.zeros(self.size - len(allowed), np.bool_)))
        if len(mute):
            of_text = allowed.copy()
            of_text[mute] = False
            allowed = of_text if of_text.any() else allowed
        return allowed if allowed.any() else None

    @classmethod
    def of(cls, card: ModelCard, bundle: bytes) -> "Vocabulary":
        """From what gateways are told of the model. Raises `InvalidGrammar` when its tokenizer is not understood."""
        if not bundle:
            tokens = TokenizerWrapper(_Bytes(card))
            return cls(LLTokenizer(tokens, n_vocab=card.vocab_size, slices=[]), card.vocab_size)
        text = msgspec.msgpack.decode(bundle, type=TokenizerBundle).files["tokenizer.json"].decode()
        eos = card.eos_token_ids or None  # None: as the tokenizer itself says
        try:
            try:
                tokenizer = LLTokenizer(text, n_vocab=card.vocab_size, eos_token=eos)
            except ValueError:  # it has more tokens than the model
                tokenizer = LLTokenizer(text, eos_token=eos)
        except Exception as error:  # the library raises what its parts raise
            raise InvalidGrammar(
                f"This model's tokenizer cannot be used for structured output ({error}); leave the format of the "
                "answer open."
            ) from None
        return cls(tokenizer, card.vocab_size)


class _Bytes:
    """The stub's tokens: a token is a byte."""

    bos_token_id = None

    def __init__(self, card: ModelCard) -> None:
        self.eos_token_id = card.eos_token_ids[0] if card.eos_token_ids else 0
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [bytes([byte]) for byte in range(card.vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_NO_FURTHER = "The grammar of the answer allows no next token: {}."
_NOTHING_FITS = "no token of this model fits"


class GrammarState:
    """One owner at a time: the batcher advances it between steps, and a step's masks are computed in between."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, stop_token_ids: Collection[int]) -> None:
        """`matcher` becomes the state's own."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        # Tokens that end a text. What ends it for the tokenizer and not for the request is not put out.
        self._ends = vocabulary.eos.intersection(stop_token_ids)
        self._mute = np.array(sorted(vocabulary.eos - self._ends), np.int64)
        self._computing: Future[None] | None = None
        self._allowed: Mask | None = None
        self._problem = ""
        self._ahead: DraftMatcher | None = None  # for drafts, once there was reason to think of some
        self._forced: list[int] | None = None
        self.complete = False  # whether the text matches the grammar and nothing can follow

    def advance(self, *tokens: int) -> None:
        self._settle()
        self._allowed = self._forced = None
        if self._ahead is not None:
            self._ahead.advance(tokens)
        if not self.matcher.consume_tokens(list(tokens)):
            self.fail(self.matcher.get_error())
        else:
            self.complete = self.matcher.is_stopped()

    def may_end(self) -> bool:
        """Whether the text matches as it is; also where it is followed no further."""
        self._settle()
        return self.matcher.is_error() or self.matcher.is_accepting()

    def allowed(self) -> Mask:
        """bool [vocabulary]: which tokens may follow. Waits for the mask if it is under way, computes it if it
        is not. Raises `InvalidGrammar` when the grammar leads nowhere."""
        self._settle()
        if self._allowed is None and not self._problem:
            compute_masks([self])
        if self._problem:
            raise InvalidGrammar(_NO_FURTHER.format(self._problem))
        assert self._allowed is not None, "it has been computed"
        return self._allowed

    def forced(self) -> list[int]:
        if self._forced is None:
            self._forced = [] if self._problem else self._drafts().forced()
        return self._forced

    def fitting(self, drafts: Sequence[int]) -> int:
        return self._drafts().fitting(drafts) if drafts and not self._problem else 0

    def after_each(self, drafts: Sequence[int]) -> "list[MaskBehindDraft]":
        masks = DraftMasks(self, self._drafts(), drafts)
        return [MaskBehindDraft(masks, row) for row in range(len(drafts))]

    def _drafts(self) -> "DraftMatcher":
        self._settle()
        if self._ahead is None:
            self._ahead = DraftMatcher(self.matcher.deep_copy(), self.vocabulary)
        return self._ahead

    @property
    def needs_mask(self) -> bool:
        """Whether nobody has begun to compute what may follow."""
        return self._computing is None and self._allowed is None and not self._problem

    def expect(self, computing: "Future[None]") -> None:
        """`computing` ends with `compute_masks` of this state."""
        self._computing = computing

    def _settle(self) -> None:
        if self._computing is not None:
            self._computing.result()
            self._computing = None

    def fail(self, problem: str) -> None:
        """Nothing can follow any more, because of `problem`."""
        self._problem = shortened(problem) or "no reason is known"

    def take(self, words: NDArray[np.int32]) -> None:
        """The mask as the library wrote it: bit t of little-endian words is token t."""
        if self.matcher.is_error():
            self.fail(self.matcher.get_error())
            return
        self._allowed = self.unpack(words)
        if self._allowed is None:
            self.fail(_NOTHING_FITS)

    def unpack(self, words: NDArray[np.int32]) -> Mask | None:
        """`Vocabulary.unpack`, without what is not to be put out."""
        return self.vocabulary.unpack(words, self._mute)


def compute_masks(states: Sequence[GrammarState], parallel: LLExecutor | None = None) -> None:
    """Computes what may follow in each of `states`, which share a vocabulary. Raises nothing."""
    words = states[0].vocabulary.words
    masks = np.zeros((len(states), words), np.int32)
    try:
        if parallel is not None and len(states) > 1:
            rows = [(state.matcher, row) for row, state in enumerate(states)]
            parallel.unsafe_compute_mask_ptr(rows, masks.ctypes.data, words * 4, len(states))
        else:
            for row, state in enumerate(states):
                state.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, words * 4)
        for row, state in enumerate(states):
            state.take(masks[row])
    except Exception as error:  # a fault in here must not end the ring: it ends these generations
        for state in states:
            state.fail(str(error))


# Of forced text, as much as becomes drafts at once: of a constant of 100 kB, the whole would take 20 ms.
FORCED_BYTES = 128
_RECENT = 4


class DraftMatcher:
    """Goes along drafts in a matcher of its own, and back: what goes wrong on that way is nothing to the text.

    Copying a matcher takes as long as its text is, so there is one for a text's life, made when it is first of use.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        """`matcher` becomes its own."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._behind: list[int] = []  # what the text has got since it was last asked
        self._recent: list[int] = []
        self._usable = not matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> None:
        """The text has got `tokens`."""
        self._behind += tokens
        self._recent = [*self._recent, *tokens][-_RECENT:]

    def forced(self) -> list[int]:
        """`Grammar.forced`, not all of it where it is long."""
        try:
            self._catch_up()
            text = self._matcher.compute_ff_bytes() if self._usable else b""
            if not text:
                return []
            tokens, _ = self._vocabulary.tokenizer.tokenize_partial(text[:FORCED_BYTES], self._recent)
        except Exception as error:  # without drafts the text is the same
            self._give_up(error)
            return []
        return [token for token in tokens if token < self._vocabulary.size]

    def fitting(self, drafts: Sequence[int]) -> int:
        """`Grammar.fitting`"""
        known = list(takewhile(lambda token: token < self._vocabulary.size, drafts))
        try:
            self._catch_up()
            valid = self._matcher.validate_tokens(known) if self._usable else 0
            return self._open(known[:valid])
        except Exception as error:
            self._give_up(error)
            return 0

    def masks(self, drafts: Sequence[int]) -> NDArray[np.int32]:
        """int32 [drafts, words]: what may follow behind each of `drafts`, which fit. Raises RuntimeError."""
        self._catch_up()
        words = self._vocabulary.words
        masks, spare = np.zeros((len(drafts), words), np.int32), np.zeros(words, np.int32)
        self._usable = False  # until it is back
        for row, draft in enumerate(drafts):
            if self._matcher.consume_token(draft):
                self._matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, words * 4)
            if self._matcher.is_error():
                raise RuntimeError(self._matcher.get_error())
        self._usable = self._matcher.rollback(len(drafts))
        if self._usable:
            # llguidance 1.9.1 may give the mask that it computed last to another text, one that goes on from before a
            # rollback: so the last one is of what was not rolled back.
            self._matcher.unsafe_compute_mask_ptr(spare.ctypes.data, words * 4)
        return masks

    def _open(self, valid: Sequence[int]) -> int:
        """How many of these tokens leave the text open. Nothing is consumed behind its end, which could not be taken
        back."""
        consumed = ends = 0
        for token in valid:
            self._usable = self._matcher.consume_token(token)
            consumed += 1
            if not self._usable or self._matcher.is_stopped():
                ends = 1
                break
        self._usable = self._usable and (not consumed or self._matcher.rollback(consumed))
        return consumed - ends if self._usable else 0

    def _catch_up(self) -> None:
        if self._behind and self._usable:
            self._usable = self._matcher.consume_tokens(self._behind)
        self._behind = []

    def _give_up(self, error: Exception) -> None:
        log.warning("grammar_without_drafts", reason=str(error))
        self._usable = False


class DraftMasks:
    """What may follow behind each of the drafts of a sequence in one step."""

    def __init__(self, state: GrammarState, matcher: DraftMatcher, drafts: Sequence[int]) -> None:
        self._state, self._matcher, self._drafts = state, matcher, list(drafts)
        self._computing: Future[None] | None = None
        self._words: NDArray[np.int32] | None = None
        self._problem = ""

    def expect(self, computing: "Future[None]") -> None:
        """`computing` ends with `compute`."""
        self._computing = computing
        self._state.expect(computing)  # which uses the same matcher

    def compute(self) -> None:
        """Raises nothing."""
        try:
            self._words = self._matcher.masks(self._drafts)
        except Exception as error:
            self._problem = shortened(str(error)) or "no reason is known"

    def allowed(self, row: int) -> Mask:
        if self._computing is not None:
            self._computing.result()
        elif self._words is None and not self._problem:
            self.compute()
        allowed = None if self._words is None else self._state.unpack(self._words[row])
        if allowed is None:
            raise InvalidGrammar(_NO_FURTHER.format(self._problem or _NOTHING_FITS))
        return allowed


class MaskBehindDraft:
    """`Grammar` of one row: a text with drafts that may not be put out."""

    complete = False

    def __init__(self, masks: DraftMasks, row: int) -> None:
        self.masks = masks
        self._row = row

    def allowed(self) -> Mask:
        return self.masks.allowed(self._row)

    def advance(self, *tokens: int) -> None:
        raise InternalError("What is behind drafts is sampled with, and goes on with what is put out.")

    def forced(self) -> list[int]:
        return []

    def fitting(self, drafts: Sequence[int]) -> int:
        return 0

    def after_each(self, drafts: Sequence[int]) -> "list[MaskBehindDraft]":
        return []


def masks_of(states: Sequence[SamplingState]) -> dict[int, Mask]:
    """By row; those without a grammar are left out. Waits for masks that are being computed. Raises
    `GrammarFailed`."""
    masks: dict[int, Mask] = {}
    failed: list[int] = []
    reason = ""
    for row, state in enumerate(states):
        if state.grammar is None:
            continue
        try:
            masks[row] = state.grammar.allowed()
        except InvalidGrammar as error:
            failed.append(row)
            reason = reason or error.message
    if failed:
        raise GrammarFailed(reason, failed)
    return masks


MOST_KEPT = 128
MOST_KEPT_BYTES = 16 * GRAMMAR_BYTES.value


class GrammarCompiler:
    """For one thread at a time. Compiling takes from half a millisecond to seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._check = GrammarCheck()
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self.compiled = 0  # grammars that were not kept from before

    def start(self, request: GenerationRequest) -> GrammarState:
        """The state of a request's grammar after the tokens that it brings. Raises `InvalidGrammar`."""
        assert request.grammar is not None, "it asks for a form"
        matcher = self._kept.get(request.grammar)
        if matcher is None:
            matcher = self._compile(request.grammar)
        self._kept.move_to_end(request.grammar)
        state = GrammarState(matcher.deep_copy(), self._vocabulary, request.stop_token_ids)
        if request.generated:
            state.advance(*request.generated)
        return state

    def close(self) -> None:
        self._check.close()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Where the grammar is one that takes minutes, gigabytes or the whole stack, another process is told so
        by its end (`shared.grammars`); then here."""
        if len(grammar.text) > GRAMMAR_BYTES.value:
            raise InvalidGrammar(f"The answer's format is too long; make it smaller ({GRAMMAR_BYTES.cited()}).")
        problem = self._check.check(grammar).problem
        if not problem:
            matcher = LLMatcher(self._vocabulary.tokenizer, source_of(grammar), limits=limits(), log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what is learnt of the tokens at the beginning goes to all copies
            problem = shortened(matcher.get_error())
        if problem:
            raise InvalidGrammar(f"The answer's format cannot be enforced: {problem}.")
        self.compiled += 1
        self._keep(grammar, matcher)
        return matcher

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._kept[grammar] = matcher
        self._kept_bytes += len(grammar.text)
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popitem(last=False)[0].text)


Released = Callable[[GenerationRequest, GrammarState | RyzansteinError], None]

# Bytes of address space: what fits the usual 8 MiB in the process that checks must fit here.
STACK = 128 << 20


class GrammarWork:
    """Two threads of the leader's. Called from its event loop."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._unusable: InvalidGrammar | None = None  # why the model's tokenizer is of no use for grammars
        self._compiling = _deep_thread()
        # What waits to be compiled: of one tenant's many, each goes behind other tenants' next.
        self._turns: RoundRobin[Callable[[], None]] = RoundRobin()
        self._turn = threading.Lock()
        self._masking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        # On CPUs the ring has all cores, and its threads wait for each other.
        self._parallel = LLExecutor(num_threads=max(1, min(8, (os.cpu_count() or 1) // 4)))

    def load(self, card: ModelCard, bundle: bytes) -> None:
        """Before anything else. Holds the interpreter for a while: to be called before the ring serves."""
        try:
            self._compiler = GrammarCompiler(Vocabulary.of(card, bundle))
        except InvalidGrammar as error:
            log.warning("no_structured_output", reason=str(error))
            self._unusable = error

    def compile(self, request: GenerationRequest, released: Released) -> None:
        """Calls `released` in the event loop with the state of the request's grammar, or what is wrong with it."""
        loop = asyncio.get_running_loop()

        def compile_one() -> None:
            outcome = self._start(request)
            if not loop.is_closed():
                loop.call_soon_threadsafe(released, request, outcome)

        with self._turn:
            self._turns.add(request.tenant, compile_one)
        self._compiling.submit(self._compile_next)

    def begin_masks(self, samples: Sequence[SamplingState]) -> None:
        """Computes the masks of a step that is about to begin."""
        grammars = [sample.grammar for sample in samples if sample.grammar is not None]
        states = [one for one in grammars if isinstance(one, GrammarState) and one.needs_mask]
        behind = list(dict.fromkeys(one.masks for one in grammars if isinstance(one, MaskBehindDraft)))
        if states or behind:
            computing = self._masking.submit(self._compute, states, behind)
            for state in states:
                state.expect(computing)
            for masks in behind:
                masks.expect(computing)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _compute(self, states: Sequence[GrammarState], behind: Sequence[DraftMasks]) -> None:
        if states:
            compute_masks(states, self._parallel)
        for masks in behind:
            masks.compute()

    def _compile_next(self) -> None:
        with self._turn:
            job = self._turns.next()
        if job is not None:
            job()

    def _start(self, request: GenerationRequest) -> GrammarState | RyzansteinError:
        if self._unusable is not None:
            return self._unusable
        assert self._compiler is not None, "it has not been loaded"
        try:
            return self._compiler.start(request)
        except InvalidGrammar as error:
            return error
        except Exception:  # one request ends, and not the ring
            log.exception(
                "grammar_not_compiled",
                request_id=request.request_id,
                generation_id=request.generation_id,
                attempt=request.attempt,
            )
            return InternalError("The answer's format could not be compiled because of an executor bug; report it.")


def _deep_thread() -> ThreadPoolExecutor:
    """A thread with a stack of `STACK` bytes."""
    before = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        pool.submit(int)  # threads are started when there is work
        return pool
    finally:
        threading.stack_size(before)
