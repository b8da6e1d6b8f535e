"""The model of the broker answers as nats-server: a new nats-server that behaves otherwise is seen here."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.simulation.conformance import drawn
from tests.simulation.conformance.__main__ import both, run_drawn
from tests.simulation.conformance.operations import Script, do, script
from tests.simulation.conformance.runner import compare, operations
from tests.simulation.conformance.scripts import CORPUS
from tests.simulation.conformance.servers import Model, Server


class Pairs:
    """nats-server and the model, on a loop of their own; more of them where a script wants others."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self.runner, self._directory = runner, directory
        self._stack = AsyncExitStack()
        self._pairs: dict[tuple[int, bool], tuple[Server, Server]] = {}

    def of(self, room: int = 0, users: bool = False) -> tuple[Server, Server]:
        if (room, users) not in self._pairs:
            pair = both(self._directory / f"{room}-{users}", room=room, users=users)
            self._pairs[room, users] = self.runner.run(self._stack.enter_async_context(pair))
        return self._pairs[room, users]

    def close(self) -> None:
        self.runner.run(self._stack.aclose())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with asyncio.Runner() as runner:
        made = Pairs(runner, tmp_path_factory.mktemp("servers"))
        yield made
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", CORPUS, ids=lambda script: script.name)
def test_both_do_the_same(pairs: Pairs, script: Script) -> None:
    found = pairs.runner.run(compare(script, *pairs.of(script.room, script.users)))
    assert found is None, str(found)


@pytest.mark.parametrize("family", drawn.FAMILIES)
def test_both_do_the_same_by_scripts_that_are_drawn(pairs: Pairs, family: str) -> None:
    run_drawn(pairs.runner, pairs.of(), drawn.FAMILIES[family](), 12)


@pytest.mark.slow
@pytest.mark.parametrize("family", drawn.FAMILIES)
def test_both_do_the_same_by_many_scripts_that_are_drawn(pairs: Pairs, family: str) -> None:
    run_drawn(pairs.runner, pairs.of(), drawn.FAMILIES[family](), 60, seed=1)


def test_scripts_name_operations_and_who_needs_them() -> None:
    known = operations()
    assert {step.name for one in CORPUS for step in one.steps} <= known
    assert all(one.needed_by for one in CORPUS)
    assert len({one.name for one in CORPUS}) == len(CORPUS)


def test_a_difference_is_shown_with_the_steps_before_it(pairs: Pairs, tmp_path: Path) -> None:
    steps = (do("add_stream", name="S", subjects=["s"], max_bytes=1 << 20), do("stored", subject="s"), do("flush"))
    small = Model(tmp_path, room=1000)
    pairs.runner.run(small.start())
    try:
        found = pairs.runner.run(compare(script("a stream", "nobody", *steps), pairs.of()[0], small))
    finally:
        pairs.runner.run(small.stop())
    assert found.place == 0
    shown = str(found)
    assert "--> a: add_stream(name='S'" in shown
    assert "insufficient storage resources" in shown


def test_an_operation_that_is_not_known_is_a_fault_of_the_script(pairs: Pairs) -> None:
    with pytest.raises(LookupError, match="no operation dance"):
        pairs.runner.run(compare(script("a dance", "nobody", do("dance")), *pairs.of()))
