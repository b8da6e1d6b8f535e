"""Output tokens become text in pieces: a function of the tokens alone, with little held back, in linear time."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from services.gateway.tokenizer import detokenizer as detokenization
from services.gateway.tokenizer.detokenizer import CONTEXT_TOKENS, MOST_PENDING, StreamDetokenizer, TokenTexts
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


def metaspace_files() -> dict[str, bytes]:
    """A tokenizer of SentencePiece's kind: words with a sign for the space, bytes for what is no word."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581cat", "s", "\ufffd"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps({}).encode()}


TINY, METASPACE = ModelTokenizer(tiny_files()), ModelTokenizer(metaspace_files())
OF_BYTE = {TINY.token_bytes(token): token for token in range(2, 258)}
INVALID = OF_BYTE[b"\x80"]  # the token of a byte that begins no character
tokens_of = {
    "byte level": (TINY, st.lists(st.sampled_from([0, 1, INVALID, *range(2, 258)]), max_size=60)),
    "metaspace": (METASPACE, st.lists(st.integers(0, 261), max_size=60)),
}


def parts(tokens: list[int], cuts: list[int]) -> Iterator[list[int]]:
    ends = sorted({cut % (len(tokens) + 1) for cut in cuts} | {len(tokens)})
    begin = 0
    for end in ends:
        yield tokens[begin:end]
        begin = end


@pytest.mark.parametrize("kind", tokens_of)
@given(data=st.data())
def test_the_text_does_not_depend_on_how_the_tokens_arrive(kind: str, data: st.DataObject) -> None:
    tokenizer, strategy = tokens_of[kind]
    tokens, skip = data.draw(strategy), data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=6))
    one, many = (tokenizer.detokenizer([], skip_special_tokens=skip) for _ in range(2))
    shown = [one.feed([token]) for token in tokens]
    by_part = [many.feed(part) for part in parts(tokens, cuts)]
    assert "".join(shown) == "".join(by_part)
    assert one.flush() == many.flush()


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_text_comes_back_as_it_was(text: str, cuts: list[int]) -> None:
    tokens = [OF_BYTE[bytes([byte])] for byte in text.encode()]
    detokenizer = TINY.detokenizer([], skip_special_tokens=True)
    pieces = [detokenizer.feed(part) for part in parts(tokens, cuts)]
    assert "".join(pieces) + detokenizer.flush() == text


@pytest.mark.parametrize("kind", tokens_of)
@given(data=st.data())
def test_no_more_than_a_few_tokens_are_held_back(kind: str, data: st.DataObject) -> None:
    tokenizer, strategy = tokens_of[kind]
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    for token in data.draw(strategy):
        detokenizer.feed([token])
        assert len(detokenizer._pending) <= MOST_PENDING  # type: ignore[attr-defined]


def test_bytes_that_are_no_character_are_shown_while_they_come() -> None:
    detokenizer = TINY.detokenizer([], skip_special_tokens=True)
    shown = "".join(detokenizer.feed([INVALID]) for _ in range(100))
    assert len(shown) >= 100 - MOST_PENDING
    assert shown + detokenizer.flush() == "\ufffd" * 100


def test_a_character_behind_them_is_whole() -> None:
    face = [OF_BYTE[bytes([byte])] for byte in "\U0001f600".encode()]
    for count in range(2 * MOST_PENDING):
        detokenizer = TINY.detokenizer([], skip_special_tokens=True)
        text = detokenizer.feed([INVALID] * count + face) + detokenizer.flush()
        assert text == "\ufffd" * count + "\U0001f600"


def test_hidden_tokens_neither_pile_up_nor_eat_a_space() -> None:
    the, cat, end = 258, 259, 1
    detokenizer = METASPACE.detokenizer([], skip_special_tokens=True)
    assert detokenizer.feed([the, *[end] * 100, cat]) == "the cat"


@pytest.mark.parametrize(("tokenizer", "token"), [(TINY, INVALID), (METASPACE, 1)], ids=["invalid", "hidden"])
def test_decoding_takes_linear_time(tokenizer: ModelTokenizer, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tokens that are decoded: each step decodes what its stream holds, and that does not grow."""
    decoded = 0

    class Counted:
        def __init__(self, ids: list[int] | None = None, *, skip_special_tokens: bool) -> None:
            self._stream = DecodeStream(ids=ids or [], skip_special_tokens=skip_special_tokens)
            self._held = len(ids or [])

        def step(self, tokenizer: Tokenizer, ids: list[int] | int) -> str | None:
            nonlocal decoded
            count = 1 if isinstance(ids, int) else len(ids)
            self._held += count
            decoded += self._held
            text = self._stream.step(tokenizer, ids)
            if text:
                self._held = count
            return text

    monkeypatch.setattr(detokenization, "DecodeStream", Counted)
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    for _ in range(2000):
        detokenizer.feed([token])
    assert 0 < decoded <= 2000 * 2 * (MOST_PENDING + CONTEXT_TOKENS)


@given(tokens=st.lists(st.sampled_from([0, INVALID, *range(2, 258)]), max_size=60), most=st.integers(0, 40))
def test_texts_of_single_tokens_change_nothing(tokens: list[int], most: int) -> None:
    """Neither where they are whole nor where they are not, nor where no more of them are kept."""
    library = Tokenizer.from_str(tiny_files()["tokenizer.json"].decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenization, "KNOWN_TEXTS", most)
        texts = TokenTexts(library, skip_special_tokens=False)
        with_texts = StreamDetokenizer(library, [], skip_special_tokens=False, texts=texts)
        alone = StreamDetokenizer(library, [], skip_special_tokens=False)
        for token in tokens:
            assert with_texts.feed([token]) == alone.feed([token])
        assert with_texts.flush() == alone.flush()
    assert len(texts) <= most


def test_bytes_of_a_token_are_what_it_stands_for() -> None:
    """SentencePiece's sign is a space, its byte tokens are bytes; there is nothing behind the vocabulary."""
    found = [METASPACE.token_bytes(token) for token in (2, 257, 258, 259, 1, 10_000)]
    assert found == [b"\x00", b"\xff", b" the", b" cat", b"</s>", b""]
