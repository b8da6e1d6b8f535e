"""The ring's work on grammars beside its steps: compiling, and the masks of each step.

event loop   accepted ─────▶ ... ─────▶ released to the batcher    step: plan ─┬─▶ engine ─▶ sampler
compiling        └─▶ compiled, earlier tokens replayed ──┘                     │              ▲
masks                                                                          └─▶ masks ─────┘
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog
from llguidance import LLExecutor

from services.executor.core.sampling_state import SamplingState
from services.executor.structured_output.compiler import GrammarCompiler
from services.executor.structured_output.state import GrammarState, Vocabulary, compute_masks
from shared.errors import InternalError, InvalidGrammar, RyzansteinError
from shared.messages import GenerationRequest, ModelCard
from shared.tasks import RoundRobin

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
