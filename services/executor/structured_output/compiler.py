"""From grammars to the states of generations; what is compiled is kept for the next ones."""

from collections import OrderedDict

from llguidance import LLMatcher

from services.executor.structured_output.state import GrammarState, Vocabulary
from shared.errors import InvalidGrammar
from shared.grammars import GrammarCheck, limits, shortened, source_of
from shared.limits import GRAMMAR_BYTES
from shared.messages import GenerationRequest, Grammar

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
