"""Which cases of a test over many models `make test` runs: one of each style and kind of state. The others are
variants of these, and slow: `make test-slow` and CI run them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

STYLES = {
    "llama",  # keys and values of each layer, norms before it
    "phi3",  # weights that lie together in a checkpoint
    "gpt_oss",  # experts, windows, sinks of attention
    "ernie4_5_moe",  # rotary halves interleaved, experts beside shared ones
    "flex_olmo",  # norms behind a layer, over all of its heads
    "hunyuan_v1_moe",  # norms behind the rotation
    "gemma4_text",  # norms on both sides, heads of two sizes, layers that read another's keys
    "deepseek_v3",  # latent keys and values, experts scored by a sigmoid
    "qwen3_5_text",  # a recurrent state (delta rule) beside attention
    "granitemoehybrid",  # a state space beside attention
}


def in_lanes(cases: Iterable[Any], fast: Callable[..., bool] = STYLES.__contains__) -> list[Any]:
    """pytest's parameters: each case for which `fast` is false is slow. Cases of several values are tuples."""
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=[] if fast(*values) else [pytest.mark.slow]))
    return parameters
