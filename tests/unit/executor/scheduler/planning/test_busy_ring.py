"""A ring under load for long: sessions that return, others between them, too few blocks for all.

Denser than what a search for the smallest failing case finds: here most steps preempt, evict, spill or
restore something.
"""

import random

import pytest

from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, ask

SESSIONS = 6
TURNS = 5


class Load:
    """Six sessions that say their next turn after each answer, and single requests in all lanes."""

    def __init__(self, ring: Ring, rng: random.Random) -> None:
        self.ring = ring
        self.rng = rng
        self.said: dict[str, list[int]] = {f"s{n}": [] for n in range(SESSIONS)}
        self.turns = dict.fromkeys(self.said, 0)
        self.open: dict[str, GenerationRequest] = {}
        self.done = 0

    def talk(self) -> None:
        """Whoever has its answer says something, sometimes."""
        for session, said in self.said.items():
            waits = any(request.session == session for request in self.open.values())
            if waits or self.turns[session] == TURNS or self.rng.random() < 0.5:
                continue
            self.turns[session] += 1
            prompt = said + [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(3, 14))]
            self._ask(f"{session}-{self.turns[session]}", prompt, session)

    def others(self, number: int) -> None:
        if self.rng.random() < 0.25:
            lane = self.rng.choice(["recovery", "interactive", "batch"])
            prompt = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 30))]
            self._ask(f"o{number}", prompt, "", lane=lane)
        if self.open and self.rng.random() < 0.03:
            self.ring.batcher.cancel([self.rng.choice(sorted(self.open))])

    def _ask(self, name: str, prompt: list[int], session: str, **fields: object) -> None:
        seed, length = self.rng.randrange(4), self.rng.randint(1, 8)
        sampling = SamplingParams(seed=seed)
        self.open[name] = ask(name, prompt, length, session=session, sampling=sampling, **fields)
        self.ring.add(self.open[name])

    def hear(self) -> None:
        """Checks the answers that are complete."""
        for entry in self.ring.log[self.done :]:
            self.done += 1
            if not entry.finish:
                continue
            request = self.open.pop(entry.generation_id)
            answer = self.ring.tokens(entry.generation_id)
            assert answer == undisturbed(request, len(answer))
            assert entry.finish == "cancelled" or len(answer) == request.max_tokens
            if request.session:
                self.said[request.session] = request.prompt + answer


def _run(ring: Ring, load: Load, rng: random.Random) -> None:
    number = 0
    while not (all(turns == TURNS for turns in load.turns.values()) and not load.open):
        number += 1
        assert number < 5000, "livelock"
        ring.now += rng.random()
        load.talk()
        load.others(number)
        if ring.engine.spilled and rng.random() < 0.05:
            ring.engine.unreadable.add(rng.choice(sorted(ring.engine.spilled)))
        if ring.batcher.has_work or ring.later is not None:
            step = ring.next_step()
            if step is None:
                ring.take(ring.batcher.take_entries())
            else:
                ring.finish(step)
        load.hear()


@pytest.mark.parametrize("seed", range(24))
def test_every_answer_is_the_undisturbed_one(seed: int) -> None:
    rng = random.Random(seed)
    quantized = rng.choice([0, 0, 10, 24])
    ring = Ring(
        blocks=rng.randint(4, 12) if quantized else rng.randint(28, 40),
        tokens=rng.randint(6, 24),
        sequences=rng.randint(2, 6),
        context=96,
        ttl=rng.choice([0.0, 10.0, 1000.0]),
        num_quantized=quantized + 16 * (quantized > 0),
        num_host=rng.choice([0, 8, 60]),
        num_disk=rng.choice([16, 100]),
        copies_per_step=rng.choice([2, 5, 30]),
        drafts=(drafts := rng.choice([0, 3, 8])),
        lookahead=seed % 2 == 1,
    )
    _run(ring, Load(ring, rng), rng)
    assert ring.engine.saves
    assert ring.engine.restores
    assert bool(ring.engine.compressions) == bool(quantized)
    assert bool(ring.ahead) == ring.lookahead or drafts  # whose steps are not planned ahead while they pay
    load = ring.batcher.load()
    assert load.free_blocks == load.total_blocks
