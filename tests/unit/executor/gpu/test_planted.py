"""Each bug of `planted.txt` can be planted; whether tests find it, `python -m tests.unit.executor.gpu.planted` says."""

from collections import Counter

from tests.unit.executor.gpu.planted import ROOT, bugs


def test_what_each_bug_changes_stands_once_in_its_file() -> None:
    texts = {path: path.read_text() for path in {ROOT / bug.file for bug in bugs()}}
    assert [bug.about for bug in bugs() if texts[ROOT / bug.file].count(bug.old) != 1] == []


def test_each_bug_has_tests_and_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(bug.about for bug in bugs()).items() if count > 1] == []
    assert [bug.about for bug in bugs() if not all((ROOT / test).is_file() for test in bug.tests)] == []
