"""Which tokens an indexer chooses."""

import numpy as np
import pytest
import torch

from services.executor.core.layer_state import Pages, page_layers, page_of
from services.executor.core.sharding import ShardLayout
from services.executor.model import indexing
from services.executor.model.indexing import chosen
from services.executor.model.layer_states import layer_states
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.tiny import CONFIG_MAPPING


def test_the_highest_are_chosen_and_of_those_that_tie_the_first() -> None:
    scores = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0, 9.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    hidden = torch.tensor([[False] * 5 + [True]] * 2)
    assert chosen(scores, hidden, 3).int().tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]]


def test_all_that_is_seen_is_chosen_where_that_is_less() -> None:
    hidden = torch.tensor([[False, False, True, True, True]])
    assert (chosen(torch.randn(1, 5), hidden, 3) & ~hidden).int().tolist() == [[1, 1, 0, 0, 0]]


def test_what_is_hidden_may_be_no_number() -> None:
    """Blocks that are not full hold whatever was there."""
    scores = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    hidden = torch.tensor([[False, False, False, True]])
    assert chosen(scores, hidden, 2).int().tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1] * 5), (2 * 12 * 4, [2, 2, 1]), (1 << 20, [5])])
def test_long_contexts_are_scored_a_few_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(indexing, "_CPU_BYTES", limit)
    pieces = list(indexing._pieces(5, 12, torch.device("cpu")))
    assert [piece.stop - piece.start for piece in pieces] == sizes
    assert np.concatenate([np.arange(5)[piece] for piece in pieces]).tolist() == [0, 1, 2, 3, 4]


def test_layers_without_an_indexer_keep_no_keys_of_one() -> None:
    config = CONFIG_MAPPING["glm_moe_dsa"](**settings_of("glm_moe_dsa"))
    states = layer_states(config, ShardLayout.from_config(config, 3, 1))
    line, key = Pages(1, 1, 20), Pages(1, 1, 12)
    assert page_layers(states) == (line, key, line, line, key)
    assert [page_of(states, layer) for layer in range(3)] == [0, 2, 3]
