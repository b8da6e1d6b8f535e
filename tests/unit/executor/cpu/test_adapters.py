"""LoRA adapters in the native kernels, against transformers with each adapter merged into its weights in float32."""

import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.settings import AdapterDtype
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.cpu.decoder import NativeDecoder
from services.executor.cpu.packed_file import PackedFile, write
from services.executor.model.adapters.files import LowRank
from services.executor.model.adapters.targets import AdapterTarget, targets_of, whole_targets
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import build_split, load_config
from services.executor.model.model_facts import ModelFacts
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.native_runner import native_runner
from services.executor.worker.runner import ModelRunner
from shared.errors import ModelLoadError
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.ring import CPU, Script, in_shared_memory
from tests.unit.executor.model.tiny import ALL_EXPERTS, auto_class, make_model

pytestmark = natively

Weights = Mapping[str, LowRank]
LENGTHS = [47, 25, 14, 7]
# Chunked prefill, decodes and both at once.
STEPS: list[dict[int, int]] = [
    {0: 16, 2: 11},
    {2: 1, 0: 16, 1: 7},
    {0: 13, 1: 16},
    {2: 1, 0: 1, 1: 1, 3: 6},
    {3: 1, 2: 1, 0: 1, 1: 1},
]
SLOTS = {0: 0, 1: -1, 2: 5, 3: 0}  # of each sequence
Results = list[tuple[int, int, Tensor]]  # (sequence, position, its logits)


def decoder_of(runner: ModelRunner) -> NativeDecoder:
    assert isinstance(runner._decoder, NativeDecoder)
    return runner._decoder


def drawn(targets: list[AdapterTarget], rank: int, seed: int, strength: float = 0.3) -> dict[str, LowRank]:
    """An adapter of the whole model, of this rank or a little less; as strong as it is, it changes all of what is
    computed."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for number, target in enumerate(targets):
        own = max(1, rank - number % 2)
        copies = (target.experts,) if target.experts else ()
        a = torch.randn(*copies, own, target.inputs, generator=random) / target.inputs**0.5
        b = torch.randn(*copies, target.outputs, own, generator=random) * (strength / own**0.5)
        made[target.name] = LowRank(a.bfloat16(), b.bfloat16())
    return made


def cut(weights: Weights, targets: list[AdapterTarget]) -> dict[str, LowRank]:
    """A rank's share."""

    def some(factor: Tensor, dim: int, spans: Any) -> Tensor:
        return factor if spans is None else torch.cat([factor.narrow(dim, a, b - a) for a, b in spans], dim)

    shares = {target.name: target for target in targets}
    return {
        name: LowRank(some(pair.a, -1, shares[name].columns), some(pair.b, -2, shares[name].rows))
        for name, pair in weights.items()
    }


def own_targets(directory: Path, world_size: int, rank: int) -> list[AdapterTarget]:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, world_size, rank)
    return targets_of(build_split(config, torch.bfloat16, layout, SingleRank()))


def merged(directory: Path, weights: Weights | None, sequences: list[list[int]]) -> list[Tensor]:
    """float32 logits of the bf16 weights with an adapter's products added."""
    model = auto_class(load_config(directory)).from_pretrained(
        str(directory), attn_implementation="eager", dtype=torch.bfloat16
    )
    model = model.float()
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        for name, pair in (weights or {}).items():
            delta = pair.b.float() @ pair.a.float()
            weight = parameters[name if name in parameters else f"{name}.weight"]
            module = model.get_submodule(name.rpartition(".")[0])
            weight += delta.mT if getattr(module, "is_transposed", False) else delta
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def run(runner: ModelRunner, slots: Mapping[int, int] = SLOTS, steps: list[dict[int, int]] = STEPS) -> Results:
    script = Script(LENGTHS)
    found: Results = []
    for tokens in steps:
        plan, sampled = script.step(tokens)
        logits = runner.forward(with_slots(plan, tokens, slots))
        if logits is not None:
            assert isinstance(logits, Tensor)
            found += [(*place, row) for place, row in zip(sampled, logits, strict=True)]
    return found


