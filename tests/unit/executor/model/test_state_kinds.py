"""Kinds of state: each can be taken out of the list, and models of the others serve as ever; what layers keep, and how
their heads are split."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from services.executor.collectives.base import SingleRank
from services.executor.core.layer_state import LayerStates, Pages, described, page_layers
from services.executor.core.sharding import ShardLayout
from services.executor.families.registry import DECODERS
from services.executor.model.catalogue import check_supported
from services.executor.model.layer_states import layer_states
from services.executor.model.states import catalog
from services.executor.model.states.base import StateKind, layer_layouts
from services.executor.model.states.catalog import STATE_KINDS
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of
from tests.unit.executor.model.ring import make_runner, mixed_script
from tests.unit.executor.model.tiny import reference_logits

STATES = {name: family.states for name, family in DECODERS.items() if family.states != "attention"}


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    """Of each family that keeps other state, and one that does not."""
    names = {name.partition("/")[0]: name for name in reversed(ARCHITECTURES)}
    return {of: CONFIG_MAPPING[of](**settings_of(names[of])) for of in ("llama", *STATES)}


def states_of(config: Any) -> LayerStates:
    return layer_states(config, ShardLayout.from_config(config, 1, 0))


@pytest.mark.parametrize("left_out", STATE_KINDS, ids=lambda kind: kind.name)
def test_without_one_kind_the_others_are_served(
    left_out: StateKind, configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: states_of(config) for name, config in configs.items()}
    monkeypatch.setattr(catalog, "STATE_KINDS", tuple(kind for kind in STATE_KINDS if kind is not left_out))
    own = {name for name, states in STATES.items() if states == left_out.name}
    assert own, "no family keeps it"
    for name in own:
        with pytest.raises(ModelLoadError, match=f"keep {left_out.name} state"):
            states_of(configs[name])
        with pytest.raises(ModelLoadError, match=f"keep {left_out.name} state"):
            check_supported(configs[name])
    for name in configs.keys() - own:
        assert states_of(configs[name]) == expected[name]
        check_supported(configs[name])


def test_without_any_kind_attention_is_computed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STATE_KINDS", ())
    script, steps = mixed_script()
    runner, expected = make_runner(llama, SingleRank()), reference_logits(llama, script.sequences)
    for plan, rows in steps:
        computed = runner.forward(plan)
        for row, (sequence, position) in enumerate(rows):
            assert (computed[row] - expected[sequence][position]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", STATE_KINDS, ids=lambda kind: kind.name)
def test_what_a_kind_names_is_there(kind: StateKind) -> None:
    named = [kind.attention, kind.mixer, *kind.splits.values(), *kind.lowered.values()]
    assert all(callable(resolve_name(name)) for name in named if name)
    families = [family for family in DECODERS.values() if family.states == kind.name]
    assert {family.mixer for family in families if family.recurrent_modules} == set(kind.splits)


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
