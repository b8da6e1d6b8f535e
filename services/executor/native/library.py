"""The compiled kernels, as ctypes sees them.

The library is an extension module by its build (setuptools compiles it) and a plain shared library by
its use: it knows nothing of Python. The structures below mirror `decoder.h`, field by field.

It has the kernels once for each level of instructions of its architecture (`levels/`), over the same layouts:

    x86-64   avx2    avxvnni    avx512vnni    avx512bf16    amx
    Arm      neon    neonbf16

A process computes at the best one that its processor runs and that proves itself (`proof.c`), or at the one that it
was told to.
"""

import ctypes
import importlib.util
import itertools
import os
from ctypes import POINTER, c_float, c_int, c_int8, c_int32, c_int64, c_long, c_size_t, c_uint16, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog

from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)

MODULE = "services.executor.native._kernels"
ROTARIES = 2
HEADS = 2
MODULES = 4  # that are joined in a linear, at most
DISABLE = "RYZANSTEIN_NATIVE_KERNELS"  # environment variable; `0` turns the kernels off
LEVEL = "RYZANSTEIN_CPU_LEVEL"  # environment variable: the level where `choose_level` was told none
# Raised by a release whose kernels compute other bits of the same model (`test_levels.py` tells), so that its rings
# have fingerprints of their own and continue no texts of the release before as if nothing had changed. 2: attention
# multiplies int8 codes as integers; 8: all before a row's own block. 3: activations share a scale over what an upper
# one of the weight's covers. 4: sums of attention over bf16 keys are scaled by the kernels' own exponentials. 5: these
# are of another polynomial. 6: tokens are drawn by them. 7: AMX sums rows of fp8 before it scales them.
ARITHMETIC = 8

# What a step's time is spent on, as `decoder.h` numbers it.
PARTS = (
    "embed",
    "norm",
    "qkv",
    "place",
    "attend",
    "output",
    "gate_up",
    "down",
    "head",
    "sum",
    "convolve",
    "recur",
    "input",
)