def with_slots(plan: StepPlan, tokens: dict[int, int], slots: Mapping[int, int]) -> StepPlan:
    order = sorted(tokens, key=lambda sequence: tokens[sequence] > 1)
    return structs.replace(plan, adapters=to_bytes([slots[sequence] for sequence in order]))


def errors(found: Results, expected: list[list[Tensor]]) -> Tensor:
    """Absolute errors; `expected`: the logits of each sequence, all of them."""
    return torch.cat([row - expected[sequence][position] for sequence, position, row in found]).abs()


def expected_of(directory: Path, adapters: Mapping[int, Weights], slots: Mapping[int, int] = SLOTS) -> Any:
    sequences = Script(LENGTHS).sequences
    by_slot = {slot: merged(directory, adapters.get(slot), sequences) for slot in {*slots.values(), -1}}
    return [by_slot[slots[sequence]][sequence] for sequence in range(len(sequences))], by_slot[-1]


# Of few experts, rounding to bf16 would choose others.
CHANGES = {"mixtral": ALL_EXPERTS, "qwen2_moe": ALL_EXPERTS, "deepseek_v2": ALL_EXPERTS}


# Of what is drawn. Trained adapters are nearer to the latter: they change a fraction of what their base computes, and
# where that is a tenth of it, a hundredth more error is what bf16 itself rounds.
STRENGTH = {"bf16": 0.3, "int8": 0.03}
CASES = [
    *((name, 1, 16, "", "bf16") for name in ("llama", "qwen2_moe", "qwen3_5_text", "deepseek_v2")),
    ("mixtral", 1, 16, "q8_0", "bf16"),
    *(("gpt_oss", 1, 16, "", "int8"), ("phi3", 2, 16, "", "int8"), ("llama", 3, 5, "q6_k", "int8")),
]
IN_CI = [
    *(("gpt_oss", 2, 16, "", "bf16"), ("llama", 2, 1, "", "bf16"), ("llama", 2, 256, "", "bf16")),
    *((name, 2, 16, "", "int8") for name in ("qwen2_moe", "deepseek_v2", "qwen3_next", "gemma4_text")),
    *(("granitemoehybrid", 2, 16, "", "bf16"), ("llama", 2, 256, "", "int8")),
]
MORE = [
    *((name, 2, 16, "", "bf16") for name in ("qwen3_next", "gemma4_text", "deepseek_v2", "phi3")),
    *((name, 2, 16, "", "int8") for name in ("qwen3_5_text", "mixtral")),
    ("llama", 2, 3, "", "bf16"),
    *(("llama", 2, rank, "", "int8") for rank in (1, 3, 64)),
    *((name, 1, 16, "q8_0", "int8") for name in ("llama", "mixtral")),
    *(("llama", 1, 16, "", "int8"), ("llama", 3, 5, "", "int8")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "world_size", "rank", "weights", "kept"), in_lanes([*CASES, *IN_CI, *MORE], CASES, IN_CI)
)
def test_rows_of_one_step_have_their_own_adapters(
    tmp_path: Path, model_type: str, world_size: int, rank: int, weights: str, kept: AdapterDtype
) -> None:
    """Prefill chunks and decodes, of sequences with one adapter, with another and with none: as near to the truth as
    they are without adapters."""
    directory = make_model(tmp_path, model_type, head_dim=32, **CHANGES.get(model_type, {}))
    whole, strength = whole_targets(load_config(directory)), STRENGTH[kept]
    adapters = {0: drawn(whole, rank, 1, strength), 5: drawn(whole, 3, 2, strength)}
    expected, plain = expected_of(directory, adapters)
    found, without = on_ring(directory, world_size, adapters, weights, kept)
    assert {sequence for sequence, _, _ in found} == {0, 1, 2, 3}
    ours, theirs = errors(found, expected), errors(without, plain)
    effect = errors(found, plain).mean()
    assert effect > (3 if kept == "bf16" else 1.5) * ours.mean(), (
        "adapters too weak for the comparison to mean anything"
    )
    assert ours.mean() < 1.6 * theirs.mean()
    assert ours.max() < 3 * theirs.max()


