"""Families of models: each can be taken out of the list, and the rest is served as ever."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from services.executor.core.sharding import ShardLayout
from services.executor.families import registry
from services.executor.families.gguf_architectures import GGUF
from services.executor.families.registry import DECODERS, ENCODERS, family_of
from services.executor.model.catalogue import TEXT_ALONE, check_supported, nearest
from services.executor.model.layer_states import layer_states
from services.executor.model.parallel import feed_forward, module_patches
from services.executor.model.parallel.plans import plan_for
from services.executor.model.states.catalog import STATE_KINDS
from services.executor.model.supported import catalogue
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    """A tiny configuration of each decoder's type; of none that takes more than text."""
    names = {name.partition("/")[0]: name for name in reversed(ARCHITECTURES)}
    texts = (kind for kind in DECODERS if kind not in TEXT_ALONE)
    return {kind: CONFIG_MAPPING[kind](**settings_of(names[kind])) for kind in texts}


def served(configs: dict[str, Any]) -> Iterator[str]:
    """Types whose configurations are accepted, and say what layers keep and how they are split."""
    for model_type, config in configs.items():
        if model_type not in DECODERS:
            with pytest.raises(ModelLoadError, match=rf"its architecture '{model_type}' .*; choose another model.*\.$"):
                check_supported(config)
            continue
        check_supported(config)
        assert len(layer_states(config, ShardLayout.from_config(config, 1, 0))) > 0
        plan_for(config)
        yield model_type


@pytest.mark.parametrize("left_out", ["llama", "bloom", "deepseek_v3", "gpt_oss", "mamba2", "qwen3_5_text", "zamba2"])
def test_without_one_family_the_rest_is_served(
    left_out: str, configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each list, and of each way to be unlike Llama."""
    everything = set(served(configs))
    assert everything == set(configs)
    monkeypatch.delitem(DECODERS, left_out)
    assert set(served(configs)) == everything - {left_out}
    assert left_out not in {row.model_type for row in catalogue().served}
    assert f"{left_out!r}" not in nearest(left_out)


@pytest.mark.parametrize("left_out", ENCODERS)
def test_without_one_encoder_the_rest_is_served(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ENCODERS, left_out)
    for model_type in [left_out, *ENCODERS]:
        refused = model_type == left_out
        try:
            check_supported(CONFIG_MAPPING[model_type]())
        except ModelLoadError:
            assert refused
        else:
            assert not refused


def test_each_type_stands_in_one_list() -> None:
    lists = [family.model_type for one in registry.LISTS for family in one.FAMILIES]
    assert len(lists) == len(set(lists)) == len(DECODERS)
    assert not DECODERS.keys() & ENCODERS


def test_what_families_name_is_computed() -> None:
    """A name that no module has would fail when the model is loaded; one that no family has computes nothing."""
    families = DECODERS.values()
    assert {family.states for family in families} == {"attention", *(kind.name for kind in STATE_KINDS)}
    assert {family.own_attention for family in families} - {""} == set(module_patches._FORWARDS)
    assert {family.own_feed_forward for family in families} - {""} == set(feed_forward._ADAPTED)
    assert family_of("emu3_text_model") is DECODERS["emu3"]
    assert not family_of("never heard of").row


def test_what_files_hold_is_a_family() -> None:
    rows = [row for one in GGUF.values() for row in (one, *one.variants.values())]
    assert {row.config_type() for row in rows} <= {*DECODERS, *ENCODERS}
    assert {name for row in rows for name in row.written} <= set(DECODERS)
    written = [name for row in rows for name in row.written]
    assert len(written) == len(set(written))
