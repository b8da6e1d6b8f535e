"""Why a ring has died, and whom that makes suspicious."""

import signal
from pathlib import Path

import pytest

from services.executor.core import gpu_errors
from services.executor.supervisor import failure_detection
from services.executor.supervisor.failure_detection import cause_of_exit, death_of, oom_kills
from shared.messages.debugging import PlanDump, PlanSequenceDump


@pytest.mark.parametrize(
    ("code", "oom_kills", "cause"),
    [
        (-signal.SIGKILL, 0, "external"),
        (-signal.SIGTERM, 0, "external"),
        (-signal.SIGTERM, 1, "external"),
        (-signal.SIGKILL, 1, "out_of_memory"),
        (-signal.SIGSEGV, 0, "crashed"),
        (-signal.SIGABRT, 0, "crashed"),
        (3, 0, "crashed"),
    ],
)
def test_an_exit_tells_its_cause(code: int, oom_kills: int, cause: str) -> None:
    assert cause_of_exit(code, oom_kills) == cause


def plan(step: int, seconds: float, *ids: str, count: int = 0) -> PlanDump:
    named = [PlanSequenceDump(one, 1, 1, []) for one in ids]
    return PlanDump(
        step, 0, seconds * 1e3, 1, 1, 1, 0, 0, 0, 0, sequence_count=count or len(ids), blocks=0, sequences=named
    )


def test_suspects_are_those_in_steps_that_are_not_over() -> None:
    plans = [plan(1, 0.1, "a", "b"), plan(2, 0.1, "c"), plan(3, 0.0, "d", "e")]
    death = death_of(7, "crashed", plans)
    assert (death.epoch, death.suspects, death.more) == (7, ["d", "e"], False)
    assert not death.suspects_only("d")
    assert death.may_be_of("d")
    assert not death.may_be_of("c")


def test_two_steps_may_be_under_way_and_none() -> None:
    assert death_of(7, "hung", [plan(1, 0.0, "x"), plan(2, 0.0, "a"), plan(3, 0.0, "b")]).suspects == ["a", "b"]
    assert not death_of(7, "hung", [plan(2, 0.1, "a"), plan(3, 0.1, "b")]).may_be_of("b")
    assert death_of(7, "hung", [plan(2, 0.1, "a"), plan(3, 0.0, "b")]).suspects_only("b")


def test_nobody_is_suspected_of_what_came_from_outside() -> None:
    assert death_of(7, "external", [plan(3, 0.0, "a")]).suspects == []


def test_where_not_all_are_named_everybody_is_suspected() -> None:
    death = death_of(7, "crashed", [plan(3, 0.0, "a", count=9)])
    assert death.may_be_of("b")
    assert not death.suspects_only("a")


def test_the_kernels_count_can_be_read() -> None:
    assert oom_kills() >= 0


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def test_an_errors_cause() -> None:
    assert gpu_errors.cause(OutOfMemoryError("CUDA out of memory")) == "out_of_memory"
    assert gpu_errors.cause(MemoryError()) == "out_of_memory"
    assert gpu_errors.cause(ZeroDivisionError()) == "crashed"
    assert gpu_errors.cause(RuntimeError("CUDA error: an illegal memory access was encountered")) == "crashed"
    assert gpu_errors.cause(RuntimeError("CUDA error: uncorrectable ECC error encountered")) == "external"


def test_a_host_without_the_files_has_killed_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(failure_detection, "_memory_events", lambda: [events])
    host = oom_kills()
    events.write_text("oom 3\noom_kill 2\n")
    assert oom_kills() == 2
    events.write_text("oom 3\n")
    assert oom_kills() == host
    monkeypatch.setattr(failure_detection, "Path", lambda path: tmp_path / "none")
    assert failure_detection.oom_kills() == 0
