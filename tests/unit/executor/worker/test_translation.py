"""Tokens of two vocabularies that stand for the same text, and what is drawn from the logits of one as the other's."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.collectives.base import Collectives
from services.executor.core.sampling_state import SamplingState
from services.executor.sampling.candidates import RowLogits, collect
from services.executor.sampling.sampler import Sampler, wants_of
from services.executor.worker.drafting import vocabulary
from services.executor.worker.drafting.translation import LONGEST_ENDING, NONE, Translation, VocabularyTexts
from shared.messages import SamplingParams
from tests.unit.executor.model.ring import on_ring
from tests.unit.executor.worker.drafting_pairs import in_bytes, in_pieces, tokenizer_in

texts_ = st.lists(st.binary(max_size=3), min_size=1, max_size=40)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.9, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.7, seed=5),
    SamplingParams(temperature=0.7, min_p=0.1, top_k=30, seed=6),
]


@given(texts_, texts_)
def test_what_stands_for_the_same_text(ours: list[bytes], theirs: list[bytes]) -> None:
    found = Translation.between(VocabularyTexts(ours), VocabularyTexts(theirs))
    for text, token in zip(theirs, found.of_draft.tolist(), strict=True):
        assert (token == NONE) == (not text or text not in ours)
        assert token == NONE or ours[token] == text
    for text, token in zip(ours, found.of_target.tolist(), strict=True):
        ends = [end for end in set(theirs) if end and text.endswith(end)]
        assert theirs[token] == max(ends, key=len) if ends else token == 0
    both = (set(ours) & set(theirs)) - {b""}
    fewest = min(len(set(one) - {b""}) for one in (ours, theirs))
    assert found.share == (len(both) / fewest if fewest else 0)


def test_special_tokens_go_by_what_they_are_for() -> None:
    model = VocabularyTexts([b"<s>", b"<|end|>", b"<|turn|>", b"</s>", b" a", b"b"], frozenset({0, 1, 2, 3}), 0, [1, 3])
    draft = VocabularyTexts([b" a", b"<begin>", b"<stop>", b"</s>", b"<over>"], frozenset({1, 2, 3, 4}), 1, [2, 4])
    found = Translation.between(model, draft)
    assert found.of_target.tolist() == [1, 2, 2, 3, 0, 0]
    assert found.of_draft.tolist() == [4, NONE, 1, 3, 1]
    assert found.share == 1.0  # of one text
    without_ends = Translation.between(model, VocabularyTexts([b"x", b" a", b">"]))
    assert without_ends.of_target.tolist() == [2, 2, 2, 2, 1, 0]


def test_of_tokens_with_the_same_text_the_last_one_counts() -> None:
    found = Translation.between(VocabularyTexts([b"\n", b"a", b"\n"]), VocabularyTexts([b"\n", b"\n"]))
    assert found.of_target.tolist() == [1, 0, 1]
    assert found.of_draft.tolist() == [2, 2]


def test_ends_are_sought_in_the_last_bytes_alone() -> None:
    end = b"b" * LONGEST_ENDING
    found = Translation.between(
        VocabularyTexts([b"a" + end, b"a" + end + b"c"]), VocabularyTexts([b"c", end + b"c", end])
    )
    assert found.of_target.tolist() == [2, 0]


def test_tables_are_as_long_as_the_models() -> None:
    found = Translation.between(VocabularyTexts([b"a", b"b", b"c"]), VocabularyTexts([b"c", b"b", b"a"]))
    padded = found.fitted(5, 4)
    assert (padded.of_target.tolist(), padded.of_draft.tolist()) == ([2, 1, 0, 0, 0], [2, 1, 0, NONE])
    cut = found.fitted(2, 2)
    assert (cut.of_target.tolist(), cut.of_draft.tolist()) == ([0, 1], [NONE, 1])
    assert cut.without.tolist() == [True, False]


# --- draws ---------------------------------------------------------------------------------------


def gathered(logits: torch.Tensor, states: list[SamplingState], cuts: list[int], found: Translation) -> RowLogits:
    """What rank 0 gets of a draft model whose vocabulary is cut at `cuts`."""
    bounds = list(pairwise([0, *cuts, logits.shape[1]]))
    widths = [stop - start for start, stop in bounds]
    wants = wants_of(states, len(found.of_target))

    def work(collectives: Collectives) -> RowLogits | None:
        start, stop = bounds[collectives.rank]
        left_out = torch.from_numpy(np.flatnonzero(found.without[start:stop]))
        return collect(logits[:, start:stop].contiguous(), wants, collectives, widths, left_out=left_out)

    first, *_ = on_ring(len(widths), work)
    assert first is not None
    return first


@pytest.mark.parametrize("cuts", [[], [3, 20]])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), missing=st.integers(0, 25))
def test_draws_are_those_from_the_same_logits_in_the_models_order(cuts: list[int], seed: int, missing: int) -> None:
    """Every rank may be left without a token that counts."""
    chosen = np.random.default_rng(seed)
    theirs = chosen.permutation(30).tolist()
    ours = [token for token in range(40) if token not in theirs[:missing]]
    found = Translation.between(*(VocabularyTexts([b"%d." % token for token in one]) for one in (ours, theirs)))
    states = [SamplingState(params, (), ()).of_draft() for params in SAMPLINGS]
    logits = torch.from_numpy(chosen.integers(-9, 9, (len(states), 30)).astype(np.float32) / 4)
    as_ours = torch.full((len(states), len(ours)), -torch.inf)
    for token, of in enumerate(found.of_draft.tolist()):
        if of != NONE:
            as_ours[:, of] = logits[:, token]
    sampler = Sampler()
    drawn = sampler.sample(found.translated(gathered(logits, states, cuts, found)), states)
    assert [one.token for one in drawn] == [one.token for one in sampler.sample(as_ours, states)]
    every = logits.log_softmax(dim=-1)
    for row, one in enumerate(drawn):
        assert one.logprobs is not None
        given_ = float(every[row, found.of_target[one.token]])
        assert one.logprobs.logprob == pytest.approx(given_, abs=1e-5)


# --- tokenizers' files ---------------------------------------------------------------------------


def test_spellings_do_not_matter(tmp_path: Path) -> None:
    words = [" the", "\n", "naïve", "日", " ", "a\tb"]
    ours = tokenizer_in(tmp_path / "pieces", in_pieces(["<unk>", *words]), bos_token_id=8, eos_token_id=[7])
    theirs = tokenizer_in(tmp_path / "bytes", in_bytes([*words[::-1], "other"]), bos_token_id=None)
    (theirs / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    found = vocabulary.translation_of(ours, theirs)
    assert found.of_draft[:7].tolist() == [6, 5, 4, 3, 2, 1, NONE]
    assert found.of_target[1:7].tolist() == [5, 4, 3, 2, 1, 0]
    assert found.share == pytest.approx(6 / 7)
    assert vocabulary.translation_of(ours, ours) is None


def test_byte_tokens_and_gaps(tmp_path: Path) -> None:
    """SentencePiece has tokens for bytes; a number without an entry is no token."""
    names = ["<0x0A>", "<0xE6>", *in_pieces([" a", " b"])]
    ours = tokenizer_in(tmp_path / "pieces", names)
    theirs = tokenizer_in(tmp_path / "bytes", ["æ", *in_bytes(["\n", " b", " a", "c"])])
    file = json.loads((theirs / "tokenizer.json").read_text())
    file["added_tokens"] = []
    del file["model"]["vocab"][in_bytes([" b"])[0]]
    (theirs / "tokenizer.json").write_text(json.dumps(file))
    found = vocabulary.translation_of(ours, theirs)
    assert found.of_target[:4].tolist() == [1, 0, 3, 0]
    assert found.of_draft[:4].tolist() == [1, 0, NONE, 2]
