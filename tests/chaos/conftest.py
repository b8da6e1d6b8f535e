"""One house for all faults of the stub engine, and the table of what they cost."""

import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.exercise import Row, markdown
from tests.chaos.faults import CUTTABLE
from tests.chaos.load import Load, stub_load

_rows: list[Row] = []
_notes: list[str] = []

Loader = Callable[[House], Load]


@pytest.fixture
def note() -> Callable[[Row], None]:
    """Takes a row for the table at the end."""
    return _rows.append


@pytest.fixture
def remark() -> Callable[[str], None]:
    """Takes a line below the table."""
    return _notes.append


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """Two of everything, rings of two ranks, whole again after every fault."""
    async with House(tmp_path_factory.mktemp("house"), Plan(cuttable=CUTTABLE)) as house:
        _notes.append(f"Links were cut with: {house.cut_with}.")
        yield house


@pytest.fixture
def load() -> Loader:
    return lambda house: stub_load(house.addresses, random.Random())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows or _notes:
        terminalreporter.section("chaos")
        if _rows:
            terminalreporter.write_line(markdown(_rows))
        for line in _notes:
            terminalreporter.write_line(line)
