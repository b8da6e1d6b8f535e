"""What settings that are written as text mean: KV block formats per layer, drafts per step, slow steps. Free of torch.

--kv-dtype int8 --kv-dtype-layers "0=bf16,-1=bf16"     of 4 layers     bf16 int8 int8 bf16
--speculation auto                                     at most MOST_DRAFTS drafts per sequence and step
--slow-step 4x                                         steps that take 4 times as long as usual are logged
"""

import math
import re
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


MOST_DRAFTS = 15
"""For `auto`: with the sequence's own token 16, a KV block of the usual size. How many of them pay is decided for
each step."""
MOST_EVER = 63


def most_drafts(setting: str) -> int:
    """Drafts of one sequence at most. Raises ValueError with a phrase that says what is wrong."""
    if setting in ("auto", "off"):
        return MOST_DRAFTS if setting == "auto" else 0
    if not (setting.isascii() and setting.isdecimal() and int(setting) <= MOST_EVER):
        raise ValueError(f"{setting!r} is not auto, off or a number from 0 to {MOST_EVER}")
    return int(setting)


FACTOR = 4.0
"""How many times as long as usual, by default."""
LEAST = 0.25
"""Seconds: nobody misses less, however fast the ring is."""
INTERVAL = 5.0
"""Seconds in which one line pays back."""
BURST = 5
"""Lines that may follow each other at once."""

_SETTING = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>x|s|ms)", re.ASCII)


class SlowSteps:
    """Says of each step whether it was slow, and whether to log it."""

    def __init__(self, factor: float, seconds: float) -> None:
        """Slow is what takes `factor` times as long as expected and `LEAST`; or `seconds` (inf: never)."""
        self._factor = factor
        self._seconds = seconds
        self._lines = float(BURST)
        self._at = -math.inf
        self.suppressed = 0
        """Slow steps that were not logged since the last one that was."""

    @classmethod
    def of(cls, setting: str) -> "SlowSteps":
        """`auto`, `off`, a factor (`3x`) or a time (`0.5s`, `200ms`). Raises ValueError with a phrase that
        says what is wrong."""
        if setting == "off":
            return cls(math.inf, math.inf)
        if setting == "auto":
            return cls(FACTOR, math.inf)
        found = _SETTING.fullmatch(setting)
        number = float(found["number"]) if found else 0.0
        if found is None or number <= 0:
            raise ValueError(f"{setting!r} is not auto, off, a factor such as 4x or a time such as 0.5s")
        if found["unit"] == "x":
            return cls(number, math.inf)
        return cls(math.inf, number / 1000 if found["unit"] == "ms" else number)

    def is_slow(self, seconds: float, expected: float) -> bool:
        """`expected`: what such a step usually takes; 0: not known."""
        if seconds >= self._seconds:
            return True
        return expected > 0 and seconds >= max(LEAST, self._factor * expected)

    def may_log(self, now: float) -> bool:
        """Whether one more line is not too many, at `now` (monotonic seconds); those that are are counted."""
        self._lines = min(BURST, self._lines + max(0.0, now - self._at) / INTERVAL)
        self._at = now
        if self._lines < 1:
            self.suppressed += 1
            return False
        self._lines -= 1
        return True
