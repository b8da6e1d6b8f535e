"""Requests that kill the ring that computes them, among others, in any order of steps and other deaths."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.token_stream import GenerationLimits, StreamDecision
from shared.errors import FatalRequest
from shared.messages import GenerationRequest, RingDeath, TokenEntry

LIMITS = GenerationLimits(max_attempts=1000, token_timeout=100.0, stall=10.0)
RINGS = 3


def generation(name: str) -> Generation:
    return Generation(GenerationRequest(name, "r", "m", "c", [1], 9), 0, LIMITS, now=0.0, started_at=0.0)


def on_ring(made: Generation, group: str, epoch: int) -> None:
    entry = TokenEntry(made.id, made.stream.attempt, len(made.tokens), [])
    made.on_entry(group, epoch, entry, 1.0)


class Cluster:
    """Rings as the executors are: a suspect is computed in a step of its own."""

    def __init__(self, fatal: set[str], names: list[str], data: st.DataObject) -> None:
        self.fatal, self.data = fatal, data
        self.generations = {name: generation(name) for name in names}
        self.rings: list[list[str]] = [[] for _ in range(RINGS)]
        self.epochs = [1] * RINGS
        self.killed = dict.fromkeys(names, 0)
        for name in names:
            self.place(name)

    def place(self, name: str) -> None:
        ring = self.data.draw(st.integers(0, RINGS - 1))
        self.rings[ring].append(name)
        on_ring(self.generations[name], f"g{ring}", self.epochs[ring])

    def step(self, ring: int) -> None:
        together = [name for name in self.rings[ring] if not self.generations[name].request.suspected]
        steps = [[name] for name in self.rings[ring] if name not in together]
        steps += [together] if together else []
        if not steps:
            return
        names = self.data.draw(st.sampled_from(steps))
        computed = names[: self.data.draw(st.integers(1, len(names)))]
        killers = [name for name in computed if name in self.fatal]
        for name in killers:
            self.killed[name] += 1
        if killers:
            cause = self.data.draw(st.sampled_from(["out_of_memory", "crashed", "hung"]))
            self.die(ring, RingDeath(self.epochs[ring], cause, sorted(computed)))
            return
        for name in computed:
            self.compute(name, ring)

    def compute(self, name: str, ring: int) -> None:
        made = self.generations[name]
        done = len(made.tokens) == 3
        entry = TokenEntry(name, made.stream.attempt, len(made.tokens), [7], finish="length" if done else "")
        made.on_entry(f"g{ring}", self.epochs[ring], entry, 1.0)
        if done:
            self.rings[ring].remove(name)

    def die(self, ring: int, death: RingDeath | None) -> None:
        names, self.rings[ring] = self.rings[ring], []
        epoch, self.epochs[ring] = self.epochs[ring], self.epochs[ring] + 1
        for name in names:
            made = self.generations[name]
            assert made.on_group_lost(f"g{ring}", epoch, death) is StreamDecision.RECOVER
            if made.next_attempt(2.0, 0.0) is not None:
                self.place(name)


@given(data=st.data(), count=st.integers(1, 8))
def test_each_ends_two_rings_at_most_and_nobody_else_fails(data: st.DataObject, count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    fatal = data.draw(st.sets(st.sampled_from(names)))
    cluster = Cluster(fatal, names, data)
    outside = data.draw(st.integers(0, 4))
    for _ in range(2000):
        busy = [ring for ring in range(RINGS) if cluster.rings[ring]]
        if not busy:
            break
        ring = data.draw(st.sampled_from(busy))
        if outside and data.draw(st.booleans()):
            outside -= 1
            cluster.die(ring, data.draw(st.sampled_from([None, RingDeath(cluster.epochs[ring])])))
        else:
            cluster.step(ring)
    for name, made in cluster.generations.items():
        assert cluster.killed[name] <= 2
        assert made.state == ("failed" if name in fatal else "finished")
        assert (type(made.error) is FatalRequest) == (name in fatal)


def test_the_error_says_which_ring_died_of_what() -> None:
    made = generation("g")
    on_ring(made, "a", 1)
    made.on_group_lost("a", 1, RingDeath(1, "out_of_memory", ["g", "h"]))
    request = made.next_attempt(1.0, 0.0)
    assert request.suspected == "out_of_memory"
    on_ring(made, "b", 1)
    made.on_group_lost("b", 1, RingDeath(1, "hung", ["g"]))
    assert made.next_attempt(1.0, 0.0) is None
    assert "the first ran out of memory, the second hung while computing nothing else" in str(made.error)


def test_who_waited_or_ran_beside_a_suspect_is_not_suspected() -> None:
    made = generation("g")
    on_ring(made, "a", 1)
    made.on_group_lost("a", 1, RingDeath(1, "crashed", ["other"]))
    request = made.next_attempt(1.0, 0.0)
    assert not request.suspected


def test_a_gateway_that_takes_over_learns_of_the_suspicion_from_the_log() -> None:
    made = generation("g")
    made.on_entry("b", 1, TokenEntry("g", 0, 0, [], suspected="crashed"), 1.0)
    made.on_group_lost("b", 1, RingDeath(1, "crashed", ["g"]))
    assert made.next_attempt(1.0, 0.0) is None
    assert isinstance(made.error, FatalRequest)
