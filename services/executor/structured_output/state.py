"""Where one generation stands in its grammar, and which tokens of the model's vocabulary may follow.

    advance(token) ──▶ position p ──▶ the mask of position p: computed while the ring computes the logits
                                      allowed() waits for it, beside the sampler

The state is a function of grammar and tokens alone: an attempt that continues another's tokens replays them.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from services.executor.core.engine import GrammarFailed
from services.executor.core.sampling_state import Mask, SamplingState
from shared.errors import InvalidGrammar
from shared.grammars import shortened
from shared.messages import ModelCard, TokenizerBundle


class Vocabulary:
    """Made once per ring: it takes a fifth of a second for 50,000 tokens, and the interpreter with it."""

    def __init__(self, tokenizer: LLTokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        """Tokens that the model has logits for."""
        self.words = (tokenizer.vocab_size + 31) // 32
        """32-bit words of a mask."""
        self.eos = frozenset(token for token in tokenizer.eos_tokens if token < size)

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
