"""The benchmark of encoders, on a tiny one: both ways give the same vectors."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.engine import encoders
from benchmarks.harness import program
from tests.unit.executor.model.encoders.tiny import make_encoder


def test_both_ways_give_the_same_vectors(tmp_path: Path) -> None:
    app = program(encoders.main)
    directory = make_encoder(tmp_path, "bert")
    done = CliRunner().invoke(app, [str(directory), "--texts", "6", "--rounds", "1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert float(done.output.rpartition("cosine ")[2]) == pytest.approx(1.0, abs=1e-4)
