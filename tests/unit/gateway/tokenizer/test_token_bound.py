"""A text has no fewer tokens than its size says."""

import json
import random
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.tokenizer.token_bound import TokenBound, TokenizerJson
from tests.unit.gateway.tokenizer.test_detokenizer import metaspace_files
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


def bound_of(tokenizer: Tokenizer) -> TokenBound:
    return TokenBound(msgspec.json.decode(tokenizer.to_str(), type=TokenizerJson), tokenizer)


def byte_level(normalizer: Any = None, **added: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "th", "the", "\u0120\u0120", "\u0120\u0120\u0120\u0120"]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120")]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, **added)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer.from_str(metaspace_files()["tokenizer.json"].decode())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


KNOWN = {
    "plain": byte_level(),
    "composing": byte_level(normalizers.NFC()),
    "lowercase": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "stripping": byte_level(lstrip=True, rstrip=True),
    "metaspace": metaspace(),
}
texts = st.lists(
    st.sampled_from(["the", "  ", " " * 9, "<|end|>", "\u1100\u1161\u11a8", "a\u0323\u0302", "\u212a", "\u4e00"])
    | st.text(max_size=3),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", KNOWN)
@given(text=texts)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = KNOWN[kind]
    assert bound_of(tokenizer).fewest_tokens(text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", KNOWN)
def test_long_texts_have_many(kind: str) -> None:
    assert bound_of(KNOWN[kind]).fewest_tokens("the" * 10_000) >= 1000


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
    ],
    ids=json.dumps,
)
def test_where_text_may_vanish_nothing_is_known(change: dict[str, Any]) -> None:
    file = json.loads(byte_level().to_str()) | change
    assert bound_of(Tokenizer.from_str(json.dumps(file))).fewest_tokens("the" * 1000) == 0


def test_nor_where_a_byte_has_no_token() -> None:
    assert bound_of(Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))).fewest_tokens("a" * 1000) == 0
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "?": 1}, unk_token="?"))  # no password
    assert bound_of(words).fewest_tokens("a" * 1000) == 0


def test_the_tiny_one() -> None:
    tokenizer = tokenizers.Tokenizer.from_buffer(tiny_files()["tokenizer.json"])
    text = "".join(random.choices("ab \u00e4", k=900))
    assert bound_of(tokenizer).fewest_tokens(text) == -(-len(text.encode()) // len("<|start|>"))