@pytest.mark.parametrize(
    ("model_type", "rank"), in_lanes([("llama", 16), ("llama", 256), ("deepseek_v2", 16)], [("llama", 16)])
)
def test_codes_of_8_bits_add_little_to_what_bf16_rounds(tmp_path: Path, model_type: str, rank: int) -> None:
    """Adapters that change all of what is computed: of their change a hundredth or two is lost; of likelihoods nothing
    that counts."""
    directory = make_model(tmp_path, model_type, head_dim=32, **CHANGES.get(model_type, {}))
    whole = whole_targets(load_config(directory))
    adapters = {0: drawn(whole, rank, 1), 5: drawn(whole, 3, 2)}
    expected, plain = expected_of(directory, adapters)
    runner = runner_of(directory, native=True)
    found, bytes_of = {}, {}
    kinds: tuple[AdapterDtype, AdapterDtype] = ("bf16", "int8")
    for kept in kinds:
        runner.serve_adapters(whole, torch.bfloat16, 8, 256, kept)
        for slot, adapter in adapters.items():
            decoder_of(runner).adapters.load(slot, adapter)
        found[kept] = run(runner)
        bytes_of[kept] = decoder_of(runner).adapters.bytes_of(0)
    exact, rounded = (errors(found[kept], expected).mean() for kept in kinds)
    effect = errors(found["int8"], plain).mean()
    assert rounded < exact + 0.02 * effect
    assert divergence(found["int8"], expected) < 1e-3 + 2 * divergence(found["bf16"], expected)
    assert bytes_of["int8"] < 0.6 * bytes_of["bf16"]


def divergence(found: Results, expected: list[list[Tensor]]) -> float:
    """Kullback and Leibler's, in nats per token, of what is drawn from."""
    return statistics.fmean(
        float(functional.kl_div(row.log_softmax(-1), expected[at][position].softmax(-1), reduction="sum"))
        for at, position, row in found
    )


def on_ring(
    directory: Path, world_size: int, adapters: Mapping[int, Weights], weights: str, kept: AdapterDtype
) -> tuple[Results, Results]:
    """What the leader of a ring finds, with adapters and without."""

    def work(ring: Collectives) -> tuple[Results, Results]:
        runner = runner_of(directory, native=True, collectives=ring, weights=weights)
        own = own_targets(directory, world_size, ring.rank)
        decoder_of(runner).adapters.keep_as(kept)
        for slot, adapter in adapters.items():
            decoder_of(runner).adapters.load(slot, cut(adapter, own))
        return run(runner), run(runner, dict.fromkeys(SLOTS, -1))

    return in_shared_memory(world_size, work)[0]


def same(found: Results, expected: Results, sequences: set[int]) -> bool:
    """Whether `sequences` have the same bits in both, wherever `expected` has them."""
    known = {(sequence, position): row for sequence, position, row in expected if sequence in sequences}
    both = [(row, known[at]) for *place, row in found if (at := (place[0], place[1])) in known]
    assert both, "they have nothing in common"
    return all(torch.equal(row, other) for row, other in both)


