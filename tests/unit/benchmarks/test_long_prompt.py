"""The benchmark of streams beside a long prompt, on a tiny model: it computes both ways to the end."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.engine import long_prompt
from benchmarks.harness import program
from tests.unit.executor.model.tiny import make_model


@pytest.mark.slow
def test_streams_beside_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_WEIGHT_CACHE_BYTES", "0")
    monkeypatch.setenv("RYZANSTEIN_KV_MEMORY", str(64 << 20))
    monkeypatch.setattr(long_prompt, "QUIET_STEPS", 30)
    app = program(long_prompt.main)
    directory = make_model(tmp_path, "llama", vocab_size=512, max_position_embeddings=4096)
    done = CliRunner().invoke(app, [str(directory), "--prompt", "1200", "--streams", "2", "--threads", "1"])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [line.split() for line in done.output.splitlines() if line.strip()]
    assert [row[0] for row in rows[-2:]] == ["1.5", "off"]


def test_percentiles_are_of_gaps_and_the_rate_is_of_the_prompt() -> None:
    gaps = long_prompt.Gaps([0.010] * 99 + [0.020], [0.015] * 100, 3000)
    assert gaps.row("1.5")[:5] == ["1.5", "10.0", "10.1", "15.0", "15.0"]
    assert gaps.row("1.5")[-1] == "2,000"
