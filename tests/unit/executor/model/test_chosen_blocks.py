"""Attention to chosen blocks beyond what test_architectures.py shows of it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.layer_state import page_layers
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache.codecs import INT8
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.worker.runner import ModelRunner, widths_of
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script, make_runner
from tests.unit.executor.model.tiny import build

NAME = "minimax_m3_vl_text"
LENGTH = 34


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(NAME)
    build(NAME, settings_of(NAME)).save_pretrained(str(made))
    return made


def last_logits(directory: Path, chunks: list[int]) -> Tensor:
    """Of the last token of a text that is computed in `chunks`, over blocks that are compressed as they fill."""
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, torch.float32, layout, SingleRank(), CPU, lambda done, total: None)
    pages = page_layers(layer_states(config, layout))
    shape = StoreShape(BLOCK_SIZE, torch.float32, pages, (INT8,) * len(pages))
    store = KvStore(shape, NUM_BLOCKS, CPU, NUM_BLOCKS)
    runner = ModelRunner(model, widths_of(model), store, SingleRank(), CPU)
    script = Script([LENGTH], compresses=True)
    for chunk in chunks:
        logits = runner.forward(script.step({0: chunk})[0])
    assert isinstance(logits, Tensor)
    return logits[-1]


def test_blocks_are_of_positions_whatever_form_their_keys_have(directory: Path) -> None:
    """A chunk has those of its own blocks that it fills among its keys twice, as written and compressed."""
    alone = last_logits(directory, [1] * LENGTH)
    assert (last_logits(directory, [14, 15, 5]) - alone).abs().max() < 1e-4
    assert (last_logits(directory, [LENGTH]) - alone).abs().max() < 1e-4


def test_an_indexer_without_a_head_for_each_kv_head_is_refused(tmp_path: Path) -> None:
    build(NAME, {**settings_of(NAME), "index_n_heads": 2, "num_attention_heads": 6}).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="2 heads for 3 KV heads"):
        make_runner(tmp_path, SingleRank())
