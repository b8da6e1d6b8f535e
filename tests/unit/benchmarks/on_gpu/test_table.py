"""What a run prints, and what becomes of it in docs/gpu.md."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.on_gpu.bench import Report, Row, SectionResult, combined, data_sheet, line, shown
from benchmarks.on_gpu.table import BEGIN, END, aims, markdown, parts, put_into
from tests.unit.benchmarks.terminal import shown as rendered

PAGE = Path(__file__).parents[4] / "docs/gpu.md"
BF16 = Row("decode/8b/bf16/kv-bf16/1024/1", "decode", 250.0, "tok/s", 286.0, 0.874, "4.00 ms a step")
FP8 = replace(BF16, key="decode/8b/bf16/kv-fp8/1024/1", figure=240.0)
PREFILL = Row("prefill/bf16/8192/2048", "prefill", 30000.0, "tok/s", 44000.0, 0.55)
LOADING = Row("loading/load", "13B loaded", 0.8, "s")


def report(*rows: Row) -> Report:
    machine = {"card": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"}
    return Report(
        "2026-01-01",
        "python -m benchmarks.gpu",
        False,
        570,
        machine,
        [SectionResult("all", "done", 9, rows=list(rows))],
    )


def test_aims_are_met_or_not_or_not_measured() -> None:
    found = {aim.what.split(" (")[0]: aim.verdict for aim in aims(report(BF16, FP8, PREFILL))}
    assert found == {
        "85% of the bandwidth limit at batch 1": "met",
        "60% of the matrix rate in prefill": "not met",
        "fp8 KV not slower than bf16 KV": "not met",
        "13B loaded in under 1 s from page cache": "not measured",
        "int4 weights twice as fast as bf16 at batch 1": "not measured",
        "QLoRA of a 7B on 10,000 examples of 512 tokens in under an hour, projected": "not measured",
    }


def test_all_of_loading_counts_and_not_its_parts() -> None:
    part = replace(LOADING, key="loading/plain", figure=0.5)
    assert aims(report(part))[-1].verdict == "not measured"
    assert aims(report(part, LOADING))[-1].verdict == "met"
    assert aims(report(part, replace(LOADING, figure=3.0)))[-1].verdict == "not met"


def test_the_table_has_every_row_every_error_and_the_aims() -> None:
    whole = report(BF16, Row("x", "not fitting", None, note="does not fit"), Row("y", "kernels", 0.5, ok=False))
    whole.sections.append(SectionResult("late", "skipped", error=["0 s were [left]"]))
    text = rendered(*parts(whole))
    for part in ("250 tok/s", "87%", "does not fit", "WRONG", "0 s were [left]", "met: 85% of the bandwidth"):
        assert part in text


def test_a_page_gets_its_figures_between_the_marks() -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(f"`{BF16.key}` ")
    row, _, rest = rest.partition("\n")
    page = f"{head}`{BF16.key}` {row.rpartition(' | ')[0]} | not yet measured |\n{rest}"
    filled = put_into(page, report(BF16))
    assert "| 250 tok/s, 87% of the limit (NVIDIA H200, 2026-01-01) |" in filled
    assert filled.count("not yet measured") == page.count("not yet measured") - 1
    assert "| decode | 250 tok/s |" in filled
    assert put_into(filled, report(BF16)) == filled, "what was there before is replaced"
    with pytest.raises(ValueError, match=f"has no lines {BEGIN} and {END}"):
        put_into("nothing", report())


def test_a_page_has_many_checks_as_one_and_no_sums_of_a_ring_of_one() -> None:
    checks = [Row(f"c/{at}", f"check {at}", at / 100, "error", 0.2) for at in range(13)]
    text = markdown(report(*checks, Row("collectives/1/nccl/8192", "sum over 1", 0.2, "us"), BF16))
    assert "check 12; 13 checks are right" in text
    assert "| check 3 |" not in text
    assert "sum over 1" not in text
    wrong = replace(checks[3], ok=False)
    assert "**wrong**" in markdown(report(*checks, wrong))
    assert "| check 3 |" in markdown(report(*checks[:4])), "few are told one by one"


def test_runs_of_one_machine_are_combined() -> None:
    first, second = report(BF16), report(replace(BF16, figure=260.0))
    first.sections.append(SectionResult("machine", "done", rows=[LOADING]))
    both = combined([first, second], ["machine", "all"])
    assert [section.name for section in both.sections] == ["machine", "all"]
    assert both.row(BF16.key) == replace(BF16, figure=260.0)
    later = replace(second, date="another day", machine=second.machine | {"transformers": "another"})
    assert combined([first, later], []).date == f"{first.date} and another day"
    with pytest.raises(ValueError, match="different machines"):
        combined([first, replace(second, machine={})], [])


def test_figures_have_three_digits() -> None:
    assert [shown(value) for value in (None, 0.0, 0.00012, 0.1234, 12.34, 1234.5)] == [
        "-", "0", "1.2e-04", "0.123", "12.3", "1,234",
    ]  # fmt: skip
    assert line(BF16) == "decode: 250 tok/s, 87% of 286"
    assert line(replace(BF16, figure=None)) == "decode: not measured: 4.00 ms a step"


def test_known_cards_have_their_data_sheet() -> None:
    assert data_sheet("NVIDIA H200", 0) == 4.8e12
    assert data_sheet("NVIDIA GH200 480GB", 0) == 4.0e12
    assert data_sheet("NVIDIA A100-SXM4-80GB", 2) is None
    assert data_sheet("another", 0) is None
