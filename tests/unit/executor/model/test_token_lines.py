"""Lines of several tokens in KV blocks, whatever blocks and steps they are cut by."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from services.executor.collectives.base import SingleRank
from services.executor.core.layer_state import Pages, page_layers
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.store import KvStore
from services.executor.model.layer_states import layer_states
from shared.data_types import BlockDType
from shared.errors import ConfigurationError, ModelLoadError
from tests.docs.models import PROVEN_ERROR
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import CPU, NUM_BLOCKS, Script, make_runner
from tests.unit.executor.model.tiny import build, logits_of

NAME = "deepseek_v4"
LENGTH = 37
CUTS = ([37], [1] * 37, [5, 12, 1, 19], [16, 16, 5])  # tokens of each step of a sequence


@pytest.fixture(scope="module", params=in_lanes([NAME, "qwen4_exp_text"], [NAME]))
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A saved model, and transformers' logits of the text."""
    model = build(request.param, settings_of(request.param))
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(str(directory))
    return directory, logits_of(model, Script([LENGTH]).sequences)[0]


def in_cuts(directory: Path, full_blocks: BlockDType) -> Iterator[torch.Tensor]:
    """The logits [tokens, vocab] of the text, for each way to cut it."""
    for cut in CUTS:
        runner, script = (
            make_runner(directory, SingleRank(), kv_dtype=full_blocks, num_quantized=NUM_BLOCKS),
            Script([LENGTH], compresses=True),
        )
        rows = [runner.forward(script.step({0: tokens}, every_token=True)[0]) for tokens in cut]
        yield torch.cat([part for part in rows if part is not None])


def test_full_blocks_may_be_copied_to_other_ids(proof: tuple[Path, torch.Tensor]) -> None:
    directory, expected = proof
    for logits in in_cuts(directory, "bf16"):
        assert (logits - expected).abs().max() < PROVEN_ERROR


def test_what_a_row_reads_of_compressed_blocks_follows_from_its_position(proof: tuple[Path, torch.Tensor]) -> None:
    directory, expected = proof
    first, *others = in_cuts(directory, "int8")
    assert (first - expected).abs().max() > PROVEN_ERROR, "int8 rounds"
    for logits in others:
        assert (logits - first).abs().max() < PROVEN_ERROR


def test_a_line_stands_in_the_block_of_its_last_token() -> None:
    config = CONFIG_MAPPING[NAME](**settings_of(NAME))
    states = layer_states(config, ShardLayout.from_config(config, 1, 0))
    assert page_layers(states) == (
        Pages(1, 1, 12, 2),
        Pages(1, 1, 14, 2),
        Pages(1, 1, 12, 8),
        Pages(1, 1, 12, 2),
        Pages(1, 1, 14, 2),
    )
    store = KvStore(store_shape(ExecutorSettings(block_size=4), "bf16", states, torch.float32), 6, CPU, num_slots=1)
    slots = torch.tensor([5 * 4 + 3, 2 * 4 + 1])
    lines = torch.arange(24, dtype=torch.float32).view(2, 1, 12)
    for layer in (0, 2):
        store.write(layer, slots, lines)
    assert store.writable(0)[5, 0, 0].tolist() == [[0.0] * 12, lines[0, 0].tolist()]
    assert store.writable(0)[2, 0, 0, 0].tolist() == lines[1, 0].tolist()
    assert store.writable(2)[5, 0, 0].tolist() == [lines[0, 0].tolist()]


def test_blocks_that_lines_do_not_fit_are_refused() -> None:
    config = CONFIG_MAPPING[NAME](**settings_of(NAME))
    states = layer_states(config, ShardLayout.from_config(config, 1, 0))
    with pytest.raises(ConfigurationError, match="one line for every 8 tokens"):
        store_shape(ExecutorSettings(block_size=6), "bf16", states, torch.float32)


def test_groups_that_cut_heads_are_refused(tmp_path: Path) -> None:
    build(NAME, {**settings_of(NAME), "o_groups": 4}).save_pretrained(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"10 attention heads do not make the 4 groups"):
        make_runner(tmp_path, SingleRank())
