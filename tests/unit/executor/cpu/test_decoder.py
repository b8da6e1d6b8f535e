"""The native kernels against transformers: nearer to the float32 truth than PyTorch in bf16 is."""

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.collectives.shared_memory import SharedMemory, make_area
from services.executor.core.progress import ProgressCounter
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import as_int32, to_bytes
from services.executor.cpu.decoder import NativeDecoder
from services.executor.cpu.packed_linear import PackedLinear
from services.executor.cpu.quantized import short_exponents
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.codecs import COMPRESSING, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.products import use_products
from services.executor.model.quantizing import CODECS
from services.executor.sampling.candidates import largest_of
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.runner import NO_POOLS, ModelRunner, widths_of
from shared.errors import RingLost
from tests.unit.executor.model import ring as rings
from tests.unit.executor.model.lanes import LOWERED, in_lanes, natively
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, NUM_SLOTS, SETTINGS, mixed_script
from tests.unit.executor.model.test_compressed import seal
from tests.unit.executor.model.tiny import GEMMA4_EXPERTS, auto_class, make_model

pytestmark = natively


def holds_codes(linear: PackedLinear) -> bool:
    """Whether it is quantized, and not bf16 in one of its forms."""
    return linear.form not in (None, short_exponents(linear.inputs))


def runner_of(
    directory: Path,
    native: bool,
    threads: int | None = None,
    num_blocks: int = NUM_BLOCKS,
    codec: Codec | None = None,
    collectives: Collectives | None = None,
    cpus: Sequence[int] = (),
    weights: str = "",
) -> ModelRunner:
    config = load_config(directory)
    ring = collectives or SingleRank()
    threads = threads or (2 if ring.world_size == 1 else 1)  # ranks wait for each other's cores
    layout = ShardLayout.from_config(config, ring.world_size, ring.rank)
    dtype = torch.bfloat16
    kind = CODECS[weights] if weights else None
    model = load_model(directory, dtype, layout, ring, CPU, lambda done, total: None, kind, keep_codes=True)
    shape = store_shape(SETTINGS, "bf16" if codec is None else codec.name, layer_states(config, layout), dtype)
    num_slots = NUM_SLOTS if shape.slot else 0
    store = KvStore(shape, num_blocks, CPU, num_blocks if shape.moves_full_blocks else 0, num_slots)
    if native:
        return backend_of(CPU).runner(RunnerRequest(model, store, layout, ring, CPU, threads, cpus=cpus))
    use_products(model)
    return ModelRunner(model, widths_of(model), store, ring, CPU)


def truth(directory: Path, sequences: list[list[int]]) -> list[Tensor]:
    """float32 logits of the bf16 weights."""
    model = auto_class(load_config(directory)).from_pretrained(
        str(directory), attn_implementation="eager", dtype=torch.bfloat16
    )
    model = model.float()
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def errors(runner: ModelRunner, expected: list[Tensor]) -> Tensor:
    """Absolute errors over a script of chunked prefill, decodes and both at once. Empty but on the leader."""
    found = [torch.empty(0)]
    for plan, sampled in mixed_script()[1]:
        logits = runner.forward(plan)
        if logits is None:
            continue
        assert isinstance(logits, Tensor)
        assert logits.shape[0] == len(sampled)
        found += [row - expected[sequence][position] for row, (sequence, position) in zip(logits, sampled, strict=True)]
    return torch.cat(found).abs()


@pytest.mark.parametrize(
    "model_type", in_lanes(LOWERED, ["gemma4_text", "gpt_oss", "granitemoehybrid", "llama", "qwen3_5_text"])
)
def test_nearer_to_the_truth_than_pytorch(tmp_path: Path, model_type: str) -> None:
    directory = make_model(tmp_path, model_type, head_dim=32)
    native, plain = runner_of(directory, native=True), runner_of(directory, native=False)
    assert native.is_native
    assert not plain.is_native
    expected = truth(directory, mixed_script()[0].sequences)
    assert expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"
    ours, theirs = errors(native, expected), errors(plain, expected)
    assert ours.mean() < theirs.mean()
    assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("world_size", in_lanes([1, 2, 3], (), [3]))
