from pathlib import Path

import msgspec

from benchmarks.errors import write_json
from benchmarks.harness import machine, versions
from benchmarks.report import ServeReport, Setting, cells, markdown, number, parts, remarks
from benchmarks.serve.stats import Spread, Summary, Turn
from tests.unit.benchmarks.terminal import shown

SETTING = Setting(
    date="2026-11-20",
    command="python -m benchmarks.serve",
    url="http://127.0.0.1:8000",
    model="small",
    seed=7,
    machine="a machine, 2 cores",
    versions={"python": "3.11.7"},
)


def summary(workload: str, **changes: object) -> Summary:
    fields: dict[str, object] = {
        "workload": workload,
        "requests": 48,
        "rounds": 3,
        "errors": 0,
        "error_messages": {},
        "seconds": 10.0,
        "output_tokens": 6144.0,
        "output_tokens_per_second": 614.4,
        "requests_per_second": 4.8,
        "first_token_ms": Spread(155.2, 1198.4),
        "gap_ms": Spread(8.31, 81.0),
        "pause_ms": Spread(80.0, 180.0),
        "request_ms": Spread(2500.0, 3100.0),
        "tokens_per_event": 1.0,
        "turns": [],
        "client_cpu": 0.05,
        "warnings": [],
    }
    return Summary(**{**fields, **changes})  # type: ignore[arg-type]


TURNS = [Turn(first_token_ms=ms, prompt_tokens=100, cached_tokens=0) for ms in (183.0, 71.0, 79.0, 12.34)]
FAILED = summary(
    "W2",
    errors=48,
    error_messages={"HTTP 503: full": 48},
    first_token_ms=None,
    gap_ms=None,
    pause_ms=None,
    request_ms=None,
    warnings=["something is off"],
)


def report(*summaries: Summary) -> ServeReport:
    return ServeReport(setting=SETTING, summaries=list(summaries), rounds=[[each] for each in summaries])


def test_a_row_has_a_cell_for_every_column() -> None:
    assert cells(summary("W2")) == ("W2", "48 x 3", "614", "155/1198", "8.3/81", "80/180", "2500/3100", "0", "")
    assert cells(summary("W4", turns=TURNS))[-1] == "183/71/79/12.3"


def test_a_row_of_failures_shows_no_figures() -> None:
    assert cells(FAILED) == ("W2", "48 x 3", "-", "-", "-", "-", "-", "48", "")


def test_numbers_have_the_digits_they_bear() -> None:
    assert [number(value) for value in (0.04, 7.84, 19.94, 20.4, 1151.2)] == ["0.0", "7.8", "19.9", "20", "1151"]


def test_markdown_is_a_table_with_all_that_is_needed_to_repeat_it() -> None:
    text = markdown(report(summary("W1"), FAILED))
    assert "`python -m benchmarks.serve`" in text
    assert "| W1 | 48 x 3 | 614 | 155/1198 | 8.3/81 | 80/180 | 2500/3100 | 0 |  |" in text
    assert "- W2: something is off." in text
    assert "- W2: 48 x error: HTTP 503: full" in text
    assert "a machine, 2 cores" in text
    assert "2026-11-20, seed 7; python 3.11.7" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_turns_say_what_they_had_to_compute() -> None:
    turns = [Turn(first_token_ms=30, prompt_tokens=100, cached_tokens=40), Turn(40, 264, 160)]
    said = remarks([summary("W4s", turns=turns), summary("W1")])
    assert said == [
        "W4s: prompt tokens not found in the cache, by turn: 60/104; ms to the first token for each of them: 0.50/0.38."
    ]


def test_the_terminal_shows_the_same() -> None:
    text = shown(*parts(report(summary("W1"), FAILED)))
    for part in ("first token p50/p99 ms", "155/1198", "HTTP 503: full", "a machine, 2 cores", "seed 7"):
        assert part in text


def test_json_reads_back_as_the_same_report(tmp_path: Path) -> None:
    whole = report(summary("W4", turns=TURNS), FAILED)
    write_json(tmp_path / "report.json", whole)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=ServeReport) == whole


def test_the_machine_and_versions_are_known() -> None:
    assert " cores" in machine()
    assert {"python", "uvloop", "httptools"} <= versions().keys()
