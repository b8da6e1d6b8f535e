"""How wide an adapter may be, by the configuration alone: no narrower than what is trained."""

import pytest
from transformers import CONFIG_MAPPING

from services.executor.model.adapters.targets import whole_targets
from services.executor.model.card import adapter_widths
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of
from tests.unit.executor.model.lanes import TRAINED


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.partition("/")[0] in TRAINED])
def test_what_is_trained_is_no_wider(name: str) -> None:
    config = CONFIG_MAPPING[name.partition("/")[0]](**settings_of(name))
    widths = adapter_widths(config.to_diff_dict())
    of_names: dict[str, int] = {}
    for target in whole_targets(config):
        last = target.name.rpartition(".")[2]
        of_names[last] = of_names.get(last, 0) + target.inputs + target.outputs
    assert sum(of_names.values()) <= sum(widths.values())
    for last, width in of_names.items():
        assert width <= widths.get(last, sum(widths.values())), last


def test_llamas_linears_are_told_by_name() -> None:
    config = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536,
    }  # fmt: skip
    widths = adapter_widths(config)
    assert widths["q_proj"] == widths["o_proj"] == 30 * (576 + 576)
    assert widths["k_proj"] == 30 * (576 + 192)
    assert sum(widths.values()) * 16 == 4_884_480, "of SmolLM2 135M, rank 16"


def test_what_does_not_tell_has_none() -> None:
    assert adapter_widths({"hidden_size": 64}) == {}