def test_experts_with_norms_of_their_own(tmp_path: Path, world_size: int) -> None:
    directory = make_model(tmp_path, "gemma4_text", head_dim=32, **GEMMA4_EXPERTS)
    expected = truth(directory, mixed_script()[0].sequences)
    ours = ring_errors(directory, world_size, expected)
    assert ours.mean() < errors(runner_of(directory, native=False), expected).mean()


@pytest.mark.parametrize("heads", in_lanes([40, 48, 49, 100], [49]))
def test_many_heads_on_one_share_a_tile_or_have_several(tmp_path: Path, heads: int) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": 1, "hidden_size": 2 * heads}
    directory = make_model(tmp_path, "llama", head_dim=32, **changes)
    expected = truth(directory, mixed_script()[0].sequences)
    native = runner_of(directory, native=True)
    assert native.is_native
    assert errors(native, expected).mean() < errors(runner_of(directory, native=False), expected).mean()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_split_over_threads(tmp_path: Path, threads: int) -> None:
    """One decode of a long context: the threads share its keys and merge what they find."""
    directory = make_model(
        tmp_path, "llama", head_dim=32, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048
    )
    length = 1030
    script = rings.Script([length], num_blocks=300)
    native = runner_of(directory, native=True, threads=threads, num_blocks=300)
    expected = truth(directory, script.sequences)[0]
    for begin in range(0, length - 2, 257):
        native.forward(script.step({0: min(257, length - 2 - begin)}, sample=False)[0])
    for position in (length - 2, length - 1):
        logits = native.forward(script.step({0: 1})[0])
        assert isinstance(logits, Tensor)
        assert (logits[0] - expected[position]).abs().mean() < 0.03 * expected[position].std()


@pytest.mark.parametrize(
    ("model_type", "codec", "weights"),
    [
        *(("llama", None, ""), ("mistral", INT8, ""), ("gpt_oss", INT8, "")),
        *in_lanes(
            [
                ("qwen3_5_text", INT8, "q4_k"),
                ("granitemoehybrid", INT8, ""),
                ("gemma4_text", None, "q4_k"),
                ("deepseek_v2", INT8, "q4_k"),
            ],
            (),
        ),
        *in_lanes(
            [
                *(("llama", INT8, ""), ("mistral", None, ""), ("qwen2_moe", None, "")),
                *(("qwen3_5_text", None, ""), ("dots1", None, "q4_k"), ("minimax_m2", None, "")),
                *(("gemma4_text", INT8, ""), ("gemma4_unified_text", None, ""), ("deepseek_v3", None, "")),
                *(("llama", INT8, "q4_k"), ("mistral", INT8, "q6_k")),
            ],
            (),
            (),
        ),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(
    tmp_path: Path, model_type: str, codec: Codec | None, weights: str
) -> None:
    """Decoded alone, decoded in a batch by other threads, or as part of a chunk: the same bits."""
    window = {"sliding_window": 300} if model_type == "mistral" else {}
    directory = make_model(tmp_path, model_type, head_dim=32, max_position_embeddings=2048, **window)
    lengths = [1100, 540, 37, 5, 700, 64, 65, 1, 2, 3, 4, 6, 7, 8]

    def last_four(batches: list[dict[int, int]], threads: int) -> Tensor:
        """Logits of the first sequence's last four tokens, which `batches` compute."""
        runner = runner_of(directory, native=True, threads=threads, num_blocks=900, codec=codec, weights=weights)
        script = rings.Script(lengths, num_blocks=900)
        for sequence, length in enumerate(lengths):
            rest = length - 4 if sequence == 0 else length - 1
            for begin in range(0, rest, 256):
                runner.forward(script.step({sequence: min(256, rest - begin)}, sample=False)[0])
        if codec:
            seal(script, runner._store, {0: lengths[0] - 4})
        found = []
        for batch in batches:
            plan, _ = script.step(batch)
            rows = np.cumsum(as_int32(plan.query_lens))
            at = rows[-1] if batch[0] > 1 else 1  # decodes come first, chunks last
            wanted = np.arange(at - batch[0], at)
            logits = runner.forward(structs.replace(plan, sample_rows=to_bytes(wanted)))
            assert isinstance(logits, Tensor)
            found.append(logits)
        return torch.cat(found)

    alone = last_four([{0: 1}] * 4, threads=1)
    among = last_four([dict.fromkeys(range(len(lengths)), 1), {0: 1}, {0: 1}, {0: 1}], threads=3)
    chunk = last_four([{1: 1, 2: 1, 0: 4}], threads=2)
    assert torch.equal(alone, among)
    assert torch.equal(alone, chunk)


def test_a_row_does_not_depend_on_whether_rows_before_it_see_all_of_a_round(tmp_path: Path) -> None:
    """Scores of rows that all see its 64 keys are scaled later: rounded as others, and not with a sum."""
    changes = {"num_attention_heads": 384, "num_key_value_heads": 8, "hidden_size": 384}
    directory = make_model(tmp_path, "llama", head_dim=32, max_position_embeddings=2048, **changes)

    def ends_of_rounds(last_chunk: int) -> Tensor:
        """Logits of the last token of each of 20 rounds, in a chunk of so many."""
        runner = runner_of(directory, native=True, num_blocks=330)
        script = rings.Script([20 * 64 + 1], num_blocks=330)
        found = []
        for _ in range(20):
            runner.forward(script.step({0: 64 - last_chunk}, sample=False)[0])
            logits = runner.forward(script.step({0: last_chunk})[0])
            assert isinstance(logits, Tensor)
            found.append(logits)
        return torch.cat(found)

    assert torch.equal(ends_of_rounds(1), ends_of_rounds(2))


@pytest.mark.parametrize("width", [1, 15, 16, 49, 4099])
def test_finds_the_largest_logit(tmp_path: Path, width: int) -> None:
    decoder = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True)._decoder
    assert decoder is not None
    torch.manual_seed(2)
    logits = torch.randint(-3, 4, (40, width)).float()  # many tie
    logits[1], logits[2] = -torch.inf, -5.0
    logits[3, -1] = torch.nan
    logits[4, 0] = torch.inf
    logits[5, width // 2 :] = torch.nan
    expected, at = largest_of(logits)
    for rows in (slice(None), *(slice(row, row + 1) for row in range(6))):
        values, tokens = decoder.largest(logits[rows])
        assert torch.equal(tokens, at[rows])
        assert torch.equal(values.nan_to_num(nan=99), expected[rows].nan_to_num(nan=99))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 100])
