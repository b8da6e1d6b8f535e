"""Launches that are compiled and run as PTX; their sizes are those of the tests that give them numbers."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.on_gpu.launched import meta
from benchmarks.random_model import random_rows
from services.executor.gpu.kernels import attention_launch, codes, elementwise, experts, matmul, sampling
from services.executor.gpu.kernels.codes import word_to_floats
from services.executor.gpu.kernels.grouped import PackedRows, multiply_grouped, widened
from services.executor.gpu.kernels.tiles import rows_for
from services.executor.gpu.quantized_matmul import packed_rows
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS as QUANTIZERS

WORDS = 512
VOCABULARY, ROWS = 5000, 3
KV_HEADS, GROUP, SIZE, WIDTH = 2, 4, 16, 64
HOT_BLOCKS, COLD_BLOCKS = 20_000_000, 12_000_000
"""164 and 49 GB of each layer: what counts them in 32 bits finds nothing."""
SPLITS = 4
GROUPED_OUTPUTS, GROUPED_INPUTS = 80, 1120
"""Blocks of 256 or 128 inputs, of which the last one is not full."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
CHUNK = 40
"""Tokens: two tiles of the largest size, which two groups of warps multiply."""


@triton.jit
def widen_words(words, out, WORDS: tl.constexpr, CODE: tl.constexpr):  # noqa: N803  # as kernels have them
    """`words` int32 [WORDS] as float16 [4, WORDS]: all first codes, all second ones ..."""
    at = tl.arange(0, WORDS)
    n0, n1, n2, n3 = word_to_floats(tl.load(words + at), CODE, tl.float16, True)
    tl.store(out + at, n0)
    tl.store(out + WORDS + at, n1)
    tl.store(out + 2 * WORDS + at, n2)
    tl.store(out + 3 * WORDS + at, n3)


def widen(code: int) -> None:
    widen_words[(1,)](
        meta(WORDS, dtype=torch.int32), meta(4, WORDS, dtype=torch.float16), WORDS=WORDS, CODE=code
    )


def compress(codec: Codec) -> None:
    hot = meta(2, HOT_BLOCKS, 2, KV_HEADS, SIZE, WIDTH)
    code = meta(2, COLD_BLOCKS, 2, KV_HEADS, SIZE, WIDTH, dtype=codec.dtype)
    scales = meta(2, COLD_BLOCKS, 2, KV_HEADS, dtype=torch.float32)
    pairs, layers = meta(3, 2, dtype=torch.int64), meta(2, dtype=torch.int64)
    attention_launch.compress(hot, layers, code, scales, codec, pairs)


def encode(codec: Codec) -> None:
    matmul.encode_rows(meta(4, 300), codec)


def decode(codec: Codec) -> None:
    matmul.decode_rows(meta(2, 300, dtype=codec.dtype), meta(2, dtype=torch.float32), meta(2, 300))


def one_row(codec: Codec) -> None:
    codes_of, scales = meta(20, 1040, dtype=codec.dtype), meta(20, dtype=torch.float32)
    matmul.multiply_few(meta(1, 1040), codes_of, scales, meta(20), meta(8, dtype=torch.int32), 132)


def few_rows(codec: Codec) -> None:
    """Of few tiles, so that their inputs are split."""
    codes_of, scales = meta(80, 1040, dtype=codec.dtype), meta(80, dtype=torch.float32)
    matmul.multiply_few(meta(3, 1040), codes_of, scales, meta(80), meta(16, dtype=torch.int32), 132)


