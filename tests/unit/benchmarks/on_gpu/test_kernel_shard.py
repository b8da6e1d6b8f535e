"""Attention's cases in several processes, on the CPU."""

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="attention's kernels are checked where Triton is")

from benchmarks.on_gpu import kernel_shard
from benchmarks.on_gpu.kernel_shard import TINY_CASES, Checked, run_shards


@pytest.mark.slow
def test_every_case_is_checked_once() -> None:
    found = run_shards(2, tiny=True, seconds=60.0)
    assert (found.wanted, found.ended) == (TINY_CASES, [])
    assert len({one.case for one in found.checked}) == TINY_CASES
    assert all(0 <= one.error < 1 and not one.wrong for one in found.checked)


def test_a_part_that_dies_leaves_what_it_had(tmp_path: Path) -> None:
    out = tmp_path / "0.jsonl"
    out.write_text(
        '{"wanted": 2}\na library says hello\n{"case": "a", "error": 0.5, "wrong": ""}\n{"case": "b", "err'
    )
    found = kernel_shard._gathered([out], [-signal.SIGKILL])
    assert found.checked == [Checked("a", 0.5, "")]
    assert (found.wanted, found.ended) == (2, ["part 0 ended with -9"])


def test_a_part_without_time_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_shard", "0", "1", "-1", "--tiny"])
    with pytest.raises(SystemExit, match="no time was left"):
        kernel_shard.main()
    assert json.loads(capsys.readouterr().out) == {"wanted": TINY_CASES}
