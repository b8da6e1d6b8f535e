"""Ratios of the native kernels by themselves: products in quantized weights against bf16, and long contexts.

What they come to differs by the level of instructions, so each kind of machine has its own record.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.engine.kv_decode import make_step
from benchmarks.engine.quantized import INPUTS, OUTPUTS, Products, formats
from benchmarks.engine.steps import BLOCK, decode_plan
from benchmarks.harness import CORES, timed
from benchmarks.regressions.measures import Pair, Rounds, ratios
from services.executor.native.library import RzModel, load_library

BATCH = 64  # rows of a product that the processor bounds, as in a step of so many sequences
KINDS = ("int8", "q8_0", "q6_k", "q4_k", "int4")
ONE_ROW = "q4_k"  # which memory bounds
SHORT, LONG = 1024, 32768  # tokens in the context of a decode


def kernels(model: Path, rounds: int, effort: int) -> Rounds:
    """`effort`: products and steps of a round are as many times 4."""
    if load_library() is None:
        return {}  # this machine has no native kernels
    return ratios([*_products(effort), *_attention(model, effort)], rounds)


def _products(effort: int) -> Iterator[Pair]:
    library = load_library()
    assert library is not None, "it was looked for"
    decoder = library.rz_decoder_new(ctypes.byref(RzModel()), CORES, None)
    with ThreadPoolExecutor(CORES) as pool:
        made = {
            name: Products(library, decoder, weight, pool)
            for name, weight in formats()
            if name == "bf16" or name in KINDS
        }
    for rows, kinds in ((BATCH, KINDS), (1, (ONE_ROW,))):
        x, out = torch.randn(rows, INPUTS).bfloat16(), torch.empty(rows, OUTPUTS)
        work = {name: _best_of(partial(one.seconds, x, out), effort) for name, one in made.items()}
        for name in kinds:
            what = f"{name} weights, speed of a product of {rows} {'rows' if rows > 1 else 'row'} against bf16"
            yield Pair(what, work[name], work["bf16"])
    x, out = torch.randn(BATCH, INPUTS).bfloat16(), torch.empty(BATCH, OUTPUTS)
    plain = torch.randn(OUTPUTS, INPUTS).bfloat16()
    yield Pair(
        f"bf16 weights, speed of a product of {BATCH} rows against PyTorch",
        _best_of(partial(made["bf16"].seconds, x, out), effort),
        _best_of(timed(lambda: functional.linear(x, plain)), effort),
    )


def _best_of(work: Callable[[], float], effort: int) -> Callable[[], float]:
    """Seconds of the best of several: others take the processor for a moment."""
    return lambda: min(work() for _ in range(4 * effort))


def _attention(model: Path, effort: int) -> Iterator[Pair]:
    step = make_step(model, "int8", CORES, LONG // BLOCK + 1)
    yield Pair(
        f"int8 blocks, time of a decode step at {LONG:,} tokens against {SHORT:,}",
        timed(partial(step, decode_plan(1, SHORT)), 4 * effort),
        timed(partial(step, decode_plan(1, LONG)), 4 * effort),
    )