def _each(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one kind, one after the other."""
    return [(name, kind) for name in names.split()]


class RzFormat(ctypes.Structure):
    _fields_ = [
        *_each(c_int32, "bits columns group per scale_type super_type minimums offset has_table"),
        ("table", c_int8 * 16),
        ("floats", c_int32),
        ("float_table", c_uint16 * 16),
        ("permutation", c_void_p),
    ]


class RzLowRank(ctypes.Structure):
    """`rz_low_rank` of `decoder.h`."""

    _fields_ = [
        ("shrink", c_void_p),
        ("expand", c_void_p * MODULES),
        ("columns", c_int32),
        ("first", c_int32 * MODULES),
        ("pairs", c_int32 * MODULES),
        ("coded", c_int32),
    ]


class RzAdapted(ctypes.Structure):
    """`rz_adapted` of `decoder.h`."""

    _fields_ = _each(c_void_p, "first blocks slots")


class RzLinear(ctypes.Structure):
    pass


RzLinear._fields_ = [
    *(("packed", c_void_p), ("bias", c_void_p), ("outputs", c_int32), ("inputs", c_int32)),
    ("format", RzFormat),
    ("next", POINTER(RzLinear)),
    ("adapted", c_void_p),
]


class RzCodes(ctypes.Structure):
    """`rz_codes` of `quantized.h`."""

    _fields_ = [
        *_each(c_void_p, "codes scales minimums supers super_minimums"),
        *_each(c_int64, "outputs code_stride scale_stride minimum_stride super_stride super_minimum_stride"),
    ]


class RzSharedHead(ctypes.Structure):
    _fields_ = _each(c_int32, "kv_head slot is_first first_share")


class RzSpan(ctypes.Structure):
    _fields_ = _each(c_int32, "first count")


class RzExperts(ctypes.Structure):
    """`rz_experts` of `decoder.h`."""

    _fields_ = [
        *_each(RzLinear, "router gate_up down shared_gate"),
        *_each(c_void_p, "correction scales router_norm norm after_norm after_beside_norm"),
        *_each(c_int32, "count chosen scores normalised groups top_groups group_scores"),
        ("scale", c_float),
        ("streamed", c_int32),
    ]


class RzRecurrent(ctypes.Structure):
    """`rz_recurrent` of `decoder.h`."""

    _fields_ = [
        *_each(c_int32, "kind heads value_dim groups key_dim first_output taps activated window_length gate_first"),
        *_each(c_int32, "norms norm_columns norm_first shares_norm"),
        *_each(c_float, "eps least_step most_step"),
        *_each(c_void_p, "weights bias rates step_bias skips norm window state"),
        ("slot_stride", c_int64),
    ]


class RzLatent(ctypes.Structure):
    """`rz_latent` of `decoder.h`."""

    _fields_ = [
        *_each(RzLinear, "query_b keys values"),
        *_each(c_void_p, "query_norm norm"),
        *_each(c_int32, "query_rank plain rotated rank value_dim pairs position_span"),
        *_each(c_float, "position_growth query_eps eps"),
    ]


class RzInputs(ctypes.Structure):
    """`rz_inputs` of `decoder.h`."""

    _fields_ = [
        ("width", c_int32),
        *_each(RzLinear, "table projection"),
        ("norm", c_void_p),
        *_each(c_float, "table_scale projection_scale scale"),
    ]


class RzHeads(ctypes.Structure):
    _fields_ = [
        *_each(c_int32, "q_heads kv_heads lines key_dim value_dim first_output shared_in_ring shared_here"),
        ("shared", RzSharedHead * 2),
        ("counted", RzSpan * 2),
        ("all", c_int32 * 2),
    ]


class RzLayer(ctypes.Structure):
    _fields_ = [
        *_each(c_void_p, "attention_norm feed_forward_norm after_attention_norm after_feed_forward_norm query_norm"),
        *_each(c_void_p, "key_norm sinks"),
        *_each(RzLinear, "qkv output gate_up down input_gate input_projection"),
        ("after_input_norm", c_void_p),
        ("experts", POINTER(RzExperts)),
        ("recurrent", POINTER(RzRecurrent)),
        ("latent", POINTER(RzLatent)),
        *_each(c_int32, "heads reads_only keys_are_values norms_values gated rotary window"),
        ("scale", c_float),
        *_each(c_void_p, "writable codes scales"),
        *_each(c_int64, "num_writable codec in_groups"),
        *_each(c_void_p, "summaries quantized_summaries"),
        ("chooses", c_int64),
        ("asked", c_void_p),
    ]


class RzPlace(ctypes.Structure):
    """`rz_place` of `decoder.h`."""

    _fields_ = [("layer", c_int64), ("doorbell", c_int32)]


class RzModel(ctypes.Structure):
    _fields_ = [
        *_each(c_int32, "layers hidden intermediate block_size activation num_heads"),
        ("rotary_dim", c_int32 * ROTARIES),
        *_each(c_int32, "rotary_interleaved num_writable num_quantized num_states embedding_split vocab_first"),
        *_each(c_int32, "rows_in_embedding ranks"),
        ("heads", RzHeads * HEADS),
        *_each(c_int32, "wide_norms norms_turned"),
        *_each(c_float, "swiglu_alpha swiglu_limit eps attention_scale attention_cap embedding_scale residual_scale"),
        *_each(c_float, "logit_scale logit_cap"),
        ("frequencies", c_void_p * ROTARIES),
        ("rotary_scale", c_float * ROTARIES),
        ("layer", POINTER(RzLayer)),
        ("final_norm", c_void_p),
        ("embedding", RzLinear),
        ("inputs", RzInputs),
        ("head", RzLinear),
        ("ring", c_void_p),
        ("ring_timeout_ns", c_int64),
        ("place", POINTER(RzPlace)),
    ]


# The functions of `shared_memory.h`.
_RING_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rz_ring_area_bytes": (c_size_t, [c_int, c_int, c_size_t]),
    "rz_ring_open": (c_void_p, [c_void_p, c_int, c_int, c_int, c_size_t]),
    "rz_ring_watch": (None, [c_void_p, c_void_p, c_int]),
    "rz_ring_show": (None, [c_void_p, c_void_p]),
    "rz_ring_close": (None, [c_void_p]),
    "rz_ring_abort": (None, [c_void_p]),
    "rz_ring_sum_f32": (c_int, [c_void_p, c_void_p, c_size_t, c_int64]),
    "rz_ring_sum_bf16": (c_int, [c_void_p, c_void_p, c_size_t, c_int64]),
    "rz_ring_sum_f32_part": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int64]),
    "rz_ring_part": (c_size_t, [c_size_t, c_int, c_int]),
    "rz_ring_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64]),
    "rz_ring_barrier": (c_int, [c_void_p, c_int64]),
    "rz_ring_busy_ns": (c_int64, [c_void_p, c_int]),
    "rz_ring_waited_ns": (c_int64, [c_void_p, c_int]),
}


class RzCandidates(ctypes.Structure):
    """`rz_candidates` of `sampling.h`."""

    _fields_ = [
        *_each(c_void_p, "logits rows wants largest"),
        *_each(c_int64, "width count"),
        ("alone", c_int32),
        *_each(c_void_p, "bounds totals lengths starts ids values"),
    ]


class RzDraws(ctypes.Structure):
    """`rz_draws` of `sampling.h`."""

    _fields_ = [
        *_each(c_void_p, "scores rows of"),
        *_each(c_int64, "width count"),
        *_each(c_void_p, "places edits"),
        ("edited", c_int64),
        *_each(c_void_p, "allowed columns"),
    ]


class RzStep(ctypes.Structure):
    _fields_ = [
        *_each(c_int32, "tokens sequences sampled table_blocks"),
        *_each(c_void_p, "token_ids positions slots query_lens context_lens block_tables sample_rows logits values"),
        *_each(c_void_p, "indices progress pools pooled"),
        ("num_pools", c_int64),
        *_each(c_void_p, "taps tapped"),
        ("num_taps", c_int64),
        ("compressions", c_void_p),
        ("num_compressions", c_int64),
        *_each(c_void_p, "state_slots state_snapshots"),
        *_each(c_int64, "num_states num_snapshots"),
        ("adapters", c_void_p),
        *_each(c_int64, "num_adapters adapter_slots shrunk_columns"),
        ("sparse", c_void_p),
        ("num_sparse", c_int64),
        ("restored", c_void_p),
        ("fetch", c_int64),
    ]


# The functions that are there once for each level, which their names end with.
_KERNELS: dict[str, tuple[Any, list[Any]]] = {
    "rz_prove": (c_int, []),
    "rz_packed_bytes": (c_size_t, [c_long, c_long]),
    "rz_pack": (None, [c_void_p, c_void_p, *[c_long] * 6]),
    "rz_short_exponents_panel_bytes": (c_size_t, [c_long]),
    "rz_short_exponents_pack": (c_int, [c_void_p, c_void_p, c_long, c_long, c_long]),
    "rz_quantized_bytes": (c_size_t, [POINTER(RzFormat), c_long]),
    "rz_quantized_pack": (None, [c_void_p, POINTER(RzFormat), POINTER(RzCodes), c_long, c_long]),
    "rz_block_codes": (None, [c_int, c_void_p, *[c_long] * 4, *[c_void_p] * 5]),
    "rz_code_values": (None, [*[c_void_p] * 3, *[c_long] * 3, c_int, c_void_p, c_int, c_long]),
    "rz_quantize": (None, [POINTER(RzCodes), c_int, c_int, c_long, c_long, c_int, c_void_p, c_int, *[c_long] * 3]),
    "rz_unpack_rows": (None, [c_void_p, c_int, c_long, POINTER(RzFormat), c_void_p, *[c_long] * 6]),
    "rz_quantized_row": (None, [c_void_p, POINTER(RzFormat), c_void_p, c_long]),
    "rz_decoder_multiply": (c_int, [c_void_p, POINTER(RzLinear), c_void_p, c_int, c_void_p]),
    "rz_decoder_recur": (c_int, [c_void_p, POINTER(RzRecurrent), POINTER(RzStep), c_void_p, c_void_p]),
    "rz_decoder_new": (c_void_p, [POINTER(RzModel), c_int, POINTER(c_int)]),
    "rz_decoder_beside": (c_void_p, [POINTER(RzModel), c_void_p]),
    "rz_decoder_free": (None, [c_void_p]),
    "rz_decoder_forward": (c_int, [c_void_p, POINTER(RzStep)]),
    "rz_decoder_spent": (None, [c_void_p, c_void_p]),
    "rz_decoder_largest": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p]),
    "rz_decoder_find_candidates": (c_int, [c_void_p, POINTER(RzCandidates)]),
    "rz_decoder_take_candidates": (c_int, [c_void_p, POINTER(RzCandidates)]),
    "rz_decoder_draw": (c_int, [c_void_p, POINTER(RzDraws)]),
}

# What a level computes wrongly, as `proof.h` numbers it.
PROOFS = (
    "",
    "products of bf16",
    "products of int8",
    "products of 14-bit numbers",
    "attention over bf16 keys",
    "attention over int8 keys",
    "anything, for want of memory",
)

_LEVEL_NAMES = 64  # as in `decoder.h`
_chosen = ""


def choose_level(level: str) -> None:
    """Has `load_library` give the kernels of `level`; empty: of the environment's (`LEVEL`), or of the best that this
    processor runs. Proves that, and logs which better ones failed.

    Raises `ConfigurationError` where the processor does not run `level`, or computes wrongly at it.
    """
    global _chosen
    asked = level or os.environ.get(LEVEL, "")
    if asked and not _why_on_none() and (asked not in _present() or _wrong_at(asked)):
        cause = "which is not a level that this CPU has"
        if asked in _present():
            cause = f"at which this CPU computes wrong {_wrong_at(asked)}"
        others = f", or choose one of: {', '.join(levels())}." if levels() else " for PyTorch, since no other is left."
        raise ConfigurationError(f"{LEVEL} is {asked!r}, {cause}; leave it empty{others}")
    _tell_wrong_levels()
    _chosen = asked


def load_library() -> Any | None:
    """The functions of `_KERNELS` at the chosen level, and `level`, its name. None where they cannot be used:
    `why_not` says why."""
    if why_not():
        return None
    if not _chosen:
        choose_level("")
    return kernels_at(_chosen or best_level())


@cache
def why_not() -> str:
    """Why the kernels cannot be used here; empty where they can."""
    if told := _why_on_none():
        return told
    if best_level():
        return ""
    if wrong := wrong_levels():
        told = "; ".join(f"at {level} {kernels}" for level, kernels in wrong.items())
        return f"this processor, or what emulates it, computes wrongly: {told}"
    return (
        "this processor, or what the system shows of it, has neither AVX2 with FMA and F16C nor Arm's dot products "
        "(a virtual machine shows them where its host passes its processor on)"
    )


def _why_on_none() -> str:
    """Why they cannot be used, whatever the processor; empty where they can."""
    if os.environ.get(DISABLE) == "0":
        return f"{DISABLE} is 0"
    if compiled() is None:
        return (
            "they were not compiled, or not since they were changed; with gcc 11 or newer on the path, install "
            "the package again: pip install --force-reinstall --no-deps --no-cache-dir ryzanstein (in a checkout: "
            "--no-deps --editable .)"
        )
    return ""


def levels() -> tuple[str, ...]:
    """The levels of the library that this processor runs and computes rightly at, the best first. All are proven."""
    return tuple(level for level in _present() if not _wrong_at(level))


def best_level() -> str:
    """The first of `levels`, without a proof of those behind it; empty: there is none."""
    return next((level for level in _present() if not _wrong_at(level)), "")


def wrong_levels() -> dict[str, str]:
    """The levels that this processor has and computes something wrongly at: what."""
    return {level: wrong for level in _present() if (wrong := _wrong_at(level))}


def _present() -> tuple[str, ...]:
    """The levels of the library that this processor has, the best first."""
    library = compiled()
    return _levels_of(library) if library else ()


@cache
def _wrong_at(level: str) -> str:
    """The kernels that compute otherwise than plain C at `level`; empty: none. Takes less than a millisecond."""
    return PROOFS[kernels_at(level).rz_prove()]


@cache
def _tell_wrong_levels() -> None:
    for level in itertools.takewhile(_wrong_at, _present()):
        wrong = _wrong_at(level)
        log.error("cpu_level_computes_wrongly", cpu_level=level, kernels=wrong, instead=levels()[:1])


def _levels_of(library: Any) -> tuple[str, ...]:
    names = ctypes.create_string_buffer(_LEVEL_NAMES)
    library.rz_levels(names)
    return tuple(names.value.decode().split())


@cache
def kernels_at(level: str) -> Any:
    """As `load_library`, at one of `levels`."""
    kernels = SimpleNamespace(level=level)
    for name, (result, arguments) in _KERNELS.items():
        function = getattr(compiled(), f"{name}_{level}")
        function.restype, function.argtypes = result, arguments
        setattr(kernels, name, function)
    return kernels


def library_file() -> Path | None:
    """Where the library lies; None where it was not compiled. It is named for all Pythons; a free-threaded one, which
    has no stable ABI, names it after itself."""
    every = Path(__file__).with_name("_kernels.abi3.so")
    if every.is_file():
        return every
    spec = importlib.util.find_spec(MODULE)
    return None if spec is None or spec.origin is None else Path(spec.origin)


@cache
def compiled() -> Any | None:
    """The library whatever the processor: shared memory asks nothing of it. None where it was not compiled, or
    its structures or functions are not those above."""
    file = library_file()
    if file is None:
        return None
    library = ctypes.CDLL(str(file))
    if not _has_our_structures(library) or not _has_our_functions(library):
        return None
    for name, (result, arguments) in _RING_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _has_our_functions(library: Any) -> bool:
    """One that was compiled before a function came does not have it."""
    if not all(hasattr(library, name) for name in (*_RING_FUNCTIONS, "rz_levels")):
        return False
    return all(hasattr(library, f"{name}_{level}") for level in _levels_of(library) for name in _KERNELS)


def _has_our_structures(library: Any) -> bool:
    """A package that was changed and not installed again has a library that would read past ours."""
    kinds = (RzLinear, RzLayer, RzModel, RzStep, RzCodes, RzExperts, RzRecurrent, RzLatent, RzAdapted, RzLowRank)
    ours = [ctypes.sizeof(kind) for kind in kinds]
    if not hasattr(library, "rz_sizes"):
        return False
    theirs = (c_int64 * len(ours))()
    library.rz_sizes.argtypes, library.rz_sizes.restype = [c_void_p], None
    library.rz_sizes(theirs)
    return list(theirs) == ours
