"""What `ryzanstein models list --supported` shows, and what an error names as the nearest that is served."""

import pytest
from transformers import CONFIG_MAPPING

from services.executor.core.sharding import ShardLayout
from services.executor.families.family import ModelFamily
from services.executor.families.registry import DECODERS, ENCODERS
from services.executor.model.catalogue import check_supported, nearest
from services.executor.model.layer_states import layer_states
from services.executor.model.states.catalog import STATE_KINDS
from services.executor.model.supported import catalogue, state_of
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of


@pytest.mark.parametrize(
    "model_type", sorted(name for name, family in DECODERS.items() if family.states != "attention")
)
def test_kinds_of_state_stand_in_what_is_shown(model_type: str) -> None:
    """A row of the catalogue says what state the architecture keeps, in words that `supported.py` knows."""
    name = next(name for name in ARCHITECTURES if name.partition("/")[0] == model_type)
    config = CONFIG_MAPPING[model_type](**settings_of(name))
    states = layer_states(config, ShardLayout.from_config(config, 1, 0))
    kinds = {state.kind for state in states}
    if any(state.kind == "indexed" and state.pages[0].parts == 2 for state in states):
        kinds.add("full")  # keys and values, among which an indexer chooses
    said = set(state_of(DECODERS[model_type]))
    expected = kinds - {"hybrid"} | ({"full", "recurrent"} if "hybrid" in kinds else set())
    assert expected - {"full", "sliding", "none"} <= said
    assert ("full" in said) == bool(expected & {"full", "sliding", "chunked", "shared"})


def test_words_of_state() -> None:
    row = "x |  |  | Mamba 2, an indexer, attends within chunks"
    assert state_of(ModelFamily(row)) == ["full", "chunked", "indexed", "recurrent"]
    assert state_of(ModelFamily("x |  |  | latent attention, delta rule")) == ["latent", "recurrent"]
    assert state_of(DECODERS["mamba2"]) == ["recurrent"]
    assert len(catalogue().served) == len(DECODERS) + len(ENCODERS)


@pytest.mark.parametrize(
    ("wanted", "title"),
    [("minimax_m9", "MiniMax"), ("Qwen4", "Qwen"), ("lama", "Llama"), ("wholly other", ""), ("rwkv9", "RWKV")],
)
def test_the_nearest_that_is_served(wanted: str, title: str) -> None:
    said = nearest(wanted)
    assert (title in said) if title else not said


def test_an_error_names_it() -> None:
    config = CONFIG_MAPPING["minimax_m2"]()
    config.is_encoder_decoder = True
    with pytest.raises(ModelLoadError, match=r"choose another model \(the nearest that is served: MiniMax M2,"):
        check_supported(config)


def test_every_kind_of_state_is_found_in_the_catalogue() -> None:
    told = {"full", "sliding", *(state for kind in STATE_KINDS for state in kind.shown)}
    kept = {kind for row in catalogue().served for kind in row.state}
    assert kept == told
