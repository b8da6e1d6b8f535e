"""The harness of ratios: turns, judging, files. Small counts, and no assertion on a time."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.errors import BenchError
from benchmarks.harness import machine, show
from benchmarks.random_model import LlamaShape, write_servable
from benchmarks.regressions import __main__ as command
from benchmarks.regressions import measures
from benchmarks.regressions.measures import BETTER, Pair, Ratio, Recorded, Rounds, ratios
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

NAME = "gRPC, CPU of a streamed answer against REST"


def test_the_two_ways_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def way(name: str, cost: float) -> float:
        order.append(name)
        return cost + (100.0 if len(order) <= 2 else 0.0)

    found = ratios([Pair("r", lambda: way("A", 2.0), lambda: way("B", 6.0))], 3)
    assert "".join(order) == "ABBAABBA"
    assert found == {"r": [3.0, 3.0, 3.0]}


@pytest.mark.slow
def test_the_services_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real stack, few requests: every round gives every ratio."""
    monkeypatch.setattr(measures, "STREAMS", 64)
    found = measures.services(Path(), rounds=1, effort=1)
    assert set(found) <= set(BETTER)
    assert [len(rounds) for rounds in found.values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("engine", 4), ("kernels", 8)])
def test_the_engine_is_measured(family: str, count: int, tmp_path: Path) -> None:
    """As `make perf` does it, with a model that is made up."""
    for name, content in tiny_files().items():
        (tmp_path / name).write_bytes(content)
    write_servable(tmp_path / "model", LlamaShape.parse("64,2,1,96,2,258"), tmp_path)
    found = command.measure(family, tmp_path / "model", 3, 1)
    assert set(found) <= set(BETTER)
    assert [len(rounds) for rounds in found.values()] == [3] * count


def recorded(median: float, on: str = "") -> Recorded:
    return Recorded("abc", "2026-01-01", on or machine(), {NAME: Ratio(median, 0.0, 5)})


def run(monkeypatch: pytest.MonkeyPatch, path: Path, turns: list[list[float]], *options: str) -> tuple[int, str, int]:
    """(exit code, output, how often it was measured) of the command, whose measures give these ratios in turn."""
    asked: list[str] = []

    def measure(family: str, *_: object) -> Rounds:
        asked.append(family)
        return {NAME: turns[len(asked) - 1]}

    (path / "config.json").write_text("{}")
    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "FAMILIES", {"services": measures.services})
    given = ["--model", str(path), "--against", str(path / "ratios.json"), *options]
    import typer

    app = typer.Typer()
    app.command()(command.main)
    done = CliRunner().invoke(app, given)
    return done.exit_code, " ".join(done.output.split()), len(asked)


@pytest.mark.parametrize(
    ("before", "turns", "code", "measured", "said"),
    [
        (0.8, [[0.8] * 3], 0, 1, "equal"),
        (0.8, [[0.5] * 3], 0, 1, "better"),
        (0.8, [[1.0] * 3, [1.0] * 3], 2, 2, "Worse than recorded, twice"),
        (0.8, [[1.0] * 3, [0.8] * 9], 0, 2, "equal"),
    ],
)
def test_a_regression_fails_once_it_has_been_seen_twice(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: float,
    turns: list[list[float]],
    code: int,
    measured: int,
    said: str,
) -> None:
    command.write({NAME: [before] * 5}, tmp_path / "ratios.json")
    found = run(monkeypatch, tmp_path, turns)
    assert (found[0], found[2]) == (code, measured), found[1]
    assert said in found[1]


def test_ratios_of_another_machine_decide_nothing_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import msgspec

    other = msgspec.json.encode([recorded(0.8, "Another CPU, 96 cores")])
    (tmp_path / "ratios.json").write_bytes(other)
    code, output, _ = run(monkeypatch, tmp_path, [[1.0] * 3, [1.0] * 3])
    assert (code, "another kind of machine" in output) == (0, True)
    assert run(monkeypatch, tmp_path, [[1.0] * 3, [1.0] * 3], "--other-machines")[0] == 2


def test_what_is_recorded_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What differs from one process to the next counts as noise, beside what differs within one."""
    rounds = [[0.7] * 3, [0.6] * 3, [0.8] * 3]
    assert run(monkeypatch, tmp_path, rounds, "--record")[0] == 0
    found = command.read(tmp_path / "ratios.json")
    assert found is not None
    assert found.ratios == {NAME: Ratio.of([*rounds[0], *rounds[1], *rounds[2]])}
    assert found.ratios[NAME].spread > 0.1
    assert found.machine == machine()


def test_each_kind_of_machine_has_its_own_record(tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "ratios.json"
    other = recorded(0.8, "Another CPU, 96 cores")
    path.write_bytes(msgspec.json.encode([other]))
    assert command.read(path) == other, "better than none"
    for median in (0.5, 0.6):
        command.write({NAME: [median] * 5}, path)
        found = command.read(path)
        assert found is not None
        assert (found.machine, found.ratios[NAME].median) == (machine(), median)
    assert len(msgspec.json.decode(path.read_bytes(), type=list[Recorded])) == 2


def test_a_measure_that_is_gone_is_no_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command.write({NAME: [0.8] * 5, "gone": [1.0] * 5}, tmp_path / "ratios.json")
    code, output, _ = run(monkeypatch, tmp_path, [[0.8] * 3])
    assert (code, "not measured: gone" in output) == (2, True)


def test_without_recorded_ratios_nothing_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, [[0.8] * 3])[0] == 1
    (tmp_path / "ratios.json").write_text("{}")
    with pytest.raises(BenchError, match="make it anew"):
        command.read(tmp_path / "ratios.json")


def test_the_table_names_every_ratio() -> None:
    screen = Console(record=True, width=140)
    show(command.sheet(command.judge({NAME: [0.9] * 3}, recorded(0.8))), console=screen)
    text = screen.export_text()
    assert NAME in text
    assert "worse" in text
