"""The kernels that sample."""

from collections.abc import Iterator
from itertools import product

import torch

from benchmarks.on_gpu.compiled_kernels.launched import Compiled, Launched, compile_launched, launches, meta
from services.executor.gpu.kernels import sampling

MOST_BY_LOGIT = 1024
LOGIT_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def draw(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Launches the draws of `rows`, of which some have top-k and some top-p."""
    space = sampling.space_for(256, vocabulary, torch.device("meta"))
    largest, params = (
        meta(rows, dtype=torch.float32),
        meta(sampling.NUM_PARAMS * rows, dtype=torch.float64),
    )
    tokens = meta(rows, dtype=torch.int64)
    logits = meta(rows, vocabulary, dtype=dtype)
    sampling.draw(logits, largest, params, tokens, space, MOST_BY_LOGIT, top_k=True, top_p=True)


def named(launched: Launched) -> str:
    """`launched` by what it does."""
    weights = launched.values().get("WEIGHTS")
    if weights is None:
        return launched.name
    return f"{launched.name} {'weights' if weights else 'counts'}"


def sampling_kernels(every: bool) -> Iterator[Compiled]:
    """What serving uses; or some of it."""
    cases = [(16, 128_256, torch.bfloat16)]
    if every:
        cases += list(product((1, 5, 256), (100, 4096, 4097, 32_000, 152_064), LOGIT_TYPES))
    seen: list[Launched] = []
    for rows, vocabulary, dtype in cases:
        for launched in launches(lambda: draw(rows, vocabulary, dtype)):  # noqa: B023  # called at once
            if launched not in seen:
                seen.append(launched)
                yield compile_launched(f"{named(launched)} {rows} x {vocabulary} {LOGIT_TYPES[dtype]}", launched)