def test_finds_the_largest_logit_while_it_computes(tmp_path: Path, threads: int, rows: int) -> None:
    directory = make_model(tmp_path, "granite", head_dim=32, logits_scaling=-3.0, vocab_size=131)
    runner = runner_of(directory, native=True, threads=threads)
    decoder = runner._decoder
    assert decoder is not None
    plan, _ = rings.Script([100]).step({0: 100})
    plan = structs.replace(plan, sample_rows=to_bytes(list(range(100 - rows, 100))))
    expected = decoder.largest(decoder.forward(plan, ProgressCounter.unread(), NO_POOLS)[0])
    values, tokens = decoder.forward_to_largest(plan, ProgressCounter.unread())
    assert torch.equal(values, expected[0])
    assert torch.equal(tokens, expected[1])


@pytest.mark.slow
def test_on_a_ring_a_row_does_not_depend_on_who_attends_for_it(tmp_path: Path) -> None:
    """Two ranks share a KV head, and which of them attends for a row depends on its neighbours; its bits do not."""
    directory = make_model(tmp_path, "llama", head_dim=32, max_position_embeddings=2048)
    lengths = [600, 40, 41, 42]

    def logits_of(batches: list[dict[int, int]]) -> Tensor:
        """Of the first sequence's last four tokens, which `batches` compute after the others' beginnings."""

        def work(ring: Collectives) -> list[Tensor]:
            runner = runner_of(directory, native=True, threads=2, num_blocks=900, collectives=ring)
            assert runner.is_native
            script = rings.Script(lengths, num_blocks=900)
            for sequence, length in enumerate(lengths):
                rest = length - 4 if sequence == 0 else length - 1
                for begin in range(0, rest, 200):
                    runner.forward(script.step({sequence: min(200, rest - begin)}, sample=False)[0])
            found = []
            for batch in batches:
                plan, sampled = script.step(batch, every_token=True)
                logits = runner.forward(plan)
                if logits is not None:
                    assert isinstance(logits, Tensor)
                    found += [row for row, (sequence, _) in zip(logits, sampled, strict=True) if sequence == 0]
            return found

        return torch.stack(rings.in_shared_memory(2, work, lanes=2)[0])

    alone = logits_of([{0: 1}] * 4)
    behind_others = logits_of([{1: 1, 0: 1}, {2: 1, 3: 1, 0: 1}, {0: 1}, {0: 1}])
    chunk = logits_of([{1: 1, 0: 4}])
    assert torch.equal(alone, behind_others)
    assert torch.equal(alone, chunk)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [0, NUM_BLOCKS * BLOCK_SIZE]},
        {"slots": [0, -1]},
        {"block_tables": [2 * NUM_BLOCKS]},
        {"block_tables": [0, 1]},
        {"sample_rows": [2]},
        {"compressions": [NUM_BLOCKS, NUM_BLOCKS]},
        {"compressions": [0, 0]},
        {"compressions": [0, 2 * NUM_BLOCKS]},
        {"query_lens": [1]},
        {"context_lens": [1]},
    ],
    ids=str,
)
def test_plans_that_name_what_does_not_exist_change_nothing(tmp_path: Path, wrong: dict[str, list[int]]) -> None:
    runner = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True, codec=INT8)
    plan, _ = rings.Script([2]).step({0: 2})
    fields = {name: to_bytes(values) for name, values in wrong.items()}
    before = runner._store.writable(0).clone()
    with pytest.raises(IndexError, match="do not exist"):
        runner.forward(structs.replace(plan, **fields))
    assert torch.equal(runner._store.writable(0), before)
    runner.forward(plan)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state_slots": []},
        {"state_slots": [-1]},
        {"state_slots": [NUM_SLOTS]},
        {"state_slots": [0, 1]},
        {"state_snapshots": [2, 1]},
        {"state_snapshots": [0, NUM_SLOTS]},
    ],
    ids=str,
)
def test_plans_that_name_slots_that_do_not_exist_change_nothing(tmp_path: Path, wrong: dict[str, list[int]]) -> None:
    runner = runner_of(make_model(tmp_path, "qwen3_5_text", head_dim=32), native=True)
    plan, _ = rings.Script([2]).step({0: 2})
    states = runner._store.states
    assert states is not None
    fields = {name: to_bytes(values) for name, values in wrong.items()}
    with pytest.raises(IndexError, match="do not exist"):
        runner.forward(structs.replace(plan, **fields))
    assert not any(states.content(slot).any() for slot in range(NUM_SLOTS))
    runner.forward(structs.replace(plan, state_snapshots=to_bytes([1, 3, 0, 4])))
    (slot,) = as_int32(plan.state_slots)
    assert torch.equal(states.content(3), states.content(slot))
    assert states.content(4).any()
    assert not torch.equal(states.content(4), states.content(slot))


