"""What `ryzanstein models list --supported` shows, and what an error names as the nearest that is served."""

from collections.abc import Collection
from typing import get_args

import pytest
from transformers import CONFIG_MAPPING

from services.executor.core.layer_state import Kind
from services.executor.core.sharding import ShardLayout
from services.executor.model.catalogue import ENCODERS, SERVED, Architecture, check_supported, nearest
from services.executor.model.layer_states import (
    _HEADS,
    _RULES,
    INDEXED,
    LATENT,
    RECURRENT_MODULES,
    layer_states,
)
from services.executor.model.lowering import FAMILIES
from services.executor.model.parallel.plans import PLANS
from services.executor.model.supported import _STATES, catalogue, state_of
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of


@pytest.mark.parametrize("model_type", sorted(SERVED.keys() & _RULES))
def test_kinds_of_state_stand_in_what_is_shown(model_type: str) -> None:
    """A row of the catalogue says what state the architecture keeps, in words that `supported.py` knows."""
    name = next(name for name in ARCHITECTURES if name.partition("/")[0] == model_type)
    config = CONFIG_MAPPING[model_type](**settings_of(name))
    states = layer_states(config, ShardLayout.from_config(config, 1, 0))
    kinds = {state.kind for state in states}
    if any(state.kind == "indexed" and state.pages[0].parts == 2 for state in states):
        kinds.add("full")  # keys and values, among which an indexer chooses
    said = set(state_of(model_type, SERVED[model_type]))
    expected = kinds - {"hybrid"} | ({"full", "recurrent"} if "hybrid" in kinds else set())
    assert expected - {"full", "sliding", "none"} <= said
    assert ("full" in said) == bool(expected & {"full", "sliding", "chunked", "shared"})


def test_words_of_state() -> None:
    row = Architecture("", "", "Mamba 2, an indexer, attends within chunks")
    assert state_of("x", row) == ["full", "chunked", "indexed", "recurrent"]
    assert state_of("x", Architecture("", "", "latent attention, delta rule")) == ["latent", "recurrent"]
    assert state_of("mamba2", Architecture("", "", "Mamba 2")) == ["recurrent"]
    assert len(catalogue().served) == len(SERVED) + len(ENCODERS)


@pytest.mark.parametrize(
    ("wanted", "title"),
    [
        ("minimax_m9", "MiniMax"),
        ("Qwen4", "Qwen"),
        ("lama", "Llama"),
        ("wholly other", ""),
        ("rwkv9", "RWKV"),
    ],
)
def test_the_nearest_that_is_served(wanted: str, title: str) -> None:
    said = nearest(wanted)
    assert (title in said) if title else not said


def test_an_error_names_it() -> None:
    config = CONFIG_MAPPING["minimax_m2"]()
    config.is_encoder_decoder = True
    with pytest.raises(
        ModelLoadError, match=r"choose another model \(the nearest that is served: MiniMax M2,"
    ):
        check_supported(config)


def test_every_kind_of_state_is_found_in_the_catalogue() -> None:
    told = {"full", *(kind for kind, _ in _STATES)}
    assert told == set(get_args(Kind)) - {"hybrid", "none"}, "a hybrid layer is told by its parts"
    kept = {kind for row in catalogue().served for kind in row.state}
    assert kept == told


@pytest.mark.parametrize(
    "declared",
    [FAMILIES, _RULES, _HEADS, RECURRENT_MODULES, LATENT, INDEXED, PLANS],
    ids=["lowering", "states", "heads", "recurrent", "latent", "indexed", "plans"],
)
def test_what_is_declared_of_an_architecture_is_of_one_that_is_served(declared: Collection[str]) -> None:
    """A row that is taken out of the catalogue takes its declarations along."""
    assert not set(declared) - SERVED.keys() - ENCODERS.keys()
