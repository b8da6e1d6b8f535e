"""What all sections count on: the order of rounds, medians, tables."""

from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.errors import BenchError
from benchmarks.harness import (
    JsonFile,
    Report,
    Sheet,
    about,
    in_turns,
    median,
    milliseconds,
    nearest,
    one_of,
    program,
    publish,
    timed,
    turns,
)
from tests.unit.benchmarks.terminal import shown


class Timing(msgspec.Struct):
    name: str
    ms: float
    parts: dict[str, float]
    ranks: list[float]
    extra: float | None = None


def test_each_round_begins_with_another_one() -> None:
    assert [name for _, name in turns("ab", 3)] == list("abbaab")
    assert [name for _, name in turns("abc", 4)] == list("abcbcacababc")
    assert [at for at, _ in turns("ab", 2)] == [0, 0, 1, 1]


def test_rounds_of_the_warm_up_do_not_count() -> None:
    calls: list[str] = []

    def work(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turns({"a": lambda: work("a"), "b": lambda: work("b")}, rounds=2, warm_up=1)
    assert calls == list("abbaab")
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_what_is_timed_is_done_so_many_times() -> None:
    calls: list[None] = []
    assert timed(lambda: calls.append(None), 5)() > 0
    assert milliseconds(lambda: calls.append(None), 5, warm_up=3) >= 0
    assert len(calls) == 5 + 8


def test_medians_are_taken_field_by_field() -> None:
    runs = [
        Timing("x", 3.0, {"a": 1.0, "b": 5.0}, [1.0, 9.0], None),
        Timing("x", 1.0, {"a": 3.0, "b": 4.0}, [2.0, 8.0], 7.0),
        Timing("x", 2.0, {"a": 2.0}, [3.0, 7.0], 9.0),
    ]
    assert median(runs) == Timing("x", 2.0, {"a": 2.0, "b": 4.5}, [2.0, 8.0], 8.0)
    assert median([None, None]) is None


def test_a_percentile_is_one_of_the_values() -> None:
    assert [nearest([4.0, 1.0, 3.0, 2.0], share) for share in (0.5, 0.99)] == [2.0, 4.0]
    assert nearest([1.0, 9.0], 0.5, [1, 3]) == 9.0
    assert nearest([], 0.5) == 0.0


def test_a_sheet_is_a_table_and_markdown() -> None:
    sheet = Sheet(("way", "base", "ms"), [("ours", "[bf16]", 1.5)], left=("base",))
    assert sheet.markdown() == "| way | base | ms |\n| --- | --- | ---: |\n| ours | [bf16] | 1.5 |\n"
    assert "[bf16]" in shown(sheet)
    assert shown(Sheet(("way",), [])) == "", "tables without rows are left out"


class Found(Report, frozen=True, kw_only=True):
    figure: float


def test_a_report_says_where_it_was_made_and_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    publish(Found(**about(), figure=2.5), "what was found", json=file)
    told = capsys.readouterr().out
    assert told.startswith("what was found\nMachine: ")
    assert "Command: python -m " in told
    assert msgspec.json.decode(file.read_bytes(), type=Found).figure == 2.5


def test_what_stops_a_program_is_one_sentence() -> None:
    def main(json: JsonFile = None) -> None:
        raise BenchError(f"Nothing for {json}.")

    result = CliRunner().invoke(program(main), ["--json", "x"])
    assert (result.exit_code, result.output) == (2, "error: Nothing for x.\n")


def test_unknown_names_are_refused() -> None:
    assert one_of("--policy", "ab", "abc") == ["a", "b"]
    with pytest.raises(typer.BadParameter, match="'d' is not one of a, b, c"):
        one_of("--policy", "ad", "abc")
