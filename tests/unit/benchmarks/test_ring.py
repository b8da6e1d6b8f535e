"""The figures of the ring benchmark from known times, and its processes on a tiny model."""

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.engine import decode_plan, prefill_plan
from benchmarks.ring import Reduce, RingReport, measure_steps, show, timing
from benchmarks.ring_ranks import Share
from services.executor.model.collectives_shm import can_share_memory
from tests.unit.executor.model.tiny import make_model


def test_timing_takes_medians() -> None:
    shares = [
        [Share(0.1, 0.05), Share(0.3, 0.2)],
        [Share(0.2, 0.06), Share(0.4, 0.3)],
        [Share(0.9, 0.9), Share(0.5, 0.4)],
    ]
    found = timing(decode_plan(16, 32), [0.5, 0.1, 0.2], shares)
    assert found.milliseconds == pytest.approx(200)
    assert found.tokens_per_second == pytest.approx(80)
    assert found.shares == [Share(0.2, 0.06), Share(0.4, 0.3)]


@pytest.mark.skipif(not can_share_memory(), reason="no C compiler, or not Linux")
def test_one_rank_and_two_run_the_same_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    settings: dict[str, object] = {
        "model": str(model),
        "dtype": "fp32",
        "device": "cpu",
        "kv_memory": 1 << 22,
    }
    scalings = measure_steps(settings, {"decode": decode_plan(2, 20), "prefill": prefill_plan(8)}, rounds=1)
    assert [scaling.step for scaling in scalings] == ["decode", "prefill"]
    for scaling in scalings:
        assert scaling.ratio > 0
        assert scaling.one.shares == [Share(0.0, 0.0)]
        assert all(0 < share.waiting <= share.communication for share in scaling.two.shares)
    console = Console(width=160, record=True)
    show(RingReport("today", "a command", "a machine", {}, [Reduce("shm", 16, 2.2, 8.5)], scalings), console)
    assert "16 x 576 bf16" in console.export_text()
