"""What `python -m tests.docs` makes is not stale, and says something of everything."""

import re

from tests.docs import models
from tests.docs.__main__ import ARCHITECTURE, CONFIGURATION, MODELS
from tests.docs.configuration import OTHERS, names, page, undescribed
from tests.docs.folders import folders, with_folders
from tests.docs.pages import ROOT


def test_the_page_is_made_of_the_settings() -> None:
    assert CONFIGURATION.read_text() == page(), "python -m tests.docs writes it anew"


def test_the_models_are_those_of_the_catalogue() -> None:
    assert MODELS.read_text() == models.page(), "python -m tests.docs writes it anew"


def test_the_folders_are_those_that_are_there() -> None:
    text = ARCHITECTURE.read_text()
    assert text == with_folders(text), "python -m tests.docs writes it anew"
    assert [name for name, holds in folders() if not holds] == []


def test_every_setting_is_described() -> None:
    assert undescribed() == []


def test_every_variable_that_the_product_reads_is_on_the_page() -> None:
    sources = [path for part in ("services", "shared") for path in (ROOT / part).rglob("*.py")]
    found = {
        name for path in sources for name in re.findall(r"\bRYZANSTEIN_[A-Z_]*[A-Z]\b", path.read_text())
    }
    known = names() | {name for name in found if name.startswith("RYZANSTEIN_NATS_PASSWORD_")}
    assert found - known == set()
    assert {name for name in OTHERS if "<" not in name} <= found
