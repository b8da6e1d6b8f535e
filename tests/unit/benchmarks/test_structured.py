"""The benchmark's grammars compile, its texts go on to the end, and its masks are of those texts."""

from collections.abc import Iterator

import pytest

from benchmarks.engine.structured import CASES, DRAFTED, GRAMMARS, Bench, drafted, endless
from benchmarks.errors import BenchError
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
    if CASES[name].grammar is not None:
        assert len(bench.masks(endless(8), text)) == 50


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_compile(bench: Bench, name: str) -> None:
    assert min(bench.compile(GRAMMARS[name])) > 0


def test_texts_are_compared_with_and_without_drafts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(drafted(bench, 1, [2], 40).rows) == len(DRAFTED)
    texts = iter(({"0": [1]}, {"0": [2]}))
    monkeypatch.setattr(bench, "rate", lambda *_: (1.0, next(texts)))
    with pytest.raises(BenchError, match="one record, greedy, 2 at once: with drafts the texts are others"):
        drafted(bench, 1, [2], 40)
