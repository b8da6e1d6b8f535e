"""Which cases of a test over many models run when: `make test` one of each style and kind of state, CI (slow) every
type once, and `make test-nightly` the other variants of these.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from services.executor.families.registry import DECODERS
from services.executor.native.library import why_not

natively = pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")

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

LOWERED = sorted(name for name, family in DECODERS.items() if family.lowered)
TRAINED = sorted(name for name, family in DECODERS.items() if family.trained)


def in_lanes(cases: Iterable[Any], fast: Collection[Any] = STYLES, slow: Collection[Any] | None = None) -> list[Any]:
    """pytest's parameters: each case is fast, or slow (where None: all others), or nightly. Cases of several values are
    tuples."""
    parameters = []
    for case in cases:
        later = pytest.mark.slow if slow is None or case in slow else pytest.mark.nightly
        values = case if type(case) is tuple else (case,)
        parameters.append(pytest.param(*values, marks=[] if case in fast else [later]))
    return parameters


def in_rings(names: Collection[str], fast: Collection[str], slow: Collection[tuple[str, int]]) -> list[Any]:
    """The same of each model with 1, 2 and 3 ranks: with one fast or slow, `slow` rings slow, all others nightly."""
    cases = [(name, ranks) for ranks in (1, 2, 3) for name in names]
    return in_lanes(cases, [(name, 1) for name in fast], [*((name, 1) for name in names), *slow])
