"""Tokens of two vocabularies that stand for the same text, for a draft model with another tokenizer. Pure.

    model    " the"   " lighthouse"   "<|im_end|>"
    draft    " the"   "house"         "</s>"           the same bytes; its longest token that ends so; its own end

The draft model has a row for each token of the model, at the same position, so that block tables, slots and plans are
those of any draft model. A token that it does not have it is given as the longest of its own that ends like it. It
proposes what the model has a token for: the token-level intersection of Timor et al., "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", https://arxiv.org/abs/2502.05202. Plans name
the model's tokens throughout, and proposals are drawn in the order of the model's, so that the same random number
leads to the same text in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor.core.step_plan import Int32Array
from services.executor.sampling.candidates import RowLogits, RowTable

NONE = -1
LONGEST_ENDING = 64  # bytes of a token's end for which a token of the other vocabulary is sought


class VocabularyTexts(NamedTuple):
    """What the tokens of a vocabulary put out."""

    texts: Sequence[bytes]  # by token; empty: there is no such token
    special: frozenset[int] = frozenset()  # tokens that are no text: ends, beginnings, marks of turns
    begin: int = NONE  # what a text begins with; `NONE`: nothing special
    ends: Sequence[int] = ()  # what may end it, the most usual one first

    def by_text(self) -> dict[bytes, int]:
        """Of several tokens with the same text the last one: SentencePiece's bytes come before its pieces."""
        return {text: token for token, text in enumerate(self.texts) if text}

    def ordinary(self) -> set[bytes]:
        return {text for token, text in enumerate(self.texts) if text and token not in self.special}


@dataclass(frozen=True)
class Translation:
    """From the vocabulary of the model that is served to its draft model's, and back."""

    # int32 [vocabulary of the model]: the draft model's token for each; 0 where it has none that is like it.
    of_target: Int32Array
    # int32 [vocabulary of the draft model]: the model's token for each; `NONE`: it has none.
    of_draft: Int32Array
    share: float  # of the smaller vocabulary's texts, special tokens aside: how many are tokens of both

    @classmethod
    def between(cls, target: VocabularyTexts, draft: VocabularyTexts) -> "Translation":
        ours, theirs = target.ordinary(), draft.ordinary()
        share = len(ours & theirs) / max(1, min(len(ours), len(theirs)))
        return cls(_given(target, draft), _meant(draft, target), share)

    def fitted(self, target_size: int, draft_size: int) -> "Translation":
        """For models of so many tokens: vocabularies are padded, and tokenizers may have more than their models."""
        of_target = _resized(self.of_target, target_size, 0)
        of_draft = _resized(self.of_draft, draft_size, NONE)
        return replace(
            self,
            of_target=np.where(of_target < draft_size, of_target, np.int32(0)),
            of_draft=np.where(of_draft < target_size, of_draft, np.int32(NONE)),
        )

    @cached_property
    def without(self) -> NDArray[np.bool_]:
        """bool [vocabulary of the draft model]: what the model has no token for."""
        found: NDArray[np.bool_] = self.of_draft == NONE
        return found

    @cached_property
    def _names(self) -> NDArray[np.int64]:
        """`of_draft`, where the model's vocabulary's size stands for no token; of what is no token, too."""
        none = len(self.of_target)
        return np.append(np.where(self.without, none, self.of_draft), none).astype(np.int64)

    @cached_property
    def _columns(self) -> NDArray[np.int64]:
        """Tokens of the draft model that stand for one of the model's, in the order of these."""
        shared = np.flatnonzero(~self.without)
        return shared[self.of_draft[shared].argsort(kind="stable")]

    def translated(self, logits: RowLogits) -> RowLogits:
        """The draft model's `logits`, as logits of the model's tokens. Candidates are to be collected without those of
        `without`; log-sum-exps stay those of all its tokens. Several of them may stand for one of the model's."""
        tokens, log_sums = logits.tokens.copy(), logits.log_sums.copy()
        tables = []
        for table in logits.tables:
            if table.ids is None:
                log_sums[table.rows] = table.scores.float().logsumexp(dim=-1).cpu().numpy()
                found = self._of_whole(table)
            else:
                found = self._of_candidates(table, table.ids)
            largest = found.scores.argmax(dim=-1).tolist()
            tokens[table.rows] = [found.token(at, column) for at, column in enumerate(largest)]
            tables.append(found)
        return replace(logits, tokens=tokens, log_sums=log_sums, tables=tables)

    def _of_candidates(self, table: RowTable, ids: NDArray[np.int64]) -> RowTable:
        names = self._names[ids]
        order = names.argsort(axis=1, kind="stable")
        names = np.take_along_axis(names, order, axis=1)
        scores = table.scores.gather(1, torch.from_numpy(order))
        scores.masked_fill_(torch.from_numpy(names == len(self.of_target)), -torch.inf)
        return RowTable(table.rows, scores, names, table.totals)

    def _of_whole(self, table: RowTable) -> RowTable:
        columns = torch.from_numpy(self._columns).to(table.scores.device)
        scores = table.scores.index_select(1, columns)
        return RowTable(table.rows, scores, np.broadcast_to(self._names[self._columns], scores.shape), table.totals)


def _given(target: VocabularyTexts, draft: VocabularyTexts) -> Int32Array:
    """The draft model's token for each of the model's."""
    tokens = draft.by_text()
    end = next(iter(draft.ends), NONE)
    found = np.zeros(len(target.texts), np.int32)
    for token, text in enumerate(target.texts):
        if (same := tokens.get(text)) is not None:
            found[token] = same
        elif token == target.begin and draft.begin != NONE:
            found[token] = draft.begin
        elif (token in target.special or token in target.ends) and end != NONE:
            found[token] = end
        else:
            found[token] = _ending_of(text, tokens)
    return found


def _ending_of(text: bytes, tokens: Mapping[bytes, int]) -> int:
    """The longest of `tokens` that `text` ends with; 0: there is none."""
    begins = range(max(0, len(text) - LONGEST_ENDING), len(text))
    return next((tokens[text[begin:]] for begin in begins if text[begin:] in tokens), 0)


def _meant(draft: VocabularyTexts, target: VocabularyTexts) -> Int32Array:
    """The model's token for each of the draft model's; `NONE` where there is none."""
    tokens = target.by_text()
    end = next(iter(target.ends), NONE)
    found = [tokens.get(text, NONE) for text in draft.texts]
    for token in draft.ends:
        if token < len(found) and found[token] == NONE:
            found[token] = end
    return np.array(found, np.int32)


def _resized(table: Int32Array, size: int, filler: int) -> Int32Array:
    found = np.full(size, filler, np.int32)
    found[: len(table)] = table[:size]
    return found
