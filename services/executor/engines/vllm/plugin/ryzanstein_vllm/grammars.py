"""Structured output: grammars of one vocabulary, and where each answer stands in its own.

A state is a function of grammar and tokens alone: a continuation replays the tokens that it brings.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .sampling_options import GRAMMAR_BYTES, parse_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Compiled grammars that are kept: so many, of so many bytes of text in all (compiled, one takes up to some megabytes).
MOST_KEPT, MOST_KEPT_BYTES = 128, 16 * GRAMMAR_BYTES
_LARGEST_EXACT = 1 << 53  # llguidance keeps numbers as doubles
# Between JSON's tokens at most a blank or an indented line: what is free here a lost model may put out for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,40})", "coerce_one_of": False, "lenient": False}

Words = NDArray[np.uint32]  # bit t of little-endian words: whether token t may follow


class RowFailed(Exception):
    """Why one row cannot go on."""


def check_grammar(grammar: Mapping[str, str], tokenizer: "LLTokenizer | None" = None) -> str:
    """Why `grammar` (a kind and a text) does not compile; empty: it does. May take seconds, and gigabytes."""
    from llguidance import LLMatcher

    try:
        source = source_of(*parse_grammar("grammar", grammar))
        failed, words = LLMatcher.validate_grammar_with_warnings(source, tokenizer, limits=limits())
    except (ValueError, RecursionError) as error:
        return line(error)
    return line(words[0]) if failed else ""


def source_of(kind: str, text: str) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("the schema is not a JSON object")
        if (number := _inexact(schema)) is not None:
            raise ValueError(f"{number} in it is a whole number beyond 2^53, which cannot be held exactly")
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    if not text.strip() and not (kind == "regex" and text):
        raise ValueError("it is empty")
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def _inexact(schema: Any) -> int | None:
    """A number under `const` or `enum` that would be taken for its neighbour."""
    pending = [(schema, False)]
    while pending:
        value, named = pending.pop()
        if isinstance(value, dict):
            pending += [(item, named or key in ("const", "enum")) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, named) for item in value]
        elif named and isinstance(value, int) and abs(value) > _LARGEST_EXACT:
            return value
    return None


def limits() -> "LLParserLimits":
    """What compiling and each step may cost: some ten milliseconds and some ten megabytes a request."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=10_000, max_lexer_states=50_000, verbose_errors=False)


def line(reason: object) -> str:
    """Its first line: further ones of llguidance's are pictures of the grammar, which may be secret."""
    return str(reason).strip().split("\n")[0][:300].rstrip(". ") or "no reason is known"


def model_ends(model_config: Any) -> list[int]:
    """The model's end-of-sequence tokens."""
    generation: Mapping[str, Any] = model_config.try_get_generation_config() or {}
    ends = generation.get("eos_token_id")
    if ends is None:
        configs = (model_config.hf_config, getattr(model_config, "hf_text_config", None))
        ends = next((found for one in configs if (found := getattr(one, "eos_token_id", None)) is not None), None)
    return [ends] if isinstance(ends, int) else list(ends or ())


