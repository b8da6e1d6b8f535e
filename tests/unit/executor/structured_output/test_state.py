"""Where a text may end, what a continuation knows, and what happens where a grammar leads nowhere."""

import json

import msgspec
import numpy as np
import pytest

from services.executor.core.sampling_state import SamplingState
from services.executor.structured_output import GrammarCompiler, GrammarState, GrammarWork, Vocabulary, compute_masks
from services.executor.worker.stub import STUB_EOS_TOKEN
from shared.errors import InvalidGrammar
from shared.messages import Grammar, ModelCard, TokenizerBundle
from shared.nats.bus import encode
from tests.unit.executor.structured_output.guided_ring import CARD, ask, state_of
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

NUMBER = Grammar("regex", "[0-9]{2,3}")
OBJECT = Grammar("json_schema", '{"type":"object"}')


def following(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(state.allowed()).tolist())


def test_the_end_is_allowed_where_the_grammar_accepts_and_nowhere_else(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, NUMBER)
    digits = set(b"0123456789")
    for expected in (digits, digits, digits | {STUB_EOS_TOKEN}):
        assert not state.complete
        assert following(state) == expected
        state.advance(ord("7"))
    assert state.complete, "three digits, and nothing can follow"


def test_the_end_token_completes_the_text(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, NUMBER, *b"42")
    state.advance(STUB_EOS_TOKEN)
    assert state.complete


def test_an_end_that_is_ignored_is_not_put_out(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, NUMBER, *b"42", eos=False)
    assert following(state) == set(b"0123456789")


def test_a_continuation_stands_where_the_first_attempt_stood(compiler: GrammarCompiler) -> None:
    text = json.dumps({"a": [1, {"b": None}], "c": "é\n"}, ensure_ascii=False).encode()
    state = state_of(compiler, OBJECT)
    for position, byte in enumerate(text):
        again = state_of(compiler, OBJECT, *text[:position])
        assert np.array_equal(again.allowed(), state.allowed())
        assert byte in following(state)
        state.advance(byte)
    assert state.complete
    assert state_of(compiler, OBJECT, *text).complete


def test_a_token_that_does_not_fit_ends_in_an_error(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, NUMBER, ord("x"))
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match=r"no next token: .*doesn't satisfy the grammar"):
            state.allowed()
    state.advance(ord("1"))
    assert not state.complete


def test_a_grammar_that_no_token_fits_ends_in_an_error() -> None:
    only_letters = msgspec.structs.replace(CARD, vocab_size=64)
    made = GrammarCompiler(Vocabulary.of(only_letters, b""))
    try:
        with pytest.raises(InvalidGrammar, match="no token of this model fits"):
            made.start(ask(Grammar("regex", "[a-z]"))).allowed()
    finally:
        made.close()


async def test_masks_of_a_step_are_what_each_would_be_alone(compiler: GrammarCompiler) -> None:
    work = GrammarWork()
    work.load(CARD, b"")
    grammars = [NUMBER, OBJECT, Grammar("regex", "a+"), Grammar("lark", 'start: "x" start | "y"')]
    samples = []
    for grammar in grammars:
        request = ask(grammar)
        sample = SamplingState(request.sampling, request.prompt, [])
        sample.grammar = compiler.start(request)
        samples.append(sample)
    work.begin_masks(samples)
    work.begin_masks(samples)
    for sample, grammar in zip(samples, grammars, strict=True):
        assert np.array_equal(sample.grammar.allowed(), state_of(compiler, grammar).allowed())
    work.close()


# --- vocabularies --------------------------------------------------------------------------------


def bundle() -> bytes:
    return encode(TokenizerBundle(tiny_files()))


@pytest.mark.parametrize("size", [258, 300, 200])
def test_a_models_tokenizer(size: int) -> None:
    """The tokenizer has 258 tokens; the model may have logits for more, or fewer."""
    card = ModelCard("m", 100, size, [1], "t", 0)
    vocabulary = Vocabulary.of(card, bundle())
    made = GrammarCompiler(vocabulary)
    try:
        state = made.start(ask(Grammar("regex", "[a-z]{1,2}"), stop_token_ids=[1]))
        allowed = state.allowed()
        assert allowed.shape == (size,)
        pieces = {vocabulary.tokenizer.decode_str([token]) for token in following(state)}
        assert pieces <= set("abcdefghijklmnopqrstuvwxyz")
        assert pieces
        state.advance(min(following(state)))
        assert 1 in following(state)
    finally:
        made.close()


async def test_a_tokenizer_that_is_not_understood_refuses_grammars_alone() -> None:
    files = tiny_files() | {"tokenizer.json": b'{"model": {"type": "Strange"}}'}
    with pytest.raises(InvalidGrammar, match="This model's tokenizer cannot be used"):
        Vocabulary.of(ModelCard("m", 100, 258, [1], "t", 0), encode(TokenizerBundle(files)))


class Faulty:
    """A matcher in which something has gone wrong."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def is_error(self) -> bool:
        return bool(self._problem)

    def get_error(self) -> str:
        return self._problem

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        if not self._problem:
            raise RuntimeError("a fault of the library")


@pytest.mark.parametrize(("problem", "said"), [("too complex", "too complex"), ("", "a fault of the library")])
def test_a_fault_of_the_library_ends_the_generations_of_the_step_alone(problem: str, said: str) -> None:
    vocabulary = Vocabulary.of(CARD, b"")
    state = GrammarState(Faulty(problem), vocabulary, [])  # type: ignore[arg-type]
    compute_masks([state])
    with pytest.raises(InvalidGrammar, match=said):
        state.allowed()


def test_tokens_that_the_tokenizer_does_not_have_never_follow() -> None:
    """The model has logits for more."""
    vocabulary = Vocabulary.of(CARD, b"")
    vocabulary.size = 32 * vocabulary.words + 40
    state = GrammarState(Faulty(), vocabulary, [])  # type: ignore[arg-type]
    state.take(np.full(vocabulary.words, -1, np.int32))
    allowed = state.allowed()
    assert len(allowed) == vocabulary.size
    assert not allowed[32 * vocabulary.words :].any()
