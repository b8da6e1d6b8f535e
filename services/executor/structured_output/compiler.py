"""The ring's work on grammars beside its steps: compiling (what is compiled is kept for the next ones), and the masks
of each step.

event loop   accepted ─────▶ ... ─────▶ released to the batcher    step: plan ─┬─▶ engine ─▶ sampler
compiling        └─▶ compiled, earlier tokens replayed ──┘                     │              ▲
masks                                                                          └─▶ masks ─────┘
"""

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog
from llguidance import LLExecutor, LLMatcher

from services.executor.core.sampling_state import SamplingState
from services.executor.structured_output.state import GrammarState, Vocabulary, compute_masks
from shared.errors import InternalError, InvalidGrammar, RyzansteinError
from shared.grammars import GrammarCheck, limits, shortened, source_of
from shared.limits import GRAMMAR_BYTES
from shared.messages import GenerationRequest, Grammar, ModelCard
from shared.tasks import RoundRobin

MOST_KEPT = 128
MOST_KEPT_BYTES = 16 * GRAMMAR_BYTES.value


class GrammarCompiler:
    """For one thread at a time. Compiling takes from half a millisecond to seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._check = GrammarCheck()
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self.compiled = 0
        """Grammars that were not kept from before."""

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
            raise InvalidGrammar(f"The answer's form is too long; make it smaller ({GRAMMAR_BYTES.cited()}).")
        problem = self._check.check(grammar).problem
        if not problem:
            matcher = LLMatcher(self._vocabulary.tokenizer, source_of(grammar), limits=limits(), log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what is learnt of the tokens at the beginning goes to all copies
            problem = shortened(matcher.get_error())
        if problem:
            raise InvalidGrammar(f"The answer's form cannot be held: {problem}.")
        self.compiled += 1
        self._keep(grammar, matcher)
        return matcher

    def _keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._kept[grammar] = matcher
        self._kept_bytes += len(grammar.text)
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popitem(last=False)[0].text)


log = structlog.get_logger(__name__)

Released = Callable[[GenerationRequest, GrammarState | RyzansteinError], None]

STACK = 128 << 20
"""Bytes of address space: what fits the usual 8 MiB in the process that checks must fit here."""


class GrammarWork:
    """Two threads of the leader's. Called from its event loop."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._unusable: InvalidGrammar | None = None
        """Why the model's tokenizer is of no use for grammars."""
        self._compiling = _deep_thread()
        self._turns: RoundRobin[Callable[[], None]] = RoundRobin()
        """What waits to be compiled: of one tenant's many, each goes behind other tenants' next."""
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
            _call(loop, lambda: released(request, outcome))

        with self._turn:
            self._turns.add(request.tenant, compile_one)
        self._compiling.submit(self._compile_next)

    def begin_masks(self, samples: Sequence[SamplingState]) -> None:
        """Computes the masks of a step that is about to begin."""
        grammars = (sample.grammar for sample in samples)
        states = [one for one in grammars if isinstance(one, GrammarState) and one.needs_mask]
        if states:
            computing = self._masking.submit(compute_masks, states, self._parallel)
            for state in states:
                state.expect(computing)

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

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
            return InternalError(
                "The answer's form could not be compiled by a fault of the executor; report it."
            )


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work)


def _deep_thread() -> ThreadPoolExecutor:
    """A thread with a stack of `STACK` bytes."""
    before = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        pool.submit(int)  # threads are started when there is work
        return pool
    finally:
        threading.stack_size(before)
