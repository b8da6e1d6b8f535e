"""Which draft model goes with which model: their vocabularies are compared by their tokenizers' files, token by token,
and where these differ by the texts of their tokens (`translation.py`)."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from services.executor.model.card import end_tokens
from services.executor.model.tokenizer_files import read_json
from services.executor.worker.drafting.translation import NONE, Translation, VocabularyTexts
from shared.errors import ModelLoadError

# Tokens that one of two tokenizers may have beyond the other's: special ones are added at the end.
MOST_UNSHARED = 128
# Of the smaller vocabulary's texts: with fewer in common, a draft model of another one is refused.
LEAST_SHARED = 0.5
_NAMED = 3  # tokens that a refusal names
_LEAVE_OUT = "choose a draft model of the same family, or leave out --draft-model."


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: Any = {}  # {token: id}, or [[token, score]]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def vocabulary_problem(target: Path, draft: Path) -> str:
    """How the tokenizers of two models differ, as half a sentence; empty: every token that both have is the same in
    both. Raises `ModelLoadError` where one has none."""
    files = [_read(directory / "tokenizer.json") for directory in (target, draft)]
    if files[0] == files[1]:
        return ""
    ours, theirs = (_tokens(content, where) for content, where in zip(files, (target, draft), strict=True))
    others = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    found = [f"token {token} is {_short(theirs[token])} and not {_short(ours[token])}" for token in others[:_NAMED]]
    if len(others) > _NAMED:
        found.append(f"{len(others) - _NAMED} more differ")
    if len(ours.keys() ^ theirs.keys()) > MOST_UNSHARED:
        found.insert(0, f"it has {len(theirs)} tokens and not {len(ours)}")
    return ", ".join(found)


@lru_cache(maxsize=1)
def translation_of(target: Path, draft: Path) -> Translation | None:
    """Between the vocabularies of two models; None where they are one. Raises `ModelLoadError` where too few tokens
    stand for the same text in both, or that cannot be told."""
    problem = vocabulary_problem(target, draft)
    if not problem:
        return None
    found = Translation.between(*(_texts(directory, problem) for directory in (target, draft)))
    if found.share < LEAST_SHARED:
        raise ModelLoadError(
            f"The draft model in {draft} has another vocabulary: {problem}, and of the smaller one's texts "
            f"{found.share:.0%} are tokens of both, where drafts by text need {LEAST_SHARED:.0%}; {_LEAVE_OUT}"
        )
    return found


def _texts(directory: Path, problem: str) -> VocabularyTexts:
    """`problem`: how the vocabularies differ."""
    from llguidance import LLTokenizer  # where vocabularies are one nobody needs it

    try:
        tokenizer = LLTokenizer(_read(directory / "tokenizer.json").decode(), slices=[])
    except Exception as error:  # the library raises what its parts raise
        raise ModelLoadError(
            f"The draft model has another vocabulary: {problem}, and what the tokens of {directory} put out cannot be "
            f"told from its tokenizer.json ({error}); {_LEAVE_OUT}"
        ) from None
    tokens = range(tokenizer.vocab_size)
    texts = [tokenizer.decode_bytes([token]) for token in tokens]
    config, generation = (read_json(directory / name) for name in ("config.json", "generation_config.json"))
    begin = config.get("bos_token_id", (config.get("text_config") or {}).get("bos_token_id"))
    return VocabularyTexts(
        [b"" if text == b"<[%d]>" % token else text for token, text in enumerate(texts)],  # a gap
        frozenset(token for token in tokens if tokenizer.is_special_token(token)),
        begin if isinstance(begin, int) else NONE,
        [token for token in end_tokens(config, generation) if isinstance(token, int)],
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"The file {path}, by which vocabularies are compared, cannot be read ({error.strerror}); {_LEAVE_OUT}"
        ) from None


def _tokens(content: bytes, directory: Path) -> dict[int, str]:
    """By id."""
    try:
        found = msgspec.json.decode(content, type=_TokenizerFile)
        return dict(_pairs(found))
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"The file {directory / 'tokenizer.json'} is no tokenizer of the tokenizers library ({error}); fetch the "
            "model again."
        ) from None


def _pairs(file: _TokenizerFile) -> Iterator[tuple[int, str]]:
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        yield from ((number, token) for token, number in vocab.items())
    else:
        yield from ((number, token) for number, (token, _) in enumerate(vocab))
    yield from ((token.id, token.content) for token in file.added_tokens)


def _short(token: str) -> str:
    return repr(token if len(token) <= 24 else f"{token[:24]}…")
