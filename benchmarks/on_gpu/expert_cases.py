"""Whether a layer's mixture of experts is right."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.bench import ROUNDED, Bench, Row, checked
from benchmarks.random_model import random_rows
from services.executor.kv_cache.codecs import FP8
from services.executor.model.lowered_experts import RouterConfig, Routing
from services.executor.model.parallel.layers import keep_quantized_experts
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Quantized, Weight, quantize

FORMS = ("bf16", "fp8", "int4")
ROWS = (1, 8, 64, 512, 2048)


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


QWEN = Shape(128, 8, 2048, 768)  # a layer of Qwen 3 30B-A3B
TINY = Shape(6, 2, 64, 32)


def errors(bench: Bench) -> Iterator[Row]:
    """Rows of `experts/...`."""
    shape = TINY if bench.tiny else QWEN
    for form in FORMS:
        layer = _Layer(shape, form, bench.device)
        for count in (1, 5) if bench.tiny else ROWS:
            yield layer.error(torch.randn(count, shape.hidden, dtype=torch.bfloat16, device=bench.device))


class _Layer:
    def __init__(self, shape: Shape, form: str, device: torch.device) -> None:
        from services.executor.gpu.experts import Mixture
        from services.executor.gpu.kernels.experts import arrivals_of
        from services.executor.gpu.linear import make_product

        self._shape, self._form = shape, form
        self._router = torch.randn(shape.experts, shape.hidden, device=device) * shape.hidden**-0.5
        holder: Any = nn.Module()
        holder.is_transposed, holder.is_concatenated = False, True
        self._values = []
        sizes = {"gate_up_proj": (2 * shape.inner, shape.hidden), "down_proj": (shape.hidden, shape.inner)}
        for name, size in sizes.items():
            stored, values = _weight(form, shape.experts, size, device)
            setattr(holder, name, nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False))
            if isinstance(stored, Tensor):
                setattr(holder, name, nn.Parameter(stored, requires_grad=False))
            else:
                keep_quantized_experts(holder, name, stored)
            self._values.append(values)
        choice = RouterConfig("softmax", shape.chosen, normalised=True, groups=1, top_groups=1, scale=1.0)
        routing = Routing(holder, self._router, None, None, None, choice)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        self._mixture = Mixture(routing, make_product, arrivals_of(processors, device), gelu=False, invariant=False)

    def __call__(self, x: Tensor) -> Tensor:
        slots = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        return self._mixture(x, slots, None)

    def error(self, x: Tensor) -> Row:
        what = f"{self._form} experts by {len(x)} rows, against PyTorch in float32"
        key = f"experts/{self._form}/{len(x)}"
        return checked(key, what, self(x), self._expected(x.float()), ROUNDED)

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = (x @ self._router.t()).softmax(-1).topk(self._shape.chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def _expected(self, x: Tensor) -> Tensor:
        weights, chosen = self._chosen(x)
        gate_up, down = self._values
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, at = torch.where(chosen == expert)
            gate, up = (x[row] @ gate_up[expert].float().t()).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            made.index_add_(0, row, weights[row, at, None] * (inner @ down[expert].float().t()))
        return made


def _weight(form: str, experts: int, size: tuple[int, int], device: torch.device) -> tuple[Weight, Tensor]:
    """(of all experts as it is stored, what it stands for [experts, out, in])"""
    from services.executor.gpu.quantized_matmul import stacked_rows

    outputs, inputs = size
    if form in CODECS and form != "fp8":
        rows = random_rows(CODECS[form], experts * outputs, inputs, device)
        return stacked_rows(rows, experts), rows.dequantized().view(experts, outputs, inputs)
    plain = torch.randn((experts * outputs, inputs), dtype=torch.bfloat16, device=device) * inputs**-0.5
    if form == "bf16":
        return plain.view(experts, outputs, inputs), plain.view(experts, outputs, inputs)
    coded = quantize(plain, FP8)
    assert isinstance(coded, Quantized)
    return coded, coded.dequantized().view(experts, outputs, inputs)
