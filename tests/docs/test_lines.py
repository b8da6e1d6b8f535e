"""The ceilings hold, and all Python below their folders is counted."""

from pathlib import Path

import pytest

from tests.docs.lines import CEILINGS, lines, sums


@pytest.mark.parametrize("folders", CEILINGS, ids=" and ".join)
def test_there_are_no_more_lines_than_there_may_be(folders: tuple[str, ...]) -> None:
    """Either take lines out, or raise the ceiling in tests/docs/lines.py in the commit whose message says why."""
    assert lines(folders) <= CEILINGS[folders]


def test_every_line_of_every_python_file_counts(tmp_path: Path) -> None:
    for name, text in {
        "one/a.py": "a\n\n# b\n",
        "one/deep/b.py": "c\n",
        "two/c.py": "d\n",
        "one/page.md": "e\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert lines(("one",), tmp_path) == 4
    assert lines(("one", "two"), tmp_path) == 5


def test_the_sums_are_printed() -> None:
    assert [line.partition(":")[0] for line in sums()] == ["services and shared", "benchmarks", "tests"]
