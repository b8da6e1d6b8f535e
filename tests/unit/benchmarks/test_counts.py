"""Operations of fixed work: exact, compared with what was recorded, and a guard that sees when they grow."""

import subprocess
import sys

import pytest

from benchmarks.regressions import counts, instructions


@pytest.mark.parametrize("kernels", ["--no-kernels", pytest.param("--kernels", marks=pytest.mark.slow)])
def test_no_work_has_grown(kernels: str) -> None:
    """In a process of its own: what other tests have set up would count."""
    if kernels == "--kernels" and instructions.missing():
        pytest.skip(f"instructions are not counted: {instructions.missing()}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.regressions.counts", kernels],
        capture_output=True,
        text=True,
        check=False,
        cwd=counts.ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_same_work_is_the_same_number() -> None:
    assert counts.decode_steps(3, 20) == counts.decode_steps(3, 20)
    assert counts.shared_frames(5, 4) == counts.shared_frames(5, 4)


def test_more_work_is_a_larger_number() -> None:
    few, many = counts.decode_steps(2, 20), counts.decode_steps(2, 40)
    assert 1.9 * few < many < 2.1 * few
    few, many = counts.shared_frames(5, 4), counts.shared_frames(5, 8)
    assert 1.9 * few < many <= 2 * few, "a generation's first token may cost more than its next ones"


TRANSLATION = 40  # calls at most that it takes to translate a request of another API into a chat


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", sorted(counts.APIS))
def test_an_answer_costs_as_much_through_every_api(api: str, *, stream: bool) -> None:
    counts.answered(1, stream=stream, api=api)  # what is made once and kept is made before
    (chat, many_of_chat), (first, many) = (
        [counts.answered(tokens, stream=stream, api=one) for tokens in (1, 50)] for one in ("chat", api)
    )
    assert first <= chat + TRANSLATION
    assert many - first <= 1.1 * (many_of_chat - chat)


def test_only_functions_of_this_repository_count() -> None:
    with counts.counting() as calls:
        sorted([3, 1, 2], key=lambda number: -number)
    assert calls.count == 0


def test_what_has_grown_is_named() -> None:
    recorded = {"a, calls": 1000, "b, bytes": 10, "c, messages": 5, "gone, calls": 1}
    found = {"a, calls": 1030, "b, bytes": 11, "c, messages": 5, "new, calls": 7}
    assert counts.grown(recorded, found) == [
        "b, bytes: 11, recorded 10",
        "new, calls: not recorded",
        "gone, calls: recorded, and made no more",
    ]
    assert counts.grown({"a, calls": 1000}, {"a, calls": 1031}) == ["a, calls: 1,031, recorded 1,000"]
    assert counts.grown({"a, calls": 1000}, {"a, calls": 1}) == []
