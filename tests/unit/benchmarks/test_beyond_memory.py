"""The benchmark of what is not in memory runs, and measures what it says."""

from pathlib import Path

import pytest

from benchmarks.engine.beyond_memory import PROMPTS, measure_pages, measure_restores, measure_weights
from services.executor.native.library import why_not
from tests.unit.executor.cpu.exact_ring import needs_disk
from tests.unit.executor.model.tiny import make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")


def test_restores_before_and_beside(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", head_dim=32, num_hidden_layers=2)
    found = measure_restores(model, tmp_path / "disk", 64, 1, 1)
    assert len(found.rows) == 2 + len(PROMPTS)
    assert all(float(cell) > 0 for _, *cells in found.rows for cell in map(str, cells))


def test_pages_in_a_file(tmp_path: Path) -> None:
    needs_disk(tmp_path)
    model = make_model(tmp_path / "model", "llama", head_dim=32, num_hidden_layers=3)
    rows = measure_pages(model, tmp_path / "disk", 512, 1, 1).rows
    assert [name for name, _, _ in rows] == [
        "in memory",
        "in a file, in memory",
        "on disk, page faults alone",
        "on disk, asked for ahead",
        "on disk, other pages in each step",
    ]
    assert all(float(str(milliseconds)) > 0 and float(str(read)) >= 0 for _, milliseconds, read in rows)


def test_weights_in_part(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", head_dim=32, num_hidden_layers=24)
    found = measure_weights(model, tmp_path / "cache", 1, 1)
    assert [share for share, *_ in found.rows] == ["all", "75%", "50%", "25%"]