def load_tokenizer(model_config: Any, ends: Sequence[int]) -> "LLTokenizer":
    """vLLM's tokenizer, for llguidance. Takes a second."""
    from llguidance.hf import from_tokenizer

    try:
        from vllm.tokenizers import cached_tokenizer_from_config
    except ImportError:  # before 0.13
        from vllm.transformers_utils.tokenizer import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    size: int | None = model_config.get_vocab_size()
    if size is not None and len(tokenizer) > size:  # more tokens than the model has logits for
        size = None
    try:
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=list(ends) or None)
    except TypeError:  # llguidance before 1.4 takes one
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=ends[0])


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", ends: frozenset[int], stops: Sequence[int]) -> None:
        """`matcher` becomes its own. `ends`: what ends a text, of which the request may ignore some."""
        self.matcher = matcher
        self.complete = False  # whether the text matches and nothing can follow
        self.found: Words | None = None  # what may follow, where it has been computed
        self._ends = ends
        self._heard = ends.intersection(stops)

    def advance(self, tokens: Sequence[int]) -> None:
        """Raises `RowFailed`."""
        self.found = None
        if self.complete:  # nothing but an end can have come
            return
        if not self.matcher.consume_tokens(list(tokens)):
            raise RowFailed(f"The grammar of the answer allows no next token: {line(self.matcher.get_error())}.")
        self.complete = self.matcher.is_stopped()

    def follow(self, width: int) -> Words:
        """What may follow, of `width` tokens. Raises `RowFailed` where nothing can."""
        if self.complete:
            return packed(self._heard or self._ends, width)
        if self.found is None or self.matcher.is_error():
            raise RowFailed(f"The grammar of the answer allows no next token: {line(self.matcher.get_error())}.")
        allowed = np.zeros((width + 31) // 32, np.uint32)
        allowed[: len(self.found)] = self.found[: len(allowed)]
        if width % 32:
            allowed[-1] &= np.uint32((1 << width % 32) - 1)
        ends = packed(self._ends, width)
        if (allowed & ends).any():  # an llguidance that knows one end alone means all
            allowed |= ends
        # An end that the request ignores ends the text all the same: it is put out only where there is nothing else.
        heard = allowed & ~packed(self._ends - self._heard, width)
        allowed = heard if heard.any() else allowed
        if not allowed.any():
            raise RowFailed("The grammar of the answer allows no next token: no token of this model fits.")
        return allowed


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last ones."""

    def __init__(self, ends: Sequence[int], load: Callable[[], "LLTokenizer"]) -> None:
        self._load = load  # with the first grammar
        self._ends = ends
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._kept_bytes = 0

    @cached_property
    def tokenizer(self) -> "LLTokenizer":
        return self._load()

    @cached_property
    def ends(self) -> frozenset[int]:
        return frozenset(self._ends or getattr(self.tokenizer, "eos_tokens", None) or [self.tokenizer.eos_token])

    def start(self, grammar: tuple[str, str], stops: Sequence[int]) -> Guide:
        """Raises `RowFailed`."""
        if grammar not in self._kept:
            self._keep(grammar, self._compile(grammar))
        self._kept.move_to_end(grammar)
        return Guide(self._kept[grammar].deep_copy(), self.ends, stops)

    def compute(self, guides: Sequence[Guide]) -> None:
        """What may follow in each of `guides`."""
        words = (self.tokenizer.vocab_size + 31) // 32
        masks = np.zeros((len(guides), words), np.uint32)
        rows = [(guide.matcher, at) for at, guide in enumerate(guides)]
        self._threads.unsafe_compute_mask_ptr(rows, masks.ctypes.data, words * 4, len(guides))
        for guide, mask in zip(guides, masks, strict=True):
            guide.found = mask

    @cached_property
    def _threads(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=max(1, min(8, (os.cpu_count() or 1) // 4)))

    def _compile(self, grammar: tuple[str, str]) -> "LLMatcher":
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self.tokenizer, source_of(*grammar), limits=limits(), log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what is learnt of the tokens at the beginning goes to all copies
            problem = matcher.get_error()
        except (ValueError, RecursionError) as error:
            problem = line(error)
        if problem:
            raise RowFailed(f"The answer's format cannot be enforced: {line(problem)}.")
        return matcher

    def _keep(self, grammar: tuple[str, str], matcher: "LLMatcher") -> None:
        self._kept[grammar] = matcher
        self._kept_bytes += len(grammar[1])
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
            (_, text), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(text)


def packed(tokens: "Sequence[int] | frozenset[int]", width: int) -> Words:
    bits = np.zeros((width + 31) // 32 * 32, np.bool_)
    bits[[token for token in tokens if token < width]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