@pytest.mark.parametrize(
    ("model_type", "weights", "kept"),
    in_lanes(
        [
            *(("llama", "", "int8"), ("llama", "", "bf16"), ("mixtral", "q4_k", "int8")),
            *(("deepseek_v2", "", "int8"), ("mixtral", "", "bf16"), ("deepseek_v2", "", "bf16")),
        ],
        [("llama", "", "int8")],
        [("llama", "", "bf16"), ("mixtral", "q4_k", "int8"), ("deepseek_v2", "", "int8")],
    ),
)
def test_a_row_has_the_bits_that_it_has_alone(
    tmp_path: Path, model_type: str, weights: str, kept: AdapterDtype
) -> None:
    """Whatever adapters are beside it, and whatever slots hold that it does not name."""
    directory = make_model(tmp_path, model_type, head_dim=32)
    whole = whole_targets(load_config(directory))
    adapters = [drawn(whole, rank, rank) for rank in (16, 7, 40)]
    fresh = run(runner_of(directory, native=True, weights=weights), dict.fromkeys(SLOTS, -1))
    runner = runner_of(directory, native=True, weights=weights)
    decoder = decoder_of(runner)
    decoder.adapters.keep_as(kept)
    decoder.adapters.load(0, adapters[0])
    decoder.adapters.load(5, adapters[1])
    together = run(runner)
    assert same(together, fresh, {1})
    assert not same(together, fresh, {0})
    assert same(run(runner, dict.fromkeys(SLOTS, -1)), fresh, {0, 1, 2, 3})
    for alone in SLOTS:
        steps = [{alone: tokens[alone]} for tokens in STEPS if alone in tokens]
        assert same(run(runner, steps=steps), together, {alone})
    decoder.adapters.load(0, adapters[2])
    replaced = run(runner)
    assert same(replaced, together, {1, 2})
    assert not same(replaced, together, {0})
    assert not same(replaced, together, {3})
    decoder.adapters.load(0, adapters[0])
    assert same(run(runner), together, {0, 1, 2, 3})
    assert decoder.adapters.bytes_of(0) > decoder.adapters.bytes_of(5) > decoder.adapters.bytes_of(1) == 0
    decoder.adapters.drop(0)
    dropped = run(runner)
    assert same(dropped, fresh, {0, 1, 3})
    assert same(dropped, together, {2})
    decoder.adapters.drop(5)
    assert same(run(runner), fresh, {0, 1, 2, 3})


def test_some_modules_and_some_layers_alone(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "qwen3_5_text", head_dim=32)
    whole = whole_targets(load_config(directory))
    some = {
        name: pair
        for name, pair in drawn(whole, 8, 3).items()
        if ".0." in name and name.endswith(("v_proj", "in_proj_z", "up_proj"))
    }
    assert len(some) > 1
    expected, plain = expected_of(directory, {0: some})
    runner = runner_of(directory, native=True)
    decoder_of(runner).adapters.load(0, some)
    ours = errors(run(runner), expected)
    assert ours.mean() < 1.2 * errors(run(runner, dict.fromkeys(SLOTS, -1)), plain).mean()
    assert errors(run(runner), plain).mean() > ours.mean()


def test_what_the_kernels_cannot_adapt_and_slots_that_never_were_are_refused(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    runner = runner_of(directory, native=True)
    decoder, whole = decoder_of(runner), whole_targets(load_config(directory))
    adapter = drawn(whole, 4, 1)
    decoder.adapters.load(0, adapter)
    before = run(runner, dict.fromkeys(SLOTS, 0))
    with pytest.raises(ModelLoadError, match=r"changes model\.layers\.7\.mlp, which the native CPU kernels"):
        decoder.adapters.load(0, {**adapter, "model.layers.7.mlp": next(iter(adapter.values()))})
    assert same(run(runner, dict.fromkeys(SLOTS, 0)), before, {0, 1, 2, 3})
    tokens = {0: 2, 1: 2}
    plan, _ = Script(LENGTHS).step(tokens)
    for slots in ([0, 4096], [-2, 0], [0]):
        with pytest.raises(IndexError, match="do not exist"):
            runner.forward(structs.replace(plan, adapters=to_bytes(slots)))


def test_weights_of_a_file_take_adapters_without_the_model(tmp_path: Path) -> None:
    """What a packed file is read to knows what module each row is of."""
    directory = make_model(tmp_path, "qwen2_moe", head_dim=32)
    config = load_config(directory)
    runner = runner_of(directory, native=True)
    decoder, adapter = decoder_of(runner), drawn(whole_targets(config), 16, 1)
    layout = ShardLayout.from_config(config, 1, 0)
    facts = ModelFacts(layer_states(config, layout), config.hidden_size, 64, HeadCounts.from_config(config), [131])
    with (tmp_path / "packed").open("w+b") as file:
        write(file.fileno(), "identity", facts, decoder.packed)
        found = PackedFile(os.dup(file.fileno()))
        packed = found.read(2, lambda done, total: None)
        found.close()
    again = native_runner(packed, [131], RunnerRequest(None, runner._store, layout, SingleRank(), CPU, 2), "cached")
    for one in (runner, again):
        decoder_of(one).adapters.load(0, adapter)
    assert same(run(again), run(runner), {0, 1, 2, 3})