def grouped_weight(form: str) -> PackedRows:
    """Two tiles of outputs; so many inputs that they are split."""
    random = torch.Generator().manual_seed(1)
    if form in QUANTIZERS:
        made = random_rows(QUANTIZERS[form], GROUPED_OUTPUTS, GROUPED_INPUTS, torch.device("cpu"))
    else:
        sizes = (GROUPED_OUTPUTS, GROUPED_INPUTS)
        codes_of = torch.randint(0, 16, sizes, generator=random, dtype=torch.uint8)
        scales = torch.randn((GROUPED_OUTPUTS, GROUPED_INPUTS // 32), generator=random).bfloat16()
        made = QuantizedRows(codes_of, 4, 32, scales, table=E2M1)
    return packed_rows(made)


def grouped(form: str, rows: int) -> None:
    """A product; of no rows: the lookup of two."""
    weight = grouped_weight(form)
    tensors = {name: part.to("meta") for name, part in vars(weight).items() if isinstance(part, Tensor)}
    weight = replace(weight, **tensors)
    if not rows:
        return widened(weight, 0, meta(2, GROUPED_INPUTS), meta(2, dtype=torch.int64))
    cut = matmul.tiles_of(rows, GROUPED_OUTPUTS, GROUPED_INPUTS, 132)
    x, out = meta(rows, GROUPED_INPUTS), meta(rows, GROUPED_OUTPUTS)
    return multiply_grouped(x, weight, meta(GROUPED_OUTPUTS), meta(16, dtype=torch.int32), cut, out)


EXPERTS, CHOSEN, EXPERT_ROWS, EXPERT_OUTPUTS = 6, 2, 5, 80
RULES = {
    "softmax": experts.Rule(CHOSEN),
    "sigmoid": experts.Rule(CHOSEN, sigmoid=True, normalized=False, groups=3, top_groups=2, scale=2.5),
}


def mixture(form: str, rule: experts.Rule) -> None:
    """All of a mixture's kernels for a few rows."""
    logits, correction = (
        meta(EXPERT_ROWS, EXPERTS + 1, dtype=torch.float32),
        meta(EXPERTS, dtype=torch.float32),
    )
    slots = meta(EXPERT_ROWS, dtype=torch.int32)
    routed = experts.route(logits, correction if rule.sigmoid else None, slots, EXPERTS, rule)
    x, arrivals = meta(EXPERT_ROWS, GROUPED_INPUTS), meta(264, dtype=torch.int32)
    if form == "int4":
        weight = grouped_weight(form)
        tensors = {name: part.to("meta") for name, part in vars(weight).items() if isinstance(part, Tensor)}
        experts.multiply_stacked_groups(x, replace(weight, **tensors), routed, arrivals, 2)
    else:
        weights = meta(EXPERTS * EXPERT_OUTPUTS, GROUPED_INPUTS)
        experts.multiply_stacked(x, weights, None, routed, EXPERT_OUTPUTS, arrivals, 2)
    made, shared = meta(EXPERT_ROWS * CHOSEN, EXPERT_OUTPUTS), meta(EXPERT_ROWS, EXPERT_OUTPUTS)
    experts.combine(made, routed, EXPERTS, shared, logits)


def draw() -> None:
    space = sampling.space_for(ROWS, VOCABULARY, torch.device("meta"))
    params = meta(sampling.NUM_PARAMS * ROWS, dtype=torch.float64)
    largest, tokens = meta(ROWS, dtype=torch.float32), meta(ROWS, dtype=torch.int64)
    logits = meta(ROWS, VOCABULARY)
    sampling.draw(logits, largest, params, tokens, space, 1024, top_k=True, top_p=True)


def norm() -> None:
    weight = meta(320, dtype=torch.float32)
    elementwise.add_norm(meta(2, 320), meta(2, 320), weight, elementwise.Norms(1e-6, offset=False))


def place() -> None:
    angles, weight = meta(2, 32, dtype=torch.float32), meta(WIDTH, dtype=torch.float32)
    elementwise.place(
        meta(2, (4 + 2 * KV_HEADS) * WIDTH), 4, elementwise.Rotation(angles, angles), meta(2, dtype=torch.int32),
        meta(HOT_BLOCKS, 2, KV_HEADS, SIZE, WIDTH), (weight, weight), elementwise.Norms(1e-6, offset=False),
    )  # fmt: skip


def gated() -> None:
    elementwise.gated(meta(2, 600), gelu=True)


def attend(codec: Codec | None, splits: int, tokens: int = 1) -> None:
    """Decodes of two sequences, or two tiles of a chunk."""
    index = meta(8, dtype=torch.int32)
    cold = COLD_BLOCKS if codec else 0
    code = meta(cold, 2, KV_HEADS, SIZE, WIDTH, dtype=codec.dtype if codec else torch.bfloat16)
    scales: Tensor | None = meta(cold, 2, KV_HEADS, dtype=torch.float32) if codec else None
    layer = attention_launch.Layer(meta(HOT_BLOCKS, 2, KV_HEADS, SIZE, WIDTH), code, scales, codec)
    batch = attention_launch.Batch(
        index, index, index, index, index, index[:2], index[:2], rows_for(GROUP, tokens), splits, 0, 2
    )
    query = meta(2, KV_HEADS, GROUP, WIDTH)
    attention_launch.attend(query, layer, batch, attention_launch.Scores(WIDTH**-0.5), query)


GROUPED = {
    f"{what} {form}": lambda form=form, rows=rows: grouped(form, rows)
    for what, rows in (("grouped", 3), ("rows", 0))
    for form in ("int4", "q4_k", "q6_k", "q8_0", "mxfp4")
}
CODECS: dict[str, Codec] = {"fp8": FP8, "int8": INT8}
CASES: dict[str, Callable[[], None]] = {"norm": norm, "place": place, "gated": gated}
for _name, _codec in CODECS.items():
    CASES |= {
        f"widen {_name}": lambda codec=_codec: widen(codes.E4M3 if codec is FP8 else codes.INT8),
        f"compress {_name}": lambda codec=_codec: compress(codec),
        f"encode {_name}": lambda codec=_codec: encode(codec),
        f"decode {_name}": lambda codec=_codec: decode(codec),
        f"one row {_name}": lambda codec=_codec: one_row(codec),
        f"few rows {_name}": lambda codec=_codec: few_rows(codec),
        f"attend {_name}": lambda codec=_codec: attend(codec, SPLITS),
    }
CASES |= {
    "attend hot": lambda: attend(None, SPLITS),
    "attend chunk": lambda: attend(INT8, 1, CHUNK),
    "draw": draw,
}
MIXTURES = {
    "mixture": lambda: mixture("plain", RULES["softmax"]),
    "mixture int4": lambda: mixture("int4", RULES["sigmoid"]),
}
LAUNCHES = CASES | GROUPED | MIXTURES
