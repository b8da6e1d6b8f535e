"""Tokens of a text in segments are those of the whole text, with every kind of tokenizer; long segments are kept."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.tokenizer.segments import MOST_SHORT, SHORTEST, Segments

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|im", "<s>", "</s>"]
WORDS = [
    "Hello",
    " world",
    "\n",
    "\n\n",
    "  ",
    "▁",
    " a",
    "é",
    "e\u0301",
    "日本",
    "<",
    "|im_start|>",
    "<|im_",
    "İ",
    "🙂",
]
LONG = "It was the best of times, it was the worst of times. " * 6


def byte_level(*, prefix_space: bool = False) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = [("Ġ", "w"), ("o", "r"), ("l", "d"), ("t", "h"), ("th", "e"), ("Ċ", "Ċ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "▁a", "Hello", "the", "▁the", *map(chr, range(33, 127)), "\n"]
    scores = [(piece, -float(index)) for index, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def prepending() -> Tokenizer:
    """As Llama 2: the normalizer puts a space before each part."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def lowercase() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_tokens([AddedToken("world", normalized=True), AddedToken("\n\n", normalized=False)])
    return tokenizer


MAKES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "with a space before": lambda: byte_level(prefix_space=True),
    "a space before the first part": lambda: unigram("first"),
    "a space before each part": lambda: unigram("always"),
    "prepending": prepending,
    "lowercase": lowercase,
}


def with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


texts = st.lists(
    st.sampled_from([*SPECIALS, *WORDS, LONG, LONG.upper()]) | st.sampled_from("İ🙂") | st.text(max_size=5), max_size=40
)


@pytest.fixture(scope="module", params=MAKES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return with_specials(MAKES[request.param]())


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4))
def test_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer, given_texts: list[list[str]]) -> None:
    segments = Segments(tokenizer, 4000)
    for parts in [*given_texts, *given_texts]:
        text = "".join(parts)
        assert segments.encode(text) == whole(tokenizer, text)
        assert segments._bytes <= 4000


class Counting:
    """Counts the characters that are tokenized."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seen = 0

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return added

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[object]:
        self.seen += sum(map(len, texts))
        return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens))


def test_a_beginning_is_tokenized_once() -> None:
    counting = Counting(with_specials(byte_level()))
    segments = Segments(counting, 1 << 20)  # type: ignore[arg-type]
    first = f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    segments.encode(first)
    assert counting.seen == len(first)
    segments.encode(first + "<|im_start|>assistant\n")
    assert counting.seen == len(first) + len("<|im_end|>\n<|im_start|>assistant\n")


def test_a_short_system_prompt_and_the_header_of_the_answer_are_tokenized_once() -> None:
    counting = Counting(with_specials(byte_level()))
    segments = Segments(counting)  # type: ignore[arg-type]
    question = "<|im_end|>\n<|im_start|>user\nWhat is {} and {}?"
    chat = "<|im_start|>system\nYou are a helpful assistant." + question + "<|im_end|>\n<|im_start|>assistant\n"
    for number in range(3):
        counting.seen = 0
        text = chat.format(number, number)
        assert segments.encode(text) == whole(counting._tokenizer, text)
        assert counting.seen == (len(question.format(number, number)) if number else len(text))


def test_few_short_segments_are_kept() -> None:
    segments = Segments(with_specials(byte_level()))
    for number in range(3 * MOST_SHORT):
        segments.encode(f"{LONG}<s>{number:0{SHORTEST}}")
        assert len(segments._short) <= MOST_SHORT
    assert len(segments._kept) == 1


def test_a_token_that_takes_spaces_along_leaves_the_text_whole() -> None:
    tokenizer = with_specials(byte_level())
    tokenizer.add_special_tokens([AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True)])
    counting = Counting(tokenizer)
    segments = Segments(counting)  # type: ignore[arg-type]
    text = f"<|im_start|>{LONG}<|assistant|>  \n{LONG}"
    assert [segments.encode(text), segments.encode(text)] == [whole(tokenizer, text)] * 2
    assert counting.seen == 2 * len(text)
