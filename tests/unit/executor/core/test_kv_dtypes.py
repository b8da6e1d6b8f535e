import pytest

from services.executor.core.settings import ExecutorSettings, layer_dtypes, parse_layers
from shared.config import load_settings
from shared.errors import ConfigurationError


def test_layers_that_differ() -> None:
    assert parse_layers("") == {}
    layers = parse_layers(" 0=bf16, -1 = fp8 ,")
    assert layers == {0: "bf16", -1: "fp8"}
    assert layer_dtypes("int8", layers, 4) == ["bf16", "int8", "int8", "fp8"]
    assert layer_dtypes("fp8", {}, 2) == ["fp8", "fp8"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bf16", "'bf16' is not LAYER="),
        ("0=int4", "'0=int4' is not LAYER="),
        ("0=auto", "is not LAYER="),
        ("--1=fp8", "is not LAYER="),
        ("one=fp8", "is not LAYER="),
        ("1=fp8,1=bf16", "layer 1 is named twice"),
    ],
)
def test_settings_refuse_what_names_no_layer(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"KV_DTYPE_LAYERS.*{reason}"):
        load_settings(ExecutorSettings, kv_dtype_layers=text)


def test_settings_refuse_an_unknown_dtype() -> None:
    with pytest.raises(ConfigurationError, match=r"RYZANSTEIN_KV_DTYPE \(or --kv-dtype\) is wrong"):
        load_settings(ExecutorSettings, kv_dtype="int4")


@pytest.mark.parametrize("layer", [4, -5])
def test_layers_that_the_model_has_not(layer: int) -> None:
    with pytest.raises(ConfigurationError, match=f"names layer {layer}, which the model does not have; .* 0 to 3"):
        layer_dtypes("int8", {layer: "bf16"}, 4)


def test_one_layer_by_two_names() -> None:
    with pytest.raises(ConfigurationError, match="names layer 3 twice"):
        layer_dtypes("int8", {3: "bf16", -1: "fp8"}, 4)
