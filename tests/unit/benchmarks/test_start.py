"""The phases of a start and of a return after a kill, from lines of a log whose times are known."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.start import (
    Log,
    Round,
    Stack,
    StartReport,
    at,
    kill_phases,
    parts,
    phases_of,
    start_phases,
    weight_bytes,
)
from tests.unit.benchmarks.terminal import shown

T0 = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def line(seconds: float, event: str, **fields: Any) -> dict[str, Any]:
    when = datetime.fromtimestamp(T0 + seconds, UTC).isoformat().replace("+00:00", "Z")
    return {"timestamp": when, "event": event, **fields}


def started(begin: float) -> list[dict[str, Any]]:
    """Two ranks that are forked, loaded and ready; rank 1 has more to read."""
    parts = {"kernels": 0.05, "kv_cache": 0.1, "packing": 0.1, "warm_up": 0.05}
    return [
        line(begin, "rank_started", rank=0, pid=10),
        line(begin + 0.1, "rank_started", rank=1, pid=11),
        line(begin + 1.0, "rank_loaded", rank=0, weights=0.3, others=0.2, **parts),
        line(begin + 1.0, "rank_loaded", rank=1, weights=0.5, others=0.0, **parts),
        line(begin + 1.3, "ring_ready"),
    ]


LOG = Log(
    [
        line(0.5, "ready", service="gateway"),
        line(1.0, "ready", service="executor"),
        *started(2.0),
        line(10.1, "ring_lost"),
        *started(10.4),
    ]
)


def test_a_start_is_cut_into_phases() -> None:
    found = start_phases(Log(LOG.lines[:7]), T0, T0 + 3.5)
    assert [*found.values()] == pytest.approx([1.0, 1.1, 0.1, 0.05, 0.5, 0.1, 0.1, 0.05, 0.0, 0.3, 0.2], abs=1e-5)
    assert sum(found.values()) == pytest.approx(3.5, abs=1e-5), "nothing is left out or counted twice"


def test_a_return_is_cut_into_phases() -> None:
    found = kill_phases(LOG, T0 + 10.0, T0 + 12.0)
    assert [*found] == [
        "told",
        "ended, forked",
        "ranks meet",
        "kernels proven",
        "weights",
        "KV cache",
        "packing",
        "kernels, first step",
        "other ranks",
        "announced",
        "first token",
    ]
    assert [*found.values()] == pytest.approx([0.1, 0.4, 0.1, 0.05, 0.5, 0.1, 0.1, 0.05, 0.0, 0.3, 0.3], abs=1e-5)
    assert sum(found.values()) == pytest.approx(2.0, abs=1e-5)


def test_lines_are_found_by_event_time_and_fields() -> None:
    assert at(LOG.of("ready", service="executor")[0]) == T0 + 1.0
    assert len(LOG.of("rank_started")) == 4
    assert len(LOG.of("rank_started", T0 + 5.0)) == 2
    assert not LOG.of("fork_server_lost")


def test_what_is_no_json_is_left_out(tmp_path: Any) -> None:
    (tmp_path / "a.log").write_text('{"timestamp": "2026-01-01T00:00:02Z", "event": "b"}{}\nerror: no\n[1]\n')
    (tmp_path / "b.log").write_text('{"timestamp": "2026-01-01T00:00:01Z", "event": "a"}\n')
    assert [found["event"] for found in Log.read(tmp_path).lines] == ["a", "b"]


def test_medians_and_least_are_shown() -> None:
    rounds = [Round("kill", {"told": seconds}, 2 * seconds) for seconds in (3.0, 1.0, 2.0)]
    rounds.append(Round("cold", {"weights": 7.5}, 9.25))
    assert phases_of(rounds[:3])["told"] == [3.0, 1.0, 2.0]
    memory = {
        "rank 0, cold": [900_000_000, 900_000_000, 900_000_000],
        "rank 0": [300_000_000, 200_000_000, 400_000_000],
        "executor": [40_000_000, 30_000_000, 50_000_000],
        "gateway": [80_000_000, 70_000_000, 80_000_000],
    }
    about = {"date": "today", "command": "a command", "machine": "a machine", "model": "m"}
    sizes = {"model_bytes": 269_000_000, "kv_bytes": 24_000_000}
    text = shown(*parts(StartReport(**about, **sizes, rounds=rounds, memory=memory)))  # type: ignore[arg-type]
    assert "executor's processes hold 340 MB (PSS): 269 of weights' files and up to 24 of KV cache" in text
    assert "9.25" in text
    assert "rank 0" in text
    assert ["told", "2.00", "1.00"] in [line.split() for line in text.splitlines()]


def test_a_stack_that_ended_by_itself_is_said(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "data", str(tmp_path / "none"), {}, ["--no-such-option"])
    with pytest.raises(BenchError, match="ended before readiness"):
        stack.wait_ready()
    stack.close()


def test_the_files_of_weights_are_counted(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(bytes(100))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.gguf").symlink_to(gguf)
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(2):
        (plain / f"model-{number}.safetensors").write_bytes(bytes(40))
    assert [weight_bytes(path) for path in (gguf, linked, plain)] == [100, 100, 80]
