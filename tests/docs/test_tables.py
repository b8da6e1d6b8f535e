"""The tables that pages have of the code: each has its place, and says something of everything."""

import re
import sys

import pytest

from services.executor.engines.catalog import CANNOT
from shared.engine_features import FEATURES
from shared.limits import LIMITS
from tests.docs.__main__ import main
from tests.docs.configuration import OTHERS, names, undescribed
from tests.docs.folders import folders
from tests.docs.pages import ROOT, pages
from tests.docs.tables import MARK, TABLES, with_tables
from tests.monitoring.catalogue import series


def test_each_table_has_one_place_and_its_page_says_what_prints_it() -> None:
    places = {name: page for page in pages() for name in MARK.findall(page.read_text())}
    assert places.keys() == TABLES.keys()
    for name, page in places.items():
        assert f"python -m tests.docs {name}" in page.read_text()
    assert sum(len(MARK.findall(page.read_text())) for page in pages()) == len(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_rows_of_the_same_cells(name: str) -> None:
    page = with_tables(f"before\n<!-- table: {name} -->\nafter")
    assert page == f"before\n{TABLES[name]()}\nafter"
    for block in re.findall(r"(?:^\|.*\n?)+", page, re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in block.splitlines()]
        assert len(rows) > 2
        assert set(rows) == {rows[0]}


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.docs", "folders"])
    main()
    assert capsys.readouterr().out == TABLES["folders"]() + "\n"


def test_the_metrics_are_those_that_there_are() -> None:
    table = TABLES["metrics"]()
    assert [name for name in series() if re.sub("_(bucket|sum|count)$", "", name) not in table] == []


def test_every_limit_is_in_the_table() -> None:
    table = TABLES["limits"]()
    assert [limit.name for limit in LIMITS if f"| `{limit.name}` | {limit.holder} |" not in table] == []


def test_what_engines_cannot_do_are_features_that_requests_may_ask_for() -> None:
    assert {name for cannot in CANNOT.values() for name in cannot} <= FEATURES.keys()
    assert "| `prompt_logprobs` | yes | refused | refused | refused | refused |" in TABLES["engines"]()


def test_every_folder_says_what_it_holds() -> None:
    assert [name for name, holds in folders() if not holds] == []


def test_every_setting_is_described() -> None:
    assert undescribed() == []


def test_every_variable_that_the_product_reads_is_in_the_table() -> None:
    sources = [path for part in ("services", "shared") for path in (ROOT / part).rglob("*.py")]
    found = {name for path in sources for name in re.findall(r"\bRYZANSTEIN_[A-Z_]*[A-Z]\b", path.read_text())}
    known = names() | {name for name in found if name.startswith("RYZANSTEIN_NATS_PASSWORD_")}
    assert found - known == set()
    assert {name for name in OTHERS if "<" not in name} <= found
    assert [name for name in names() if f"`{name}`" not in TABLES["settings"]()] == []
