"""How each layer keeps its full KV blocks, by name: from the settings to one name per layer. Knows no torch.

--kv-dtype int8 --kv-dtype-layers "0=bf16,-1=bf16"     of 4 layers     bf16 int8 int8 bf16
"""

from collections.abc import Mapping
from typing import Literal, get_args

from shared.errors import ConfigurationError

BlockDType = Literal["bf16", "fp8", "int8"]
"""`bf16` means uncompressed: keys and values stay as the model computes them."""
KvDType = Literal["auto", "bf16", "fp8", "int8"]

_DTYPES: tuple[BlockDType, ...] = get_args(BlockDType)


def parse_layers(text: str) -> dict[int, BlockDType]:
    """`text`, like "0=bf16,-1=int8", as {layer: dtype}; negative layers count from the last.

    Raises ValueError with a phrase that says what is wrong.
    """
    layers: dict[int, BlockDType] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        number, _, name = (side.strip() for side in part.partition("="))
        dtype = next((dtype for dtype in _DTYPES if dtype == name), None)
        if dtype is None or not number.removeprefix("-").isdecimal():
            raise ValueError(f"{part!r} is not LAYER={'|'.join(_DTYPES)}, such as 0=bf16 or -1=bf16")
        if int(number) in layers:
            raise ValueError(f"layer {int(number)} is named twice")
        layers[int(number)] = dtype
    return layers


def layer_dtypes(
    default: BlockDType, overrides: Mapping[int, BlockDType], num_layers: int
) -> list[BlockDType]:
    """One name per layer. Raises `ConfigurationError` when an override names no layer of the model, or one twice."""
    dtypes: list[BlockDType] = [default] * num_layers
    named = set()
    for layer, dtype in overrides.items():
        if not -num_layers <= layer < num_layers:
            raise ConfigurationError(
                f"--kv-dtype-layers names layer {layer}, which the model does not have; choose 0 to "
                f"{num_layers - 1}, or -1 to -{num_layers} to count from the last."
            )
        if layer % num_layers in named:
            raise ConfigurationError(
                f"--kv-dtype-layers names layer {layer % num_layers} twice, once counted from the last; "
                "name it once."
            )
        named.add(layer % num_layers)
        dtypes[layer] = dtype
    return dtypes
