"""The optimizer, states and adapters of a trainer, and how it waits: what a whole job does not show."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from services.executor.training.trainer.adapter_files import base_name, check_size, write_adapter, write_metrics
from services.executor.training.trainer.optimizer import FactorOptimizer
from services.executor.training.trainer.process import Gate, PauseWanted
from services.executor.training.trainer.schedule import course_of
from services.executor.training.trainer.state import SavedState, fingerprint, read_state, write_state
from shared.errors import ConfigurationError, InternalError, InvalidRequest, StorageFull
from shared.messages import ModelSpec
from shared.messages.training import TrainingMetrics
from tests.unit.executor.training.trainer.jobs import hyperparameters, job_of

CPU = torch.device("cpu")


def factors_of(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.q_proj/a": nn.Parameter(torch.randn(4, 6, generator=generator)),
        "layers.0.q_proj/b": nn.Parameter(torch.randn(8, 4, generator=generator)),
    }


def stepped(optimizer: FactorOptimizer, seed: int, rate: float = 0.1) -> None:
    optimizer.clear()
    generator = torch.Generator().manual_seed(seed)
    for gradient in optimizer.gradients():
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    optimizer.clip()
    optimizer.step(rate)


def test_a_state_has_all_that_the_next_step_depends_on(tmp_path: Path) -> None:
    first = factors_of()
    optimizer = FactorOptimizer(first, hyperparameters(), CPU)
    for seed in range(3):
        stepped(optimizer, seed)
    state = SavedState(3, first, optimizer.moments(), [TrainingMetrics(step) for step in (1, 2, 3)])
    size, digest = write_state(tmp_path / "state", "job", "print", state)
    assert size == (tmp_path / "state").stat().st_size
    assert len(digest) == 64
    found = read_state(tmp_path / "state", "job", "print", CPU)
    second = {name: nn.Parameter(found.factors[name]) for name in first}
    other = FactorOptimizer(second, hyperparameters(), CPU)
    other.restore(found.moments)
    for one in (optimizer, other):
        stepped(one, 9)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert write_state(tmp_path / "again", "job", "print", state)[0] == size


def test_gradients_are_clipped_by_their_norm_over_all_factors() -> None:
    factors = factors_of()
    for most, expected in ((0.5, 0.5), (0.0, 10.0)):
        optimizer = FactorOptimizer(factors, hyperparameters(max_grad_norm=most), CPU)
        gradients = optimizer.gradients()
        norm = torch.cat([gradient.fill_(1.0).flatten() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(10.0 / norm)
        assert float(optimizer.clip()) == pytest.approx(10.0)
        assert float(torch.cat([one.flatten() for one in gradients]).norm()) == pytest.approx(expected, rel=1e-5)


def test_states_of_another_format_job_or_count_are_refused(tmp_path: Path) -> None:
    state = SavedState(1, factors_of(), {}, [TrainingMetrics(1)])
    path = tmp_path / "state"
    write_state(path, "job", "print", state)
    with pytest.raises(InternalError, match="of the job job, and not of other"):
        read_state(path, "other", "print", CPU)
    write_state(path, "job", "print", with_step(state, step=2))
    with pytest.raises(InternalError, match="metrics of 1 steps and not of 2"):
        read_state(path, "job", "print", CPU)
    content = path.read_bytes().replace(b'"format":"1"', b'"format":"9"')
    path.write_bytes(content)
    with pytest.raises(InternalError, match="is of format 9"):
        read_state(path, "job", "print", CPU)
    optimizer = FactorOptimizer(factors_of(), hyperparameters(), CPU)
    with pytest.raises(InternalError, match=r"layers\.9\.q_proj/a"):
        optimizer.restore({"layers.9.q_proj/a/exp_avg": torch.zeros(1)})


def with_step(state: SavedState, *, step: int) -> SavedState:
    return SavedState(step, state.factors, state.moments, state.metrics)


def test_tables_that_moments_share_are_written_with_each(tmp_path: Path) -> None:
    table = torch.arange(4.0)
    moments = {"x/a/qmap1": table, "x/b/qmap1": table, "x/a/step": torch.tensor(7, dtype=torch.float64)}
    write_state(tmp_path / "state", "job", "print", SavedState(0, {}, moments, []))
    found = read_state(tmp_path / "state", "job", "print", CPU).moments
    assert all(torch.equal(found[name], moments[name]) for name in moments)


def test_all_that_decides_on_the_result_is_in_the_fingerprint() -> None:
    job = job_of()
    changed = [
        fingerprint(job, 2, b"data"),
        fingerprint(job, 1, b"data"),
        fingerprint(job, 2, b"other"),
        *(
            fingerprint(msgspec.structs.replace(job, **change), 2, b"data")
            for change in (
                {"seed": 8},
                {"model": "other"},
                {"method": "dpo"},
                {"hyperparameters": hyperparameters(rank=9)},
                {"base": ModelSpec("tiny", "org/other")},
            )
        ),
    ]
    assert len(set(changed)) == len(changed)
    again = msgspec.structs.replace(job, attempt=3, host="h", wanted="pause", status="running")
    assert fingerprint(again, 2, b"data") == changed[0]


class _Bitsandbytes(torch.optim.AdamW):
    """Keeps its count of steps as a number, as bitsandbytes does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["count"] = int(state.get("count", 0)) + 1


