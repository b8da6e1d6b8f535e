"""What layers keep, by configuration, and how their heads are split."""

import pytest
from transformers import CONFIG_MAPPING

from services.executor.core.layer_state import Pages, described, page_layers
from services.executor.core.sharding import ShardLayout
from services.executor.model.layer_states import layer_states
from services.executor.model.states.base import layer_layouts
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import settings_of


def test_heads_and_widths_may_differ_between_layers() -> None:
    config = CONFIG_MAPPING["mimo_v2_flash"](**settings_of("mimo_v2_flash"))
    for rank in range(2):
        layout = ShardLayout.from_config(config, 2, rank)
        assert page_layers(layer_states(config, layout)) == (Pages(2, 3, 12), Pages(2, 2, 12))
        assert [of.value_dim for of in layer_layouts(config, layout)] == [8, 8]


def test_heads_of_a_layer_that_do_not_group_evenly_are_refused() -> None:
    settings = {**settings_of("laguna"), "num_attention_heads_per_layer": [6, 4]}
    config = CONFIG_MAPPING["laguna"](**settings)
    with pytest.raises(ModelLoadError, match="4 attention heads over 3 KV heads"):
        layer_layouts(config, ShardLayout.from_config(config, 1, 0))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma3_text", "1 sliding (2x3x8), 1 full (2x3x8)"),
        ("deepseek_v32", "3 indexed (1x1x20 and 1x1x12)"),
        ("gemma3n_text", "2 sliding (2x3x8), 2 full (2x3x8), 2 shared"),
        ("qwen3_5_text", "2 recurrent (slot of 936 values), 1 full (2x3x8)"),
        ("zaya", "2 hybrid (2x3x8 and slot of 228 values)"),
    ],
)
def test_what_layers_keep_is_described(name: str, text: str) -> None:
    config = CONFIG_MAPPING[name](**settings_of(name))
    assert described(layer_states(config, ShardLayout.from_config(config, 1, 0))) == text
