"""Who goes first: lanes, arrival, and batch sequences that make way."""

from tests.unit.executor.engine.fake_engine import undisturbed
from tests.unit.executor.engine.stepped_ring import Ring, ask


def test_lanes_before_arrival_and_fifo_within_a_lane() -> None:
    ring = Ring(tokens=4, sequences=4)
    names = [("b1", "batch"), ("i1", "interactive"), ("i2", "interactive"), ("r1", "recovery")]
    ring.add(*(ask(name, 4, max_tokens=1, lane=lane) for name, lane in names))
    ring.run()
    assert [entry.generation_id for entry in ring.log] == ["r1", "i1", "i2", "b1"]


def test_an_urgent_prompt_goes_before_the_rest_of_a_batch_prompt() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("bulk", 60, lane="batch"))
    ring.step()
    ring.add(ask("quick", 6))
    assert [entry.generation_id for entry in ring.step()] == ["quick"]


def test_a_batch_sequence_gives_its_place_to_an_interactive_one() -> None:
    ring = Ring(sequences=2)
    ring.add(ask("b1", lane="batch", max_tokens=8), ask("b2", lane="batch", max_tokens=8))
    ring.step()
    ring.add(ask("i"))
    assert [entry.generation_id for entry in ring.step()] == ["b1", "i"]
    ring.run()
    assert ring.tokens("b2") == undisturbed(ask("b2"), 8)


def test_batch_sequences_stay_where_their_blocks_would_not_be_enough() -> None:
    ring = Ring(blocks=10, sequences=3)
    ring.add(ask("i1", 24, max_tokens=8), ask("b", 4, lane="batch", max_tokens=8))
    ring.step()
    ring.step()
    ring.add(ask("i2", 30))
    ring.step()
    assert ring.batcher.load().running == 2
    assert ring.batcher.preemptions == 0


def test_interactive_sequences_do_not_make_way_for_recovery() -> None:
    ring = Ring(sequences=1)
    ring.add(ask("i"))
    ring.step()
    ring.add(ask("r", lane="recovery"))
    assert [entry.generation_id for entry in ring.step()] == ["i"]
