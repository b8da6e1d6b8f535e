"""Whether the parts around attention are right, each on its own: small, and for a GPU that was never tried.

products    with bf16, fp8 and int8 weights and codes with scales for groups, by each way that the number of rows
            chooses, against float64
experts     a layer of Qwen 3 30B-A3B in bf16, fp8 and int4, against PyTorch in float32
adapters    of rank 16 and 64 beside queries, keys and values of 8B, against PyTorch in float32
blocks      compressed by the kernel, against the codec in PyTorch
sparse      attention to the blocks that a decode chooses, against PyTorch's choice and attention
loading     a checkpoint on the device, bit by bit what its files hold; and quantised on the way
sums        over as many GPUs as there are, by NCCL and by symmetric memory, captured in graphs
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.on_gpu import adapter_cases, collective_speed, expert_cases, sparse_speed
from benchmarks.on_gpu.bench import Bench, Row, checked
from benchmarks.random_model import SHAPES, LlamaShape, random_rows, write_checkpoint
from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Quantized, quantize

# Largest root mean square of a product's errors, in parts of its own: bf16 rounds by up to 0.004, half of it in the
# mean.
ROUNDED = 0.01
FAST_SUMS = 0.02  # the same for e4m3 by e4m3, which the library adds up in 14 bits
WEIGHT = (6144, 4096)  # [out, in]: the query, key and value product of an 8B model
# `--weight-dtype`s whose products are checked: zero points, minimums, two levels of scales, 4, 6 and 8 bits.
GROUPED = ("int4", "q4_k", "q6_k", "q8_0")
ROWS = (1, 2, 8, 32, 33, 128, 129, 512)
MODEL = LlamaShape(1024, 8, 2, 3584, 8, 32000)  # 0.3 GB: more than one buffer of the loader's


def run(bench: Bench) -> None:
    bench.each("correctness", (products, experts, adapters, blocks, sparse, loading, sums), wrong=True)


def sparse(bench: Bench) -> None:
    _report(bench, sparse_speed.errors(bench))


def experts(bench: Bench) -> None:
    _report(bench, expert_cases.errors(bench))


def adapters(bench: Bench) -> None:
    _report(bench, adapter_cases.errors(bench))


def _report(bench: Bench, rows: Iterator[Row]) -> None:
    for row in rows:
        bench.report(msgspec.structs.replace(row, key=f"correctness/{row.key}"))


def products(bench: Bench) -> None:
    outputs, inputs = (32, 64) if bench.tiny else WEIGHT
    generator = torch.Generator(bench.device).manual_seed(1)
    weight = torch.randn((outputs, inputs), generator=generator, device=bench.device).mul_(inputs**-0.5).bfloat16()
    bias = torch.randn(outputs, generator=generator, device=bench.device).bfloat16()
    for rows in (1, 3, 17) if bench.tiny else ROWS:
        x = torch.randn((rows, inputs), generator=generator, device=bench.device).bfloat16()
        for name, found, expected, limit in _products(x, weight, bias):
            key = f"correctness/products/{name}/{rows}"
            bench.report(checked(key, f"{name} weights by {rows} rows, against float64", found, expected, limit))


def _products(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """(name, product, the same in float64, what its error may be); both with `bias`."""
    from services.executor.gpu.kernels.matmul import encode_rows, multiply_one
    from services.executor.gpu.quantized_matmul import FEW, GroupedProduct, coded_product, packed_rows

    if len(x) == 1:
        plain = x.double() @ weight.double().t() + bias.double()
        yield "bf16", multiply_one(x, weight, None, bias), plain, ROUNDED
    for codec in (FP8, INT8):
        coded = quantize(weight, codec)
        assert isinstance(coded, Quantized)
        wide = coded.codes.double() * coded.scales.double()[:, None]
        # On a CPU there is no library's product of e4m3 by e4m3.
        product = coded_product(coded, bias) if x.is_cuda else coded_product(coded, bias, None)
        scaled = codec is FP8 and x.is_cuda and len(x) > FEW[codec.dtype]
        rows = x.double()
        if scaled:
            codes, scales = encode_rows(x, FP8)
            rows = codes.double() * scales.double()[:, None]
        yield codec.name, product(x), rows @ wide.t() + bias.double(), FAST_SUMS if scaled else ROUNDED
    for name in GROUPED:
        grouped = random_rows(CODECS[name], len(weight), weight.shape[1], weight.device)
        expected = x.double() @ grouped.dequantized().double().t() + bias.double()
        yield name, GroupedProduct(packed_rows(grouped), bias)(x), expected, ROUNDED


def blocks(bench: Bench) -> None:
    from services.executor.gpu.attention import GpuKernels

    for codec in (INT8, FP8):
        width = 16 if bench.tiny else 128
        shape = StoreShape.uniform(2, 16, 2, width, torch.bfloat16, (codec,) * 2)
        stores = [KvStore(shape, 40, bench.device, 33) for _ in range(2)]
        generator = torch.Generator(bench.device).manual_seed(2)
        content = torch.randn(stores[0].writable_layers().shape, generator=generator, device=bench.device)
        pairs = [(block, stores[0].num_writable + block) for block in range(4 if bench.tiny else 32)]
        for store in stores:
            store.writable_layers().copy_(content)
        GpuKernels(stores[0])  # the other one compresses by the codec in PyTorch
        for store in stores:
            store.compress(pairs)
        different = total = 0
        for ours, theirs in zip(stores[0].quantized_layers(), stores[1].quantized_layers(), strict=True):
            bits = [part.codes.view(torch.uint8)[: len(pairs)] for part in (ours, theirs)]
            different += int((bits[0] != bits[1]).sum())
            total += bits[0].numel()
            assert ours.scales is not None
            assert theirs.scales is not None
            torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-6, atol=0)
        key, what = (f"correctness/blocks/{codec.name}", f"codes of compressed blocks, {codec.name}, against PyTorch's")
        # A quotient that falls on the middle between two codes may go to either.
        bench.wrong_or_right(key, what, different <= total // 1000, float(different), total // 1000, f"of {total}")


def loading(bench: Bench) -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-") as name:
        directory = Path(name)
        write_checkpoint(directory, SHAPES["tiny"] if bench.tiny else MODEL)
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: load_file(directory / file) for file in set(index.values())}
        layout = ShardLayout.from_config(load_config(directory), 1, 0)
        for codec in (None, FP8):
            model = _loaded(bench.device, directory, layout, codec)
            wrong = [name for name, file in index.items() if not _same(model, name, files[file][name], codec)]
            kind = codec.name if codec else "bf16"
            note = f"of {len(index)}" + (f": {', '.join(wrong[:3])}" if wrong else "")
            what = f"tensors of a checkpoint that differ on the device, {kind} weights"
            bench.wrong_or_right(f"correctness/loading/{kind}", what, not wrong, float(len(wrong)), 0.0, note)
            del model


def _loaded(device: torch.device, directory: Path, layout: ShardLayout, codec: Codec | None) -> torch.nn.Module:
    model: torch.nn.Module = load_model(directory, torch.bfloat16, layout, SingleRank(), device, lambda *_: None, codec)
    return model


def _same(model: torch.nn.Module, name: str, stored: Tensor, codec: Codec | None) -> bool:
    """Whether the weight of that name is what its file holds, to the last bit; quantised, as the codec has it."""
    module = model.get_submodule(name.rpartition(".")[0])
    held = getattr(module, "stored", None)
    if codec is None or not isinstance(held, Quantized):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return torch.equal(weight.cpu(), stored)
    expected = quantize(stored.to(held.codes.device), codec)
    bits = [part.codes.view(torch.uint8) for part in (held, expected)]
    return torch.equal(*bits) and torch.equal(held.scales, expected.scales)


def sums(bench: Bench) -> None:
    """Each is checked before it is timed; what is not offered here (symmetric memory, say) is told, and not wrong."""
    for one in collective_speed.run(bench, sizes=(8192, 1 << 20)):
        what = one.what if one.figure is None else f"{one.what}: right, and the same bits on all ranks"
        key = one.key.replace("collectives/", "correctness/sums/")
        bench.report(Row(key, what, None if one.figure is None else 0.0, "error", note=one.note, ok=one.ok))
