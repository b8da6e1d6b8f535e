"""The two sides of the training benchmark train the same, and what is found is judged right."""

import os
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from benchmarks.errors import BenchError
from benchmarks.random_model import SHAPES, write_checkpoint
from benchmarks.training import __main__ as command
from benchmarks.training.__main__ import Found, Peak, sheet, tasks, verdicts
from benchmarks.training.examples import BUDGET, conversations, packed_micro_batches, padded_micro_batches
from benchmarks.training.process import measured
from benchmarks.training.task import Result, Task
from benchmarks.training.with_peft import packed, padded
from benchmarks.training.with_ryzanstein import as_a_job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, SHAPES["tiny"], threads=1)
    return directory


def task_of(model: Path, side: str, **options: bool) -> Task:
    return Task(side, side, str(model), "bf16", rank=4, batch=2, examples=4, threads=1, **options)


def test_micro_batches_hold_every_example_once_within_the_budget() -> None:
    examples = conversations(200, 1000)
    for make in (padded_micro_batches, packed_micro_batches):
        made = make(examples)
        assert sorted(one.tokens for some in made for one in some) == sorted(one.tokens for one in examples)
    assert all(len(some[0].tokens) * len(some) <= BUDGET for some in padded_micro_batches(examples))
    assert all(sum(len(one.tokens) for one in some) <= BUDGET for some in packed_micro_batches(examples))


def test_rows_are_padded_and_packed_with_the_same_labels() -> None:
    examples = conversations(3, 1000)
    rows, row = padded(examples), packed(examples)
    assert int(rows["attention_mask"].sum()) == row["input_ids"].numel()
    wanted = [one.tokens[one.context :] for one in examples]
    assert [[label for label in labels if label >= 0] for labels in rows["labels"].tolist()] == wanted
    assert [label for label in row["labels"][0].tolist() if label >= 0] == [*chain(*wanted)]
    assert row["position_ids"][0].tolist().count(0) == 3


@pytest.mark.slow
def test_both_sides_train_the_same_examples_to_about_the_same_loss(model: Path) -> None:
    ours = measured(task_of(model, "ours"))
    for packs in (False, True):
        theirs = measured(task_of(model, "peft", packs=packs, recompute=not packs))
        assert theirs.tokens == ours.tokens
        assert theirs.loss == pytest.approx(ours.loss, rel=0.01)


@pytest.mark.slow
def test_a_job_is_measured_in_its_own_process(model: Path) -> None:
    seen: list[int] = []
    result = as_a_job(task_of(model, "trainer"), conversations(4, 256), seen.append)
    assert result.tokens == sum(len(one.tokens) for one in conversations(4, 256))
    assert result.rate > 0
    assert len(seen) == 1


@pytest.mark.slow
def test_a_process_that_fails_is_told(model: Path) -> None:
    with pytest.raises(BenchError, match=r"peft with bf16 failed: .*no-such-model"):
        command.run_task(msgspec.structs.replace(task_of(model, "peft"), model="/no-such-model"), Peak())


def test_memory_of_a_process_is_seen() -> None:
    peak = Peak()
    peak.look(os.getpid())
    assert 0 < peak.anonymous < 1 << 40
    assert 0 < peak.pss < 1 << 40
    peak.look(1 << 30)  # there is none


def test_verdicts_follow_the_medians_and_the_peaks() -> None:
    rates = {"peft": 100.0, "ours": 150.0}
    compared = tasks(Path("model"), Path("cache"), ["q4_k"], threads=1)
    found = [
        Found(task, [Result(1000, 1000 / rates.get(task.side, 120.0), 2.0)] * 3, Peak(900, memory_of(task)))
        for task in compared
    ]
    said = verdicts(found)
    assert said[:2] == [
        "met: tokens/s with a bf16 base are 1.50 of peft's that recomputes; 1 or more",
        "met: tokens/s with a bf16 base are 1.50 of peft's in any way; 1 or more",
    ]
    assert said[2] == "not met: memory with a q4_k base is 0.60 of peft's least in bf16; 0.5 or less"
    assert len(sheet(found, "").rows) == len(found)
    assert verdicts([one for one in found if one.task.side != "peft"]) == []


def memory_of(task: Task) -> int:
    return 600 if task.weights == "q4_k" else 1000