def test_every_layer_is_a_sign_of_progress(tmp_path: Path) -> None:
    runner = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True)
    progress = ProgressCounter.unread()
    runner.forward(mixed_script()[1][0][0], progress)
    assert progress.count == 3


def test_threads_kept_on_cores_compute_the_same_and_leave_the_caller_free(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    cores = sorted(os.sched_getaffinity(0))
    pinned = runner_of(directory, native=True, cpus=[cores[0], cores[-1]])
    plan = mixed_script()[1][0][0]
    ours, free = pinned.forward(plan), runner_of(directory, native=True).forward(plan)
    assert isinstance(ours, Tensor)
    assert isinstance(free, Tensor)
    assert torch.equal(ours, free)
    assert sorted(os.sched_getaffinity(0)) == cores
    kept = [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]
    assert {cores[-1]} in kept


def test_a_rank_that_does_not_come_is_a_lost_ring(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    area = make_area(2, 2)
    ring = SharedMemory(area, 0, 2, lanes=2, timeout=0.05)
    runner = runner_of(directory, native=True, collectives=ring)
    for _ in ("the first time", "and ever after"):
        with pytest.raises(RingLost, match="the ring is restarted"):
            runner.forward(mixed_script()[1][0][0])
    ring.close()


codecs = pytest.mark.parametrize("codec", COMPRESSING, ids=lambda codec: codec.name)


@codecs
def test_compresses_to_the_codes_of_the_codec(tmp_path: Path, codec: Codec) -> None:
    runner = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True, codec=codec)
    store, layers = runner._store, range(3)
    for layer in layers:
        values = torch.randn(store.writable(layer).shape)
        # One head of zeros.
        sizes = 50 * torch.rand(values.shape[:-2]) * (torch.arange(values.shape[2]) > 0)
        store.writable(layer).copy_(values * sizes[..., None, None])
    plan, _ = rings.Script([2]).step({0: 2})
    pairs = [[3, NUM_BLOCKS + 5], [0, NUM_BLOCKS], [7, NUM_BLOCKS + 1]]
    runner.forward(structs.replace(plan, compressions=to_bytes(np.array(pairs))))
    for layer in layers:
        scales = store.scales(layer)
        assert scales is not None
        for writable, quantized in pairs:
            codes, expected = codec.encode(store.writable(layer)[writable].flatten(-2))
            ours = store.codes(layer)[quantized - NUM_BLOCKS].flatten(-2)
            assert ours.view(torch.uint8).any()
            assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(scales[quantized - NUM_BLOCKS], expected)


@codecs
def test_attends_over_compressed_blocks(tmp_path: Path, codec: Codec) -> None:
    """As PyTorch does over the same ones, up to bf16's rounding, and not as over blocks that were not."""
    directory = make_model(tmp_path, "llama", head_dim=32)
    results = []
    for native, compressed in ((True, True), (False, True), (True, False)):
        runner = runner_of(directory, native=native, codec=codec)
        script = rings.Script([47, 25, 14])
        for tokens in ({0: 16, 2: 11}, {2: 1, 0: 16, 1: 7}, {0: 13, 1: 16}):
            runner.forward(script.step(tokens)[0])
        if compressed:
            seal(script, runner._store, {0: 45, 1: 23, 2: 12})
        logits = runner.forward(script.step({2: 1, 0: 1, 1: 1})[0])
        assert isinstance(logits, Tensor)
        results.append(logits)
    ours, theirs, plain = results
    assert (ours - theirs).abs().mean() < 0.03 * theirs.std()
    assert not torch.equal(ours, plain)


@pytest.mark.parametrize("world_size", in_lanes([2, 3], [3], []))
@pytest.mark.parametrize(
    "model_type",
    in_lanes(
        [
            *("llama", "gemma2", "phi3", "qwen2_moe", "glm4_moe", "qwen3_5_text", "qwen3_next"),
            *("gpt_oss", "minimax_m2", "flex_olmo", "gemma4_text", "gemma4_unified_text"),
            *("deepseek_v2", "axk1"),
            "granitemoehybrid",
        ],
        ["llama", "qwen3_5_text", "gemma4_text"],
    ),
)
def test_rings_that_sum_in_shared_memory(tmp_path: Path, model_type: str, world_size: int) -> None:
    directory = make_model(tmp_path, model_type, head_dim=32)
    expected = truth(directory, mixed_script()[0].sequences)
    theirs = errors(runner_of(directory, native=False), expected)
    ours = ring_errors(directory, world_size, expected)
    assert ours.mean() < theirs.mean()
    assert ours.max() < 2 * theirs.max()


def ring_errors(directory: Path, world_size: int, expected: list[Tensor]) -> Tensor:
    """Of the leader of a ring that sums in shared memory."""

    def work(ring: Collectives) -> Tensor:
        runner = runner_of(directory, native=True, collectives=ring)
        assert runner.is_native
        return errors(runner, expected)

    ours = rings.in_shared_memory(world_size, work)
    assert [part.numel() > 0 for part in ours] == [rank == 0 for rank in range(world_size)]
    return ours[0]


NO_KERNELS = [
    ("llama", {"head_dim": 16}, ""),
    ("llama", {"hidden_act": "relu"}, ""),
    ("llama", {"intermediate_size": 100}, ""),
    *(("youtu", {"kv_lora_rank": rank}, "") for rank in (40, 576)),
    *(("youtu", {width: 40}, "") for width in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank")),
    *(("qwen3_moe", {width: 72}, "q8_0") for width in ("hidden_size", "moe_intermediate_size")),
]


@pytest.mark.parametrize(("model_type", "changes", "weights"), NO_KERNELS, ids=str)
def test_what_does_not_fit_runs_through_pytorch_quantized_or_not(
    tmp_path: Path, model_type: str, changes: dict[str, Any], weights: str
) -> None:
    directory = make_model(tmp_path, model_type, **{"head_dim": 32, **changes})
    runner = runner_of(directory, native=True, weights=weights)
    assert not runner.is_native
    runner.warm_up()


@pytest.mark.parametrize("weights", ["", "q4_k"])
def test_experts_that_a_checkpoint_stacks_are_those_that_it_has_one_by_one(tmp_path: Path, weights: str) -> None:
    directory = make_model(tmp_path / "apart", "qwen3_moe", head_dim=32)
    stacked = Path(shutil.copytree(directory, tmp_path / "stacked"))
    tensors = load_file(stacked / "model.safetensors")
    for name in [name for name in tensors if ".experts.0." in name and "up_proj" not in name]:
        gate_or_down = stack(tensors, name)
        if "gate_proj" in name:
            both = (gate_or_down, stack(tensors, name.replace("gate_proj", "up_proj")))
            tensors[name.replace("0.gate_proj.weight", "gate_up_proj")] = torch.cat(both, 1)
        else:
            tensors[name.replace("0.down_proj.weight", "down_proj")] = gate_or_down
    save_file(tensors, stacked / "model.safetensors", metadata={"format": "pt"})
    plan, _ = rings.Script([9, 4]).step({0: 9, 1: 4})
    first, second = (
        runner_of(directory, native=True, weights=weights).forward(plan) for directory in (directory, stacked)
    )
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)
    assert runner_of(stacked, native=True, weights=weights).is_native


@pytest.mark.parametrize("weights", ["", "q4_k", "fp8"])
def test_a_step_reads_the_weights_of_chosen_experts_alone(tmp_path: Path, weights: str) -> None:
    """Nothing can read the others: their pages are protected."""
    directory = make_model(tmp_path, "qwen3_moe", head_dim=32, num_experts=32)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name].zero_()  # all scores tie: the first two experts
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    runner = runner_of(directory, native=True, weights=weights)
    plan, _ = rings.Script([9]).step({0: 1})
    expected = runner.forward(plan)
    assert isinstance(expected, Tensor)
    with unreadable([pages_of(packed[2:]) for packed in packed_experts(runner)]):
        found = runner.forward(plan)
    assert isinstance(found, Tensor)
    assert torch.equal(found, expected)


