"""Which draft model goes with which model: their vocabularies are compared by their tokenizers' files, token by token,
and where these differ by the texts of their tokens (`translation.py`)."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.executor.core.settings import MTP, ExecutorSettings
from services.executor.model.card import end_tokens
from services.executor.model.catalogue import is_encoder
from services.executor.model.loading.checkpoints import resolve_model
from services.executor.model.pooling import is_classifier
from services.executor.model.tokenizer_files import read_json
from services.executor.worker.drafting.translation import NONE, TokenTexts, Translation
from shared.errors import ModelLoadError
from shared.model_store.locks import hold_model
from shared.models import HUB

log = structlog.get_logger(__name__)

MOST_UNSHARED = 128
"""Tokens that one of two tokenizers may have beyond the other's: special ones are added at the end."""
LEAST_SHARED = 0.5
"""Of the smaller vocabulary's texts: with fewer in common, a draft model of another one is refused."""
_NAMED = 3
"""Tokens that a refusal names."""
_LEAVE_OUT = "choose a draft model of the same family, or leave out --draft-model."
_WEIGHTS = {".safetensors", ".bin", ".gguf"}


def draft_directory(settings: ExecutorSettings, target: Path) -> Path | None:
    """Of the draft model for the model in `target`; None: none is asked for, or no drafts at all. Raises
    `ModelLoadError` where they do not fit together, or it is not to be had."""
    if not settings.draft_model or not settings.max_drafts:
        return None
    if settings.draft_model == MTP:
        return target
    directory = resolve_model(settings.draft_model, settings.store, lambda *step: None)
    hold_model(directory, settings.model_cache)  # as long as this process lives
    for which, where in (("model", target), ("draft model", directory)):
        described = read_json(where / "config.json")
        if is_encoder(described) or is_classifier(described):
            raise ModelLoadError(
                f"The {which} in {where} gives no tokens one by one; leave out --draft-model."
            )
    if is_head(settings, directory):  # it has no tokenizer of its own
        return directory
    translation = translation_of(target, directory)
    if translation is not None:
        log.info("draft_model_by_text", draft_model=settings.draft_model, shared=round(translation.share, 3))
    sizes = [_weight_bytes(where) for where in (target, directory)]
    if sizes[1] >= sizes[0]:
        log.warning(
            "draft_model_not_smaller", draft_model=settings.draft_model, bytes=sizes[1], model_bytes=sizes[0]
        )
    return directory


def is_head(settings: ExecutorSettings, directory: Path) -> bool:
    """Whether the draft model in `directory` reads the states of the model that is served."""
    named = read_json(directory / "config.json").get("architectures")
    eagle3 = isinstance(named, list) and any("eagle3" in str(one).lower() for one in named)
    return settings.draft_model == MTP or eagle3


def draft_name(settings: ExecutorSettings) -> str:
    """What people call it: the last part of a path, or the hub name; empty: none is asked for, or no drafts at all."""
    name = settings.draft_model if settings.max_drafts else ""
    return (
        Path(name).name.removesuffix(".gguf") if name.startswith(("/", "~", ".")) else name.removeprefix(HUB)
    )


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: Any = {}
    """{token: id}, or [[token, score]]."""


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
    found = [
        f"token {token} is {_short(theirs[token])} and not {_short(ours[token])}" for token in others[:_NAMED]
    ]
    if len(others) > _NAMED:
        found.append(f"{len(others) - _NAMED} more are others")
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


def _texts(directory: Path, problem: str) -> TokenTexts:
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
    return TokenTexts(
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
