"""The served model against transformers' own forward: same weights, same tokens, same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.collectives.torch_distributed import TorchDistributed
from services.executor.core.progress import ProgressCounter
from services.executor.worker.runner import ModelRunner
from shared.errors import ModelLoadError, RingLost
from tests.forked import CONTEXT, start
from tests.unit.executor.model.ring import Script, make_runner, mixed_script, on_ring
from tests.unit.executor.model.tiny import make_model, reference_logits

TOLERANCE = 1e-4


def run_mixed(directory: Path, collectives: Collectives) -> list[torch.Tensor | None]:
    runner = make_runner(directory, collectives)
    runner.warm_up()
    return [runner.forward(plan) for plan, _ in mixed_script()[1]]


def check_mixed(directory: Path, results: list[torch.Tensor | None]) -> None:
    script, steps = mixed_script()
    expected = reference_logits(directory, script.sequences)
    assert expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"
    for (_, sampled), logits in zip(steps, results, strict=True):
        assert logits.dtype == torch.float32
        assert logits.shape == (len(sampled), expected[0].shape[1])
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            assert (row - expected[sequence][position]).abs().max() < TOLERANCE


@pytest.fixture(scope="module", params=["gemma3_text", "llama"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_logits_equal_transformers(directory: Path, world_size: int) -> None:
    """Of steps that mix prompts and decodes; every architecture stands in `model/test_architectures.py`."""
    results = on_ring(world_size, lambda collectives: run_mixed(directory, collectives))
    check_mixed(directory, results[0])
    assert all(result is None for other in results[1:] for result in other)


@pytest.mark.parametrize(("q_heads", "kv_heads", "world_size"), [(4, 1, 3), (8, 2, 3), (6, 2, 4), (4, 4, 3)])
def test_any_head_split_equals_transformers(tmp_path: Path, q_heads: int, kv_heads: int, world_size: int) -> None:
    directory = make_model(tmp_path, "llama", num_attention_heads=q_heads, num_key_value_heads=kv_heads)
    results = on_ring(world_size, lambda collectives: run_mixed(directory, collectives))
    check_mixed(directory, results[0])


def _rank_process(rank: int, directory: Path, scratch: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    collectives = TorchDistributed(group)
    results = run_mixed(directory, collectives)
    torch.save(results, scratch / f"rank{rank}.pt")
    uneven = collectives.gather_to_leader(torch.full((2, 3 + rank), float(rank), dtype=torch.bfloat16), [3, 4])
    assert (uneven is None) == (rank == 1)
    if uneven is not None:
        assert [(tuple(part.shape), part.unique().tolist()) for part in uneven] == [((2, 3), [0.0]), ((2, 4), [1.0])]
    half = collectives.all_reduce(torch.full((4,), 1.5 + rank, dtype=torch.bfloat16))
    assert half.tolist() == [4.0] * 4
    collectives.barrier()
    if rank == 0:  # the other rank ends here
        with pytest.raises(RingLost):
            collectives.all_reduce(torch.zeros(4))
    collectives.close()
    collectives.close()


@pytest.mark.slow
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama")
    ranks = [CONTEXT.Process(target=_rank_process, args=(rank, directory, tmp_path)) for rank in range(2)]
    for process in ranks:
        start(process, computes=True)
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, 0]
    check_mixed(directory, torch.load(tmp_path / "rank0.pt"))
    assert torch.load(tmp_path / "rank1.pt") == [None] * 5


def greedy(runner: ModelRunner, prompts: dict[int, int], count: int) -> dict[int, list[int]]:
    """`count` greedy tokens for each prompt {sequence: prompt length}, all decoded in one batch."""
    script = Script([30] * 8)
    texts: dict[int, list[int]] = {sequence: [] for sequence in prompts}
    tokens = dict(prompts)
    for _ in range(count):
        plan, sampled = script.step(tokens)
        logits = runner.forward(plan)
        assert logits is not None
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            texts[sequence].append(int(row.argmax()))
            script.sequences[sequence][position + 1] = texts[sequence][-1]
        tokens = dict.fromkeys(prompts, 1)
    return texts


def test_greedy_text_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    def work(collectives: Collectives) -> Any:
        runner = make_runner(make_model(tmp_path, "llama"), collectives)
        prompts = {sequence: 3 + 2 * sequence for sequence in range(8)}
        together = greedy(runner, prompts, 10)
        alone = {sequence: greedy(runner, {sequence: prompts[sequence]}, 10)[sequence] for sequence in prompts}
        return together, alone

    together, alone = on_ring(1, work)[0]
    assert together == alone
    assert len({tuple(text) for text in together.values()}) > 1


def test_bf16_stays_close_to_transformers_and_reports_each_layer(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    script, steps = mixed_script()
    progress = ProgressCounter.unread()

    def work(collectives: Collectives) -> list[torch.Tensor | None]:
        runner = make_runner(directory, collectives, torch.bfloat16)
        return [runner.forward(plan, progress) for plan, _ in steps]

    results = on_ring(1, work)[0]
    expected = reference_logits(directory, script.sequences)
    for (_, sampled), logits in zip(steps, results, strict=True):
        assert logits is not None
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            assert torch.nn.functional.cosine_similarity(row, expected[sequence][position], dim=0) > 0.99
    assert progress.count == 3 * len(steps)


def test_a_kv_head_between_two_ranks_is_held_by_both_and_goes_out_once(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")

    def shapes(collectives: Collectives) -> dict[str, tuple[int, ...]]:
        attention = make_runner(directory, collectives)._model.model.layers[0].self_attn
        return {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}

    first, second = on_ring(2, shapes)
    assert (first["q_proj.weight"], second["q_proj.weight"]) == ((96, 72), (96, 72))
    assert (first["k_proj.weight"], second["k_proj.weight"]) == ((32, 72), (32, 72))
    assert (first["o_proj.weight"], second["o_proj.weight"]) == ((72, 64), (72, 80))


def test_weights_that_compute_no_numbers_are_refused_at_load(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "broken", "llama")
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="compute NaN or infinite values"):
        make_runner(directory, SingleRank()).warm_up()
