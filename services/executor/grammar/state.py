"""Where one generation stands in its grammar.

    advance(token) ──▶ position p ──▶ the mask of position p: computed while the ring computes the logits
                                      allowed() waits for it, beside the sampler

The state is a function of grammar and tokens alone: an attempt that continues another's tokens replays them.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from services.executor.engine.sampling_state import Mask
from services.executor.grammar.vocabulary import Vocabulary
from shared.errors import InvalidGrammar
from shared.grammars import shortened


class GrammarState:
    """One owner at a time: the batcher advances it between steps, and a step's masks are computed in between."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, stop_token_ids: Collection[int]) -> None:
        """`matcher` becomes the state's own."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        self._ends = vocabulary.eos.intersection(stop_token_ids)
        """Tokens that end a text. What ends it for the tokenizer and not for the request is not put out."""
        self._mute = np.array(sorted(vocabulary.eos - self._ends), np.int64)
        self._computing: Future[None] | None = None
        self._allowed: Mask | None = None
        self._problem = ""
        self.complete = False
        """Whether the text matches the grammar and nothing can follow."""

    def advance(self, *tokens: int) -> None:
        """`tokens` have been put out."""
        self._settle()
        self._allowed = None
        if not self.matcher.consume_tokens(list(tokens)):
            self.fail(self.matcher.get_error())
        else:
            self.complete = self.matcher.is_stopped()

    def allowed(self) -> Mask:
        """bool [vocabulary]: which tokens may follow. Waits for the mask if it is under way, computes it if it
        is not. Raises `InvalidGrammar` when the grammar leads nowhere."""
        self._settle()
        if self._allowed is None and not self._problem:
            compute_masks([self])
        if self._problem:
            raise InvalidGrammar(f"The answer's form can be followed no further: {self._problem}.")
        assert self._allowed is not None, "it has been computed"
        return self._allowed

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
        size = self.vocabulary.size
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(size, 32 * len(words)))
        allowed = bits.view(np.bool_)
        if len(allowed) < size:
            allowed = np.concatenate((allowed, np.zeros(size - len(allowed), np.bool_)))
        if len(self._mute):
            of_text = allowed.copy()
            of_text[self._mute] = False
            allowed = of_text if of_text.any() else allowed  # nothing else can follow: it ends all the same
        if allowed.any():
            self._allowed = allowed
        else:
            self.fail("no token of this model fits")


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
