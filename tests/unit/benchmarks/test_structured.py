"""The benchmark's texts go on to the end."""

from collections.abc import Iterator

import pytest

from benchmarks.engine.structured import CASES, Bench
from services.executor.structured_output import GrammarWork, Vocabulary
from services.executor.worker.stub import StubEngine, StubSettings
from tests.unit.executor.structured_output.guided_ring import CARD


@pytest.fixture
def bench() -> Iterator[Bench]:
    engine, work = StubEngine(StubSettings(), lambda seconds: None), GrammarWork()
    work.load(CARD, b"")
    made = Bench(engine.execute, engine.load(lambda *_: None), Vocabulary.of(CARD, b""), work)
    yield made
    made.compiler.close()
    work.close()


@pytest.mark.parametrize("name", CASES)
def test_texts_have_all_their_tokens(bench: Bench, name: str) -> None:
    taken, text = bench.decode(CASES[name], 2, 50)
    assert taken > 0
    assert len(text) == 50
