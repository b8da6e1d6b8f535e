"""Indexed attention (DSA) against a reference in float64, in texts several times longer than what is chosen.

The reference is written from the definition, not from our modules or transformers': DeepSeek-V3.2-Exp, section 2.1 of
its report, and DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1. It is given what each of our layers is
given, so that a layer that computes otherwise is told from one that comes after it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.families.registry import DECODERS
from services.executor.model import indexing
from services.executor.model.attention import page_of
from services.executor.model.indexing import IndexerMasks
from services.executor.model.step_context import StepContext
from services.executor.worker.runner import ModelRunner
from shared.data_types import BlockDType
from tests.docs.models import PROVEN_ERROR
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, Script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of

CHOSEN, LENGTHS = 8, (61, 40, 27)
# How far a score may be off, in float32, as a share of the sum over the heads of |weight| |query| |key|: 64 times the
# error of one operation. The reference does not decide between scores that are nearer to each other.
ROUNDING = 2.0**-18
# At most so many rows have such scores at the border of what is chosen: of few, the comparison would say little.
UNDECIDED = 0.01
# Whose indexers turn neighbouring values, as latent attention does; those of others turn halves.
INTERLEAVED = {"dots3_note_text", "glm_moe_dsa"}
LAST = {"hy_v4"}  # whose indexers turn the last values of a head; those of others turn the first
WHOLE = {"deepseek_v32", "glm_moe_dsa"}  # of which the reference computes attention too: no gates, no sinks
# How far what is kept is from what was written, at most, as a share of the largest value of its block: half a step.
STORED = {"int8": 0.5 / 127, "fp8": 16 / 448}


def rotate(values: Tensor, positions: Tensor, theta: float, *, neighbours: bool) -> Tensor:
    """[L, ..., d] turned by `positions` [L], and laid out in halves."""
    half = values.shape[-1] // 2
    first, second = (values[..., ::2], values[..., 1::2]) if neighbours else values.split(half, -1)
    angles = positions[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = angles.view(len(positions), *[1] * (values.dim() - 2), half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


class Scores(NamedTuple):
    of_keys: Tensor  # [L, L]
    rounding: Tensor  # [L, L]: how far a score may be off
    keys: Tensor  # [L, d], as they are written


class Reference:
    """A model's indexers and its latent attention, in float64."""

    def __init__(self, model: Any, kv_dtype: BlockDType = "bf16") -> None:
        self.kv_dtype = kv_dtype
        self._weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self._config = model.config
        if self._config.model_type == "dots3_note_text":
            self._config = self._config.per_layer_config[0]  # its other layers are no matter of the reference
        rope = model.config.rope_parameters
        self._theta: float = rope.get("indexed_attention", rope)["rope_theta"]

    def scores(self, layer: int, hidden: Tensor, residual: Tensor, kept: Tensor | None) -> Scores:
        """`hidden` [L, hidden], `residual` [L, rank]; `kept` [F, d]: the keys of full blocks where they are compressed,
        which blocks behind them read."""
        config, kind = self._config, self._config.model_type
        epsilon = config.rms_norm_eps if kind in LAST else 1e-6
        queries = (residual @ self._of(layer, "indexer.wq_b").mT).unflatten(-1, (config.index_n_heads, -1))
        keys = torch.nn.functional.layer_norm(
            hidden @ self._of(layer, "indexer.wk").mT,
            (config.index_head_dim,),
            self._of(layer, "indexer.k_norm"),
            self._weights[f"model.layers.{layer}.self_attn.indexer.k_norm.bias"],
            epsilon,
        )
        queries, keys = self._turned(queries), self._turned(keys)
        weights = hidden @ self._of(layer, "indexer.weights_proj").mT
        weights = weights * (config.index_n_heads * config.index_head_dim) ** -0.5

        def scored(keys: Tensor) -> Tensor:
            return torch.einsum("qh,qhk->qk", weights, (queries @ keys.mT).relu())

        sizes = (weights.abs() * queries.norm(dim=-1)).sum(-1, keepdim=True) * keys.norm(dim=-1)
        return Scores(of_blocks(scored(keys), kept, scored), sizes * ROUNDING, keys)

    def lines(self, layer: int, hidden: Tensor) -> Tensor:
        """[L, latent and rotated part of the key], as they are written."""
        config = self._config
        made = hidden @ self._of(layer, "kv_a_proj_with_mqa").mT
        latents = rms_norm(made[:, : config.kv_lora_rank], self._of(layer, "kv_a_layernorm"), config.rms_norm_eps)
        return torch.cat((latents, self._rotated(made[:, config.kv_lora_rank :])), -1)

    def residual(self, layer: int, hidden: Tensor) -> Tensor:
        made = hidden @ self._of(layer, "q_a_proj").mT
        return rms_norm(made, self._of(layer, "q_a_layernorm"), self._config.rms_norm_eps)

    def attended(self, layer: int, hidden: Tensor, chosen: Tensor, kept: Tensor | None) -> Tensor:
        """[L, hidden] of what each row has `chosen`, bool [L, L]; `kept` as of `scores`."""
        config = self._config
        plain = config.qk_nope_head_dim
        queries = (self.residual(layer, hidden) @ self._of(layer, "q_b_proj").mT).unflatten(
            -1, (config.num_attention_heads, -1)
        )
        rotated = self._rotated(queries[..., plain:])
        of_heads = self._of(layer, "kv_b_proj").unflatten(0, (config.num_attention_heads, -1))

        def scored(lines: Tensor) -> Tensor:
            latents, turned = lines.split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
            keys = torch.einsum("kr,hnr->hkn", latents, of_heads[:, :plain])
            scores = torch.einsum("qhn,hkn->hqk", queries[..., :plain], keys)
            return (scores + torch.einsum("qhn,kn->hqk", rotated, turned)) * config.qk_head_dim**-0.5

        def values(lines: Tensor) -> Tensor:
            return torch.einsum("kr,hvr->hkv", lines[:, : config.kv_lora_rank], of_heads[:, plain:])

        lines = self.lines(layer, hidden)
        scores = of_blocks(scored(lines), kept, scored).masked_fill(~chosen, float("-inf"))
        weights = scores.softmax(-1)
        if kept is None:
            out = weights @ values(lines)
        else:
            before = behind(len(hidden))[:, : len(kept)]
            of_kept = weights[..., : len(kept)] * before
            weights[..., : len(kept)] *= ~before
            out = weights @ values(lines) + of_kept @ values(kept)
        return out.transpose(0, 1).flatten(1) @ self._of(layer, "o_proj").mT

    def _of(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.self_attn.{name}.weight"]

    def _rotated(self, values: Tensor) -> Tensor:
        return rotate(values, torch.arange(len(values)), self._theta, neighbours=True)

    def _turned(self, values: Tensor) -> Tensor:
        config, positions = self._config, torch.arange(len(values))
        neighbours, width = config.model_type in INTERLEAVED, config.qk_rope_head_dim
        if config.model_type in LAST:
            plain, turned = values[..., :-width], values[..., -width:]
            return torch.cat((plain, rotate(turned, positions, self._theta, neighbours=neighbours)), -1)
        turned = rotate(values[..., :width], positions, self._theta, neighbours=neighbours)
        return torch.cat((turned, values[..., width:]), -1)


def behind(length: int) -> Tensor:
    """bool [L, L]: rows whose block is behind that of the key."""
    blocks = torch.arange(length) // BLOCK_SIZE
    return blocks[:, None] > blocks


def of_blocks(written: Tensor, kept: Tensor | None, scored: Any) -> Tensor:
    """Scores [..., L, L] of keys as a row reads them: as written in its own block, as `kept` in those before."""
    if kept is None:
        return written
    before = behind(written.shape[-1])[:, : len(kept)]
    read = written.clone()
    read[..., : len(kept)] = torch.where(before, scored(kept), written[..., : len(kept)])
    return read


@dataclass
class Layer:
    """What a layer was given and made of each token, by (sequence, position)."""

    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    residual: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    output: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # The positions that it attends to; empty where the layer has no indexer.
    chosen: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    page: int = 0  # where its lines are kept; the indexer's keys lie in the next

    def of(self, name: str, sequence: int) -> Tensor:
        rows: dict[tuple[int, int], Tensor] = getattr(self, name)
        return torch.stack([rows[sequence, at] for at in range(LENGTHS[sequence])]).double()


class Watch:
    """Around the layers of a rank's model."""

    def __init__(self, model: Any) -> None:
        self.layers: defaultdict[int, Layer] = defaultdict(Layer)
        self.rows: list[tuple[int, int]] = []  # (sequence, position) of each row of the step
        for index, layer in enumerate(model.base_model.layers):
            attention = layer.self_attn
            self.layers[index].page = page_of(attention)
            attention.register_forward_pre_hook(self._given(index), with_kwargs=True)
            attention.register_forward_hook(self._made(index))
            if getattr(attention, "indexer", None) is not None:
                attention.indexer.forward = self._choosing(index, attention.indexer.forward)

    def _given(self, index: int) -> Any:
        def note(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            self._step: StepContext = named["step"]
            self.layers[index].hidden.update(zip(self.rows, named["hidden_states"][0].clone(), strict=True))

        return note

    def _made(self, index: int) -> Any:
        def note(module: Any, arguments: Any, output: Any) -> None:
            self.layers[index].output.update(zip(self.rows, output[0][0].clone(), strict=True))

        return note

    def _choosing(self, index: int, choose: Any) -> Any:
        def chosen(hidden: Tensor, residual: Tensor, *others: Any, **named: Any) -> IndexerMasks:
            choice: IndexerMasks = choose(hidden, residual, *others, **named)
            layer = self.layers[index]
            layer.residual.update(zip(self.rows, residual[0].clone(), strict=True))
            layer.chosen.update((self.rows[row], keys) for row, keys in attended(self._step, choice))
            return choice

        return chosen


def attended(step: StepContext, choice: IndexerMasks) -> Iterator[tuple[int, set[int]]]:
    """(row, positions that it attends to)."""
    if step.num_decodes:
        batch = step.decodes(None)
        for bucket, keep in zip(batch.buckets, choice.decodes, strict=True):
            seen = bucket.mask[:, 0, 0] == 0
            rows = batch.rows_of(bucket, torch.device("cpu")).tolist()
            for row, keys in zip(rows, seen if keep is None else seen & keep, strict=True):
                yield row, set(keys.nonzero()[:, 0].tolist())
    for chunk, keep in zip(step.prefills(None), choice.prefills, strict=True):
        count = chunk.stop - chunk.start
        seen = torch.ones(count, count).tril() > 0 if chunk.mask is None else chunk.mask == 0
        positions = torch.arange(seen.shape[1]) if chunk.positions is None else chunk.positions
        for row, keys in enumerate(seen if keep is None else seen & keep):
            yield chunk.start + row, set(positions[keys].tolist())


def steps_of(sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    """{sequence: tokens} of each step: of each sequence as many at once as `sizes` has."""
    left = list(LENGTHS)
    while any(left):
        tokens = {at: min(size, left[at]) for at, size in enumerate(sizes) if left[at]}
        for at, count in tokens.items():
            left[at] -= count
        yield tokens


Logits = dict[tuple[int, int], Tensor]  # by (sequence, position)


class Computed(NamedTuple):
    logits: Logits
    layers: dict[int, Layer]
    # Of (page layer, sequence): the lines of full blocks, as they are kept.
    kept: dict[tuple[int, int], Tensor]


def compute(directory: Path, sizes: Sequence[int], ranks: int = 1, kv_dtype: BlockDType = "bf16") -> list[Computed]:
    """What each rank computes of three texts, at once."""
    compresses = kv_dtype != "bf16"

    def work(collectives: Collectives) -> Computed:
        runner = make_runner(directory, collectives, kv_dtype=kv_dtype, num_quantized=NUM_BLOCKS * compresses)
        watch, script = Watch(runner._model), Script(LENGTHS, compresses=compresses)
        logits = run(runner, script, sizes, watch)
        return Computed(logits, watch.layers, kept_lines(runner, script) if compresses else {})

    return on_ring(ranks, work)


def run(runner: ModelRunner, script: Script, sizes: Sequence[int], watch: Watch | None = None) -> Logits:
    """The logits of every token, on rank 0."""
    logits: Logits = {}
    for tokens in steps_of(sizes):
        plan, sampled = script.step(tokens, every_token=True)
        if watch is not None:
            watch.rows = sampled
        rows = runner.forward(plan)
        if isinstance(rows, Tensor):
            logits.update(zip(sampled, rows, strict=True))
    return logits


@torch.inference_mode()
def kept_lines(runner: ModelRunner, script: Script) -> dict[tuple[int, int], Tensor]:
    lines = {}
    for page in range(len(runner._store.shape.pages)):
        for sequence, length in enumerate(LENGTHS):
            full = torch.tensor(script._tables[sequence][: length // BLOCK_SIZE]) + NUM_BLOCKS
            lines[page, sequence] = runner._store.gather(page, full, 1)[0, 0, 0].double()
    return lines


def make(kind: str, directory: Path) -> Any:
    """transformers' model, four layers of which two choose, saved."""
    settings = {
        **settings_of(kind),
        "index_topk": CHOSEN,
        "rope_parameters": None,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    if "indexer_types" in settings:
        settings["indexer_types"] = ["full", "shared", "shared", "full"]
    if "layer_types" in settings:
        settings["layer_types"] = [*settings["layer_types"], "indexed_attention"]
    model = build(kind, settings)
    model.save_pretrained(str(directory))
    return model


INDEXED = sorted(name for name, family in DECODERS.items() if family.states == "indexed")


@pytest.fixture(scope="module", params=in_lanes(INDEXED, ["deepseek_v32", "dots3_note_text"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return make(request.param, directory), directory


def undecided(scores: Scores, row: int, chosen: set[int]) -> bool:
    """Whether scores at the border of the highest are too near to each other. Fails where `chosen` are not the
    highest but for such."""
    seen = scores.of_keys[row, : row + 1]
    if len(seen) <= CHOSEN:
        assert chosen == set(range(row + 1))
        return False
    assert len(chosen) == CHOSEN
    order = seen.argsort(descending=True, stable=True).tolist()
    least = seen[order[CHOSEN - 1]]
    near = set(((seen - least).abs() <= 2 * scores.rounding[row, : row + 1]).nonzero()[:, 0].tolist())
    assert chosen ^ set(order[:CHOSEN]) <= near
    return order[CHOSEN] in near


PIECES = (61, 40, 27)
MIXED = (13, 1, 4)


@pytest.mark.parametrize(
    ("sizes", "ranks", "kv_dtype"),
    [
        pytest.param(PIECES, 1, "bf16", id="in_one_piece", marks=pytest.mark.slow),
        pytest.param((7, 16, 5), 1, "bf16", id="in_chunks", marks=pytest.mark.nightly),
        pytest.param((1, 1, 1), 1, "bf16", id="by_decodes", marks=pytest.mark.nightly),
        pytest.param(MIXED, 2, "bf16", id="on_two_ranks"),
        pytest.param(MIXED, 1, "int8", id="in_int8", marks=pytest.mark.nightly),
        pytest.param(PIECES, 1, "fp8", id="in_fp8"),
    ],
)
def test_the_highest_scores_are_chosen_and_alone_attended_to(
    model: tuple[Any, Path], sizes: tuple[int, ...], ranks: int, kv_dtype: BlockDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_CPU_BYTES", 1 << 13)  # a few rows are scored at once
    transformers, directory = model
    reference = Reference(transformers, kv_dtype)
    first, *others = compute(directory, sizes, ranks, kv_dtype)
    rows = near = 0
    chosen: dict[tuple[int, int], set[int]] = {}
    for index, layer in sorted(first.layers.items()):
        chosen = layer.chosen or chosen
        for sequence in range(len(LENGTHS)):
            kept = [first.kept.get((layer.page + at, sequence)) for at in range(2)]
            if layer.chosen:
                near += check_choice(reference, index, layer, sequence, kept[1])
                rows += LENGTHS[sequence]
            if transformers.config.model_type in WHOLE:
                check_attention(reference, index, layer, sequence, chosen, kept[0])
    assert rows >= 2 * sum(LENGTHS)
    assert near <= UNDECIDED * rows
    for other in others:
        assert all(other.layers[index].chosen == layer.chosen for index, layer in first.layers.items())
    if kv_dtype == "bf16":
        check_logits(first.logits, logits_of(transformers, Script(LENGTHS).sequences))


def check_logits(logits: Logits, expected: list[Tensor]) -> None:
    assert len(logits) == sum(LENGTHS)
    for (sequence, at), row in logits.items():
        assert (row - expected[sequence][at]).abs().max() < PROVEN_ERROR


def check_choice(reference: Reference, index: int, layer: Layer, sequence: int, kept: Tensor | None) -> int:
    """How many rows the reference does not decide."""
    scores = reference.scores(index, layer.of("hidden", sequence), layer.of("residual", sequence), kept)
    check_kept(kept, scores.keys, reference.kv_dtype)
    rows = range(LENGTHS[sequence])
    return sum(undecided(scores, row, layer.chosen[sequence, row]) for row in rows)


def check_attention(
    reference: Reference,
    index: int,
    layer: Layer,
    sequence: int,
    chosen: dict[tuple[int, int], set[int]],
    kept: Tensor | None,
) -> None:
    hidden, length = layer.of("hidden", sequence), LENGTHS[sequence]
    check_kept(kept, reference.lines(index, hidden), reference.kv_dtype)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        mask[row, list(chosen[sequence, row])] = True
    expected = reference.attended(index, hidden, mask, kept)
    assert expected.std() > 0.1
    assert (layer.of("output", sequence) - expected).abs().max() < PROVEN_ERROR


def check_kept(kept: Tensor | None, written: Tensor, kv_dtype: BlockDType) -> None:
    if kept is not None:
        blocks = written[: len(kept)].view(-1, BLOCK_SIZE * written.shape[1])
        largest = blocks.abs().amax(-1, keepdim=True)
        assert ((kept.view_as(blocks) - blocks).abs() <= 1.001 * STORED[kv_dtype] * largest).all()


def earliest(scores: Tensor, count: int, dim: int = -1, **others: Any) -> Any:
    """In the place of `Tensor.topk`: of those that tie the earliest."""
    ordered = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((ordered.values[..., :count], ordered.indices[..., :count]))


@torch.inference_mode()
def by_its_cache(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits [L, vocab]: of the first tokens at once, and of each later one behind them."""
    begun = model(torch.tensor([tokens[: 2 * CHOSEN]]), use_cache=True)
    rows = [begun.logits[0]]
    for token in tokens[2 * CHOSEN :]:
        rows.append(model(torch.tensor([[token]]), past_key_values=begun.past_key_values).logits[0])
    return torch.cat(rows)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["deepseek_v4", "glm_moe_dsa"])
def test_transformers_differs_from_itself_by_the_order_of_ties_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An indexer of one head gives each key a score of exactly 0 whose product is negative. Which of those that tie
    at the border are chosen `topk` leaves open, and with a row's length, so with a cache, it changes."""
    model = build(kind, {**settings_of(kind), "index_n_heads": 1})
    model.save_pretrained(str(tmp_path))
    sequences = Script(LENGTHS).sequences
    whole, cached = logits_of(model, sequences[-1:])[0], by_its_cache(model, sequences[-1])
    assert (whole - cached).abs().max() > 100 * PROVEN_ERROR

    monkeypatch.setattr(torch.Tensor, "topk", earliest)
    expected = logits_of(model, sequences)
    assert (by_its_cache(model, sequences[-1]) - expected[-1]).abs().max() < PROVEN_ERROR
    for sizes in (PIECES, MIXED):
        check_logits(run(make_runner(tmp_path, SingleRank()), Script(LENGTHS), sizes), expected)
