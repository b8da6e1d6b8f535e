from pathlib import Path

import torch

from benchmarks.loading.__main__ import rate
from benchmarks.loading.rank import Member, copy, timed_load, write_random


def test_shares_of_a_random_model(tmp_path: Path) -> None:
    write_random(tmp_path, 4_000_000)
    whole = timed_load(tmp_path, Member(0, 1), torch.float32)
    shares = [timed_load(tmp_path, Member(rank, 2), torch.float32) for rank in range(2)]
    assert whole["begin"] <= whole["end"]
    # Norms are held by both.
    assert whole["bytes"] < shares[0]["bytes"] + shares[1]["bytes"] < 1.01 * whole["bytes"]
    for pages in ("huge", "small"):
        copied = copy(tmp_path, int(whole["bytes"]) // 4, Member(1, 2), pages)
        assert copied["bytes"] == int(whole["bytes"]) // 4


def test_rate_of_ranks_side_by_side() -> None:
    answers = [{"begin": 1.0, "end": 2.0, "bytes": 30}, {"begin": 1.5, "end": 4.0, "bytes": 60}]
    assert rate(answers) == 30
