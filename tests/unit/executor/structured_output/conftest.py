"""A compiler that the tests of a module share."""

from collections.abc import Iterator

import pytest

from services.executor.structured_output import GrammarCompiler
from tests.unit.executor.structured_output.guided_ring import byte_compiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = byte_compiler()
    yield made
    made.close()
