"""Sampling where only some tokens may follow: as if the others did not exist, but for the log probabilities."""

from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.executor.core.engine import GrammarFailed
from services.executor.core.sampling_state import SamplingState
from services.executor.sampling.sampler import Sampler, wants_of
from services.executor.structured_output import GrammarState
from shared.errors import InvalidGrammar
from shared.messages import SamplingParams
from tests.unit.executor.sampling.test_sampling import DEVICES, VOCAB, logits_of, state


class Mask:
    """Stands in for a `GrammarState`."""

    def __init__(self, allowed: NDArray[np.bool_] | None) -> None:
        self._allowed = allowed

    def allowed(self) -> NDArray[np.bool_]:
        if self._allowed is None:
            raise InvalidGrammar("Nothing fits.")
        return self._allowed


def masked(sampling: SamplingState, allowed: NDArray[np.bool_] | None) -> SamplingState:
    sampling.grammar = cast(GrammarState, Mask(allowed))
    return sampling


def masks_of_seed(seed: int, rows: int) -> NDArray[np.bool_]:
    masks = np.random.default_rng(seed).random((rows, VOCAB)) < 0.3
    masks[:, seed % VOCAB] = True
    return masks


PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {3: 5.0, 4: -5.0}},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2, "presence_penalty": 0.7},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.7, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_what_follows_is_chosen_among_what_may(params: dict[str, object], device: str) -> None:
    """The same draw as from logits in which the others are out of reach."""
    for seed in range(12):
        logits, masks = logits_of(seed, 3).to(device), masks_of_seed(seed, 3)
        given = [masked(state([1, 2, 3], [3, 4, 4], seed=seed + row, **params), masks[row]) for row in range(3)]
        plain = [state([1, 2, 3], [3, 4, 4], seed=seed + row, **params) for row in range(3)]
        without = logits.masked_fill(torch.from_numpy(~masks).to(device), -1e9)
        drawn = Sampler().sample(logits, given)
        assert [each.token for each in drawn] == [each.token for each in Sampler().sample(without, plain)]
        assert all(masks[row, each.token] for row, each in enumerate(drawn))


def test_rows_without_a_grammar_are_what_they_are_alone() -> None:
    """They keep asking for as little as they need, too."""
    logits, masks = logits_of(5, 4), masks_of_seed(5, 4)
    kinds: list[dict[str, object]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4, "seed": 9}]
    mixed = [
        state(**kinds[0]),
        masked(state(**kinds[0]), masks[1]),
        state(**kinds[1]),
        masked(state(**kinds[1]), masks[3]),
    ]
    assert wants_of(mixed, VOCAB)["count"].tolist() == [1, 0, 4, 0]
    assert wants_of(mixed, VOCAB)["margin"].tolist() == [0, 0, 0, 0]
    tokens = [each.token for each in Sampler().sample(logits, mixed)]
    alone = [Sampler().sample(logits[row : row + 1], [state(**kinds[row // 2])])[0].token for row in (0, 2)]
    assert [tokens[0], tokens[2]] == alone


def test_log_probabilities_are_the_models_own() -> None:
    logits, masks = logits_of(7), masks_of_seed(7, 1)
    of_model = logits[0].log_softmax(dim=-1)
    masks[0, int(of_model.argmax())] = False
    [drawn] = Sampler().sample(logits, [masked(state(temperature=0.0, logprobs=2), masks[0])])
    assert drawn.logprobs.logprob == pytest.approx(float(of_model[drawn.token]), abs=1e-5)
    assert drawn.logprobs.top[0][1] == pytest.approx(float(of_model.max()), abs=1e-5)
    assert not masks[0, drawn.logprobs.top[0][0]], "what the model would have said, although it may not"


def test_rows_that_nothing_may_follow_are_named() -> None:
    states = [state(), masked(state(), None), masked(state(), np.ones(VOCAB, np.bool_)), masked(state(), None)]
    with pytest.raises(GrammarFailed, match=r"Nothing fits\.") as caught:
        Sampler().sample(logits_of(1, 4), states)
    assert caught.value.rows == [1, 3]


def test_parameters_and_grammar_go_with_the_state() -> None:
    advanced: list[int] = []

    class Seen(Mask):
        def advance(self, token: int) -> None:
            advanced.append(token)

    sampling = SamplingState(SamplingParams(), [1], [])
    sampling.grammar = cast(GrammarState, Seen(None))
    sampling.advance(7)
    assert advanced == [7]