def test_moments_in_8_bits_come_from_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = hyperparameters(optimizer="paged_adamw_8bit")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigurationError, match=r"bitsandbytes.*ryzanstein\[training\]"):
        FactorOptimizer(factors_of(), settled, torch.device("cuda"))
    optim = SimpleNamespace(PagedAdamW8bit=_Bitsandbytes)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=optim))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    factors = factors_of()
    optimizer = FactorOptimizer(factors, settled, torch.device("cuda"))
    stepped(optimizer, 1)
    moments = optimizer.moments()
    assert moments["layers.0.q_proj/a/count"].dtype == torch.float64
    optimizer.restore(moments)
    state = optimizer._optimizer.state[factors["layers.0.q_proj/a"]]
    assert state["count"] == 1
    assert isinstance(state["count"], int)


def test_an_adapter_is_written_again_over_an_earlier_one(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "adapter", factors_of(), hyperparameters(), "base")
    assert write_adapter(tmp_path / "adapter", factors_of(), hyperparameters(), "base") == first
    other = write_adapter(tmp_path / "adapter", factors_of(1), hyperparameters(), "base")
    assert other.digest != first.digest
    assert (first.rank, first.bytes) == (4, 4 * (24 + 32))
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]


def test_no_room_is_told_of_every_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(StorageFull, match=r"missing/steps\.csv cannot be written"):
        write_metrics(missing / "steps.csv", [])
    with pytest.raises(StorageFull, match="missing/adapter cannot be written"):
        write_adapter(missing / "adapter", factors_of(), hyperparameters(), "base")


def test_an_adapter_that_nobody_would_load_is_refused_before_the_first_step() -> None:
    huge: Any = {"x/a": SimpleNamespace(nbytes=5 << 30)}
    with pytest.raises(ConfigurationError, match="smaller rank or fewer targets"):
        check_size(huge)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("org/name", "org/name"),
        ("org/name:Q4_K_M", "org/name"),
        ("/data/models/name", "tiny"),
        ("~/name", "tiny"),
        ("smollm2", "tiny"),
        (None, "tiny"),
    ],
)
def test_the_base_is_named_so_that_others_find_it(source: str | None, told: str) -> None:
    base = None if source is None else ModelSpec("tiny", source)
    assert base_name(msgspec.structs.replace(job_of(), base=base)) == told


@pytest.mark.parametrize("changes", [{"epochs": 0}, {"batch_size": 0}])
def test_a_job_with_nothing_to_do_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="at least one of each"):
        course_of(hyperparameters(**changes), 3)
    with pytest.raises(InvalidRequest, match="has 0 examples"):
        course_of(hyperparameters(), 0)


def test_a_pause_gives_the_step_up() -> None:
    pause = threading.Event()
    gate = Gate(CPU, pause)
    gate()
    pause.set()
    with pytest.raises(PauseWanted):
        gate()


def test_a_gpu_has_few_layers_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    class Event:
        count = 0

        def record(self) -> None:
            Event.count += 1
            self.number = Event.count

        def synchronize(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    gate = Gate(torch.device("cuda"), threading.Event())
    for _ in range(5):
        gate()
    assert waited == [1, 2, 3]
