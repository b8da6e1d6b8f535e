"""Mixtures of experts against what they stand for, on a GPU, if only a simulated one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.random_model import random_rows
from services.executor.gpu.experts import Mixture, rule_of, use_expert_kernels
from services.executor.gpu.kernels import experts
from services.executor.gpu.kernels.experts import Routed
from services.executor.gpu.linear import invariant_product, make_product
from services.executor.gpu.quantized_matmul import stacked_rows
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.model.lowered_experts import RouterConfig, Routing
from services.executor.model.parallel.layers import keep_quantized_experts
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Quantized, Weight, quantize
from tests.unit.executor.model.architectures import settings_of

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
TOLERANCE = 2**-6
COUNT, HIDDEN, INNER = 6, 128, 48
pytestmark = pytest.mark.usefixtures("cuda")
PLAIN = RouterConfig("softmax", 2, normalised=True, groups=1, top_groups=1, scale=1.0)
GROUPED = RouterConfig("sigmoid", 2, normalised=False, groups=3, top_groups=2, scale=2.5)


def normal(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def route(logits: Tensor, choice: RouterConfig = PLAIN, correction: Tensor | None = None, gone: int = 0) -> Routed:
    """Of whose rows the last `gone` only fill up."""
    slots = torch.zeros(len(logits), dtype=torch.int32)
    slots[len(logits) - gone :] = -1
    bias = None if correction is None else correction.to(DEVICE)
    return experts.route(logits.to(DEVICE), bias, slots.to(DEVICE), COUNT, rule_of(choice))


def places(routed: Routed) -> list[tuple[int, list[int]]]:
    """(expert, its pairs) of each tile that has some."""
    order = routed.order.tolist()
    return [
        (expert, order[first : first + count])
        for expert, first, count in zip(*routed.tiles.tolist(), strict=True)
        if count
    ]


def test_rows_go_to_the_best_by_softmax() -> None:
    logits = normal(5, COUNT + 1)  # of which the last is not an expert's
    routed = route(logits)
    weights, chosen = logits[:, :COUNT].softmax(-1).topk(2)
    assert torch.equal(routed.chosen.cpu(), chosen.int())
    torch.testing.assert_close(routed.weights.cpu(), weights / weights.sum(-1, keepdim=True))


def test_rows_go_to_the_best_of_the_best_groups_by_corrected_sigmoid() -> None:
    logits, correction = normal(20, COUNT), normal(COUNT, seed=2)
    routed = route(logits, GROUPED, correction)
    scores = logits.sigmoid()
    by = (scores + correction).view(-1, 3, 2)
    kept = torch.zeros(20, 3, 1).scatter_(1, by.sum(-1, keepdim=True).topk(2, 1)[1], 1.0)
    chosen = by.masked_fill(kept == 0, -torch.inf).flatten(1).topk(2)[1]
    assert torch.equal(routed.chosen.cpu(), chosen.int())
    torch.testing.assert_close(routed.weights.cpu(), 2.5 * scores.gather(1, chosen))


@pytest.mark.parametrize("choice", [PLAIN, GROUPED], ids=lambda choice: choice.scores)
def test_what_ties_and_what_is_no_number_goes_somewhere_once(choice: RouterConfig) -> None:
    logits = torch.zeros(4, COUNT)
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3] = -torch.inf
    routed = route(logits, choice)
    chosen = routed.chosen.cpu()
    assert chosen[0].tolist() == [0, 1]
    assert bool((chosen[:, 0] != chosen[:, 1]).all())
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < COUNT
    assert bool(routed.weights[1].isnan().all())


@pytest.mark.parametrize(("rows", "gone"), [(1, 0), (1, 1), (3, 2), (60, 5), (90, 0)], ids=lambda number: str(number))
def test_pairs_lie_in_the_order_of_their_experts(rows: int, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_AT_ONCE", 64)  # so that pairs are sorted in several turns
    logits = normal(rows, COUNT)
    logits[:, 4] = -100  # an expert that nobody goes to
    routed = route(logits, gone=gone)
    wanted = routed.chosen.flatten().tolist()
    found = places(routed)
    assert [pair for _, pairs in found for pair in pairs] == sorted(
        range(2 * (rows - gone)), key=lambda pair: (wanted[pair], pair)
    )
    assert all(wanted[pair] == expert for expert, pairs in found for pair in pairs)
    assert all(len(pairs) <= routed.rows for _, pairs in found)
    assert wanted[2 * (rows - gone) :] == [COUNT] * (2 * gone)
    assert not any(expert == 4 for expert, _ in found)


def test_all_rows_go_to_one_expert_in_whole_tiles() -> None:
    logits = torch.zeros(50, COUNT)
    logits[:, 3], logits[:, 5] = 9, 8
    routed = route(logits)
    assert [(expert, len(pairs)) for expert, pairs in places(routed)] == [
        *((3, routed.rows),) * (50 // routed.rows),
        *((3, 50 % routed.rows),) * bool(50 % routed.rows),
        *((5, routed.rows),) * (50 // routed.rows),
        *((5, 50 % routed.rows),) * bool(50 % routed.rows),
    ]


def weight(form: str, outputs: int, inputs: int) -> tuple[Weight, Tensor]:
    """(of all experts, what it stands for [experts, outputs, inputs])"""
    values = normal(COUNT * outputs, inputs, seed=outputs)
    if form == "plain":
        return values.to(DTYPE).to(DEVICE), values.to(DTYPE).float().view(COUNT, outputs, inputs)
    if form in ("int8", "fp8"):
        coded = quantize(values.to(DEVICE), INT8 if form == "int8" else FP8)
        assert isinstance(coded, Quantized)
        return coded, coded.dequantized().cpu().view(COUNT, outputs, inputs)
    rows = random_rows(CODECS[form], COUNT * outputs, inputs, torch.device("cpu"))
    return rows.to(DEVICE), rows.dequantized().view(COUNT, outputs, inputs)


class Layer:
    """A mixture, and the same in float64."""

    def __init__(self, form: str, *, gated: bool = False, invariant: bool = False) -> None:
        gate_up, self.gate_up = weight(form, 2 * INNER, HIDDEN)
        down, self.down = weight(form, HIDDEN, INNER)
        holder: Any = nn.Module()
        holder.is_transposed, holder.is_concatenated = False, True
        for name, given in (("gate_up_proj", gate_up), ("down_proj", down)):
            setattr(holder, name, nn.Parameter(torch.empty(0, dtype=DTYPE), requires_grad=False))
            if isinstance(given, Tensor):
                setattr(holder, name, nn.Parameter(given.view(COUNT, -1, given.shape[1]), requires_grad=False))
            elif isinstance(given, Quantized):
                keep_quantized_experts(holder, name, given)
            else:
                keep_quantized_experts(holder, name, stacked_rows(given, COUNT))  # type: ignore[arg-type]
        self.router = normal(COUNT, HIDDEN, seed=3) * 0.3
        self.bias = normal(COUNT, seed=5) * 0.2
        self.gate = normal(1, HIDDEN, seed=4) * 0.1 if gated else None
        gate = None if self.gate is None else self.gate.to(DEVICE)
        routing = Routing(holder, self.router.to(DEVICE), self.bias.to(DEVICE), gate, None, PLAIN)
        make = invariant_product if invariant else make_product
        self.mixture = Mixture(routing, make, experts.arrivals_of(8, DEVICE), gelu=False, invariant=invariant)
        self.holder = holder

    def exact(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        x = x.double()
        out = torch.zeros_like(x) if shared is None else shared.double().clone()
        if self.gate is not None:
            out *= (x @ self.gate.double().T).sigmoid()
        weights, chosen = (x @ self.router.double().T + self.bias).softmax(-1).topk(2)
        for row, at in ((row, at) for row in range(len(x)) for at in range(2)):
            expert = int(chosen[row, at])
            gate, up = (self.gate_up[expert].double() @ x[row]).chunk(2)
            made = self.down[expert].double() @ (gate * gate.sigmoid() * up)
            out[row] += weights[row, at] / weights[row].sum() * made
        return out

    def __call__(self, x: Tensor, shared: Tensor | None = None, gone: int = 0) -> Tensor:
        slots = torch.zeros(len(x), dtype=torch.int32)
        slots[len(x) - gone :] = -1
        given = None if shared is None else shared.to(DTYPE).to(DEVICE)
        return self.mixture(x.to(DTYPE).to(DEVICE), slots.to(DEVICE), given).cpu()


@pytest.mark.parametrize(
    ("form", "rows"), [("plain", 20), ("int8", 12), ("fp8", 1), ("int4", 1), ("q4_k", 12), ("q6_k", 1)]
)
def test_a_layer_computes_what_its_weights_stand_for(form: str, rows: int) -> None:
    """One row, whose few tiles are split along the inputs, and many. Of 96 outputs: no whole tiles of 64."""
    layer, x = Layer(form), normal(rows, HIDDEN, seed=7).to(DTYPE).float()
    exact = layer.exact(x)
    torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=TOLERANCE * float(exact.abs().max()))


def test_inputs_are_split_where_processors_would_stand_idle() -> None:
    routed = route(normal(1, COUNT))
    assert routed.tiles.shape == (3, 2)
    assert experts.splits_for(routed, 64, 4096, 8) == 8
    assert experts.splits_for(routed, 64, 4096, 0) == 1
    x, values = normal(1, 2048, seed=2).to(DTYPE), normal(COUNT * 4, 2048, seed=3).to(DTYPE)
    arrivals = experts.arrivals_of(8, DEVICE)
    found = experts.multiply_stacked(x.to(DEVICE), values.to(DEVICE), None, routed, 4, arrivals, 4)
    chosen = values.view(COUNT, 4, 2048)[routed.chosen[0].long().cpu()]
    exact = chosen.double() @ x[0].double()
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=TOLERANCE * float(exact.abs().max()))
    assert not bool(arrivals.any())


@pytest.mark.parametrize("gated", [False, True])
def test_what_the_shared_expert_makes_is_added(gated: bool) -> None:
    layer, x, shared = Layer("plain", gated=gated), normal(3, HIDDEN, seed=7), normal(3, HIDDEN, seed=8)
    exact = layer.exact(x, shared)
    found = layer(x, shared).double()
    torch.testing.assert_close(found, exact, rtol=0, atol=2 * TOLERANCE * float(exact.abs().max()))


def test_only_the_experts_that_rows_go_to_are_read() -> None:
    """All others hold what spreads from any number that is read."""
    layer, x = Layer("plain"), normal(2, HIDDEN, seed=7)
    chosen = set((x @ layer.router.T + layer.bias).topk(2)[1].flatten().tolist())
    weight = layer.mixture._gate_up._weight
    assert isinstance(weight, Tensor)
    for expert in set(range(COUNT)) - chosen:
        weight.view(COUNT, -1, HIDDEN)[expert] = torch.nan
    assert bool(layer(x).isfinite().all())
    weight.view(COUNT, -1, HIDDEN)[chosen.pop()] = torch.nan
    assert not bool(layer(x).isfinite().all())


def test_rows_that_fill_up_go_to_nobody_and_change_nothing() -> None:
    layer, x = Layer("plain"), normal(5, HIDDEN, seed=7)
    x[3:] = torch.nan
    found = layer(x, gone=2)
    assert not bool(found[3:].any())
    assert torch.equal(found[:3], layer(x[:3]))


@pytest.mark.parametrize("form", ["plain", pytest.param("int4", marks=pytest.mark.nightly)])
def test_an_invariant_row_has_the_bits_that_it_has_alone(form: str) -> None:
    layer, x = Layer(form, invariant=True), normal(24, HIDDEN, seed=7)
    together = layer(x)
    for rows in (slice(0, 1), slice(23, 24), slice(9, 20)):
        assert torch.equal(layer(x[rows]), together[rows])


def test_weights_are_taken_over() -> None:
    layer = Layer("plain")
    assert not any(parameter.numel() for parameter in layer.holder.parameters())


def test_experts_without_a_gate_stay_as_they_are() -> None:
    config = CONFIG_MAPPING["nemotron_h"](**settings_of("nemotron_h"))
    module = NemotronHExperts(config)
    use_expert_kernels(module, DEVICE)
    assert "forward" not in vars(module)
    assert all(parameter.numel() for parameter in module.parameters())