def packed_experts(runner: ModelRunner) -> list[Tensor]:
    """uint8 [experts, bytes of one] of each layer's two products."""
    assert isinstance(runner._decoder, NativeDecoder)
    mixtures = [layer.experts for layer in runner._decoder.packed.layers if layer.experts]
    return [part.packed.view(mixture.count, -1) for mixture in mixtures for part in (mixture.gate_up, mixture.down)]


def pages_of(packed: Tensor) -> tuple[int, int]:
    """(address, bytes) of the whole pages of `packed`, at least one."""
    first = -(-packed.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (packed.data_ptr() + packed.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    assert first < end
    return first, end - first


@contextmanager
def unreadable(pages: list[tuple[int, int]]) -> Iterator[None]:
    """Whoever reads `pages` ends the process."""
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        assert not any(mprotect(*run, 0) for run in pages)
        yield
    finally:
        for run in pages:
            mprotect(*run, mmap.PROT_READ | mmap.PROT_WRITE)


def stack(tensors: dict[str, Tensor], first: str) -> Tensor:
    """All experts' tensors, of which `first` is that of expert 0."""
    names = [first.replace(".experts.0.", f".experts.{expert}.") for expert in range(1000)]
    return torch.stack([tensors.pop(name) for name in names if name in tensors])
