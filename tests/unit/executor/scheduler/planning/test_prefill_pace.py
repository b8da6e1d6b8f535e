"""Long prompts beside decodes: what a step takes of them, learnt on machines of many kinds, and whose turn it is."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.core.settings import longest_stretch
from services.executor.scheduler.planning.prefill_pace import PATIENCE, QUIET_EVERY, PrefillPace
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, ask, lens


class Machine(NamedTuple):
    """Seconds of a step."""

    base: float = 0.03
    decode: float = 0.0005
    fixed: float = 0.0  # of any prompt tokens at all
    token: float = 0.0014
    pair: float = 2e-8
    tile: float = 0.0  # of each key, for each 16 tokens that read it together
    noise: float = 0.02
    hiccups: float = 0.002

    def seconds(self, rng: random.Random, decodes: int, start: int, length: int) -> float:
        pairs = length * (start + length / 2)
        prompt = (self.fixed if length else 0.0) + self.token * length + self.pair * pairs
        prompt += self.tile * (start + length) * -(-length // 16)
        hiccup = 8 if rng.random() < self.hiccups else 1
        return (self.base + self.decode * decodes + prompt) * rng.lognormvariate(0, self.noise) * hiccup

    def quiet(self, decodes: int) -> float:
        return self.base + self.decode * decodes


Decodes = Callable[[int], int]


def computed(
    machine: Machine,
    prompt: int,
    start: int = 0,
    warm: int = 30,
    decodes: Decodes = lambda _: 4,
    seed: int = 1,
    gap: float = 0.0,
) -> tuple[list[float], list[int]]:
    """A prompt computed to its end beside decodes: how many times its quiet time each step took, and its tokens.
    `warm`: steps without a prompt before it."""
    rng, pace = random.Random(seed), PrefillPace(1.5, gap)
    for _ in range(warm):
        pace.observe(decodes(0), [], machine.seconds(rng, decodes(0), 0, 0))
    stretches: list[float] = []
    lengths: list[int] = []
    while start < prompt:
        running = decodes(len(lengths))
        length = pace.tokens(running, start, prompt - start)
        assert 0 <= length <= prompt - start
        seconds = machine.seconds(rng, running, start, length)
        pace.observe(running, [(start, length)] if length else [], seconds)
        stretches.append(seconds / machine.quiet(running))
        lengths.append(length)
        start += length
    return stretches, lengths


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@settings(max_examples=15, deadline=None)
@given(st.floats(0.002, 0.2), st.floats(0.005, 0.08), st.floats(1e-6, 1e-5), st.floats(0.0, 0.1), st.integers(0, 1000))
def test_steps_take_at_most_their_stretch_on_any_linear_machine(
    base: float, token: float, pair: float, fixed: float, seed: int
) -> None:
    """`token`, `pair` and `fixed` in shares of a quiet step: at the end of the prompt a token costs 0.01 to 0.1."""
    machine = Machine(base, base / 100, fixed * base, token * base, pair * base, hiccups=0.0)
    stretches, lengths = computed(machine, 2500, seed=seed)
    learnt = stretches[10:]  # the first chunks are those that it learns from
    assert percentile(learnt, 0.98) <= 1.5 * 1.1  # a step without the prompt takes up to 1.05 of its mean
    assert sum(lengths) / len(lengths) >= 0.5 * (0.42 - fixed) / (token + pair * 2500) - 1  # the time is used


@settings(max_examples=15, deadline=None)
@given(st.floats(0.002, 0.03), st.floats(1e-4, 5e-4), st.floats(4e-8, 1e-7), st.integers(0, 1000))
def test_steps_may_take_the_gap_on_any_linear_machine(base: float, token: float, pair: float, seed: int) -> None:
    """At the end of the prompt a token costs 0.2 to 0.75 ms."""
    machine = Machine(base, base / 100, 0.0, token, pair, hiccups=0.0)
    stretches, lengths = computed(machine, 2500, seed=seed, gap=0.02)
    allowed = max(1.5, 0.02 / machine.quiet(4))
    assert percentile(stretches[10:], 0.98) <= allowed * 1.1
    free = 0.85 * (allowed - 1) * machine.quiet(4)
    assert sum(lengths) / len(lengths) >= 0.5 * free / (token + pair * 2500) - 1


def test_where_steps_are_short_a_prompt_has_time_all_the_same() -> None:
    """Of a small model: a token behind some thousand others costs nearly as much as 16 of them."""
    machine = Machine(0.0035, 0.0001, 0.0, 0.0006, 2e-7, 1e-6, hiccups=0.0)
    slow, _ = computed(machine, 6800)
    fast, _ = computed(machine, 6800, gap=0.02)
    assert percentile(fast, 0.99) * machine.quiet(4) <= 0.022
    assert sum(fast) < 0.3 * sum(slow)


def test_tokens_that_read_keys_together_are_computed_together() -> None:
    """Where no step has time for one of them by itself, several steps pay for several."""
    _, lengths = computed(Machine(0.01, 0.0, 0.0, 1e-4, 1e-9, 1e-5, hiccups=0.0), 3000, start=2000)
    computing = [length for length in lengths if length]
    assert percentile([float(length) for length in computing], 0.5) >= 4


def test_the_first_chunks_are_small_and_grow() -> None:
    _, lengths = computed(Machine(token=1e-6, pair=0), 20_000, warm=0)
    assert lengths[0] == 16
    assert 0 in lengths[1:3]  # the decodes' own time is seen first
    assert max(lengths) > 1000
    assert len(lengths) < 60


def test_a_depth_that_was_never_tried_is_entered_with_care() -> None:
    """What was learnt of short prompts says little of a prompt that goes on behind 100,000 cached tokens."""
    machine = Machine(pair=1.2e-7, noise=0.0, hiccups=0.0)
    rng, pace = random.Random(1), PrefillPace(1.5)
    for _ in range(20):
        pace.observe(4, [], machine.seconds(rng, 4, 0, 0))
        pace.observe(4, [(0, 40)], machine.seconds(rng, 4, 0, 40))
    for at in range(40):
        length = pace.tokens(4, 100_000, 1000)
        seconds = machine.seconds(rng, 4, 100_000, length)
        assert seconds <= (2.5 if at < 5 else 1.6) * machine.quiet(4)
        pace.observe(4, [(100_000, length)] if length else [], seconds)


def test_a_machine_that_changes_its_speed_is_followed() -> None:
    """Another process takes half of it for a while."""
    fast = Machine(hiccups=0.0)
    slow = Machine(2 * fast.base, 2 * fast.decode, 0.0, 2 * fast.token, 2 * fast.pair, hiccups=0.0)
    rng, pace = random.Random(3), PrefillPace(1.5)
    for machine in (fast, slow, fast, slow, fast):
        late = []
        for at in range(300):
            length = pace.tokens(4, 500, 1 << 20)
            seconds = machine.seconds(rng, 4, 500, length)
            pace.observe(4, [(500, length)] if length else [], seconds)
            late += [seconds / machine.quiet(4)] if at >= 100 else []
        assert percentile(late, 0.95) <= 1.6


def test_a_token_that_no_step_has_time_for_is_computed_all_the_same() -> None:
    _, lengths = computed(Machine(token=0.5), 60)
    assert "0" * PATIENCE not in "".join("0" if length == 0 else "1" for length in lengths)


def test_steps_that_cost_much_by_themselves_are_few_and_large() -> None:
    """A GPU's, whose graphs have no place for prompts: the decodes' mean time is stretched as far, not each step's."""
    stretches, lengths = computed(Machine(0.005, 0.0, 0.008, 0.00002, 0.0), 50_000)
    assert max(lengths) > 100
    assert sum(stretches) / len(stretches) <= 1.6


def test_decodes_are_timed_by_themselves_now_and_then() -> None:
    """Beside ever more decodes, and though none is seen without the prompt otherwise."""
    stretches, lengths = computed(Machine(decode=0.002), 5000, decodes=lambda step: 4 + step // 60)
    assert max(lengths.index(0, at) - at for at in range(len(lengths) - 2 * QUIET_EVERY)) <= QUIET_EVERY
    assert percentile(stretches[20:], 0.99) <= 1.6


@pytest.mark.parametrize("setting", ["", "1", "1.0499", "0", "-2", "two", "1.5x", "1e3", "inf", "nan", "1500"])
def test_what_is_no_stretch_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"is not off or a number of at least 1\.05, such as 1\.5"):
        longest_stretch(setting)


def test_stretches() -> None:
    assert [longest_stretch(text) for text in ("off", "1.05", "1.5", "2", "100")] == [0.0, 1.05, 1.5, 2.0, 100.0]


# --- in the batch --------------------------------------------------------------------------------


def streaming(ring: Ring, *names: str, **fields: object) -> None:
    """Requests that decode, and whose steps have been timed."""
    ring.add(*(ask(name, 3, max_tokens=150, **fields) for name in names))
    for _ in range(6):
        ring.step()


def test_a_long_prompt_takes_its_share_of_steps_and_a_short_one_goes_at_once() -> None:
    ring = Ring(blocks=200, tokens=32, stretch=1.5)
    streaming(ring, "stream")
    ring.add(ask("long", 100, max_tokens=2))
    first = []
    for _ in range(12):
        ring.step()
        first.append(sum(lens(ring.plans[-1][0])))
    assert max(first) <= 17  # the careful chunk, and the stream's own token
    assert percentile([float(n) for n in first[-6:]], 0.9) <= 6  # 11 ms for itself leave 5.5 ms
    ring.add(ask("short", 20, max_tokens=2))
    assert "short" in [entry.generation_id for entry in ring.step()]
    ring.run()
    for name, prompt, most in (("long", 100, 2), ("short", 20, 2), ("stream", 3, 150)):
        assert ring.tokens(name) == undisturbed(ask(name, prompt, max_tokens=most), most)


def test_a_long_prompt_gets_what_the_gap_leaves() -> None:
    ring = Ring(blocks=200, tokens=32, stretch=1.5, gap=0.03)
    streaming(ring, "stream")
    ring.add(ask("long", 150, max_tokens=2))
    computed_by_step = []
    for _ in range(10):
        ring.step()
        computed_by_step.append(sum(lens(ring.plans[-1][0])))
    assert percentile([float(n) for n in computed_by_step[-6:]], 0.5) >= 12  # 11 ms for itself leave 19 ms
    assert max(computed_by_step) <= 20
    ring.run()
    assert ring.tokens("long") == undisturbed(ask("long", 150, max_tokens=2), 2)


@pytest.mark.parametrize("lane", ["batch", ""])
def test_whole_steps_are_taken_where_nobody_waits_for_decodes(lane: str) -> None:
    ring = Ring(blocks=200, tokens=32, stretch=1.5)
    if lane:
        streaming(ring, "bulk", lane=lane)
    ring.add(ask("long", 100, max_tokens=2))
    ring.step()
    assert sum(lens(ring.plans[-1][0])) == 32


def test_long_prompts_take_turns_and_those_of_the_batch_lane_come_last() -> None:
    ring = Ring(blocks=300, tokens=32, stretch=1.5, sequences=5)
    streaming(ring, "stream")
    prompts = {name: [(n + len(name) * 3) % 50 for n in range(90)] for name in ("long-1", "longer-2", "bulky-work")}
    for name, prompt in prompts.items():
        ring.add(ask(name, prompt, max_tokens=1, lane="batch" if name == "bulky-work" else "interactive"))
    for _ in range(20):
        ring.step()
    left = {s.request.generation_id: s.remaining for s in ring.batcher._planner.running}
    assert abs(left["long-1"] - left["longer-2"]) <= 16
    assert left["long-1"] < 80
    assert left["bulky-work"] == 90
    ring.run()
    assert [entry.generation_id for entry in ring.log if entry.finish][-1] in ("bulky-work", "stream")
    for name, prompt in prompts.items():
        assert ring.tokens(name) == undisturbed(ask(name, prompt, max_tokens=1), 1)


def test_long_prompts_alike_share_what_each_computes_and_nobody_waits_for_it() -> None:
    ring = Ring(blocks=300, tokens=64, stretch=1.5)
    streaming(ring, "stream")
    ring.add(ask("a", list(range(50)) * 2, max_tokens=2), ask("b", [*range(50), *range(50)], max_tokens=2))
    ring.step()
    ring.add(ask("short", list(range(30)), max_tokens=2))
    assert "short" in [entry.generation_id for entry in ring.step()]
    ring.run()
    assert ring.tokens("a") == ring.tokens("b") == undisturbed(ask("a", list(range(50)) * 2), 2)
    assert ring.batcher.cached_tokens >= 24


def test_a_prompt_beside_streams_keeps_a_new_request_waiting_for_one_step_at_most() -> None:
    ring = Ring(blocks=300, tokens=32, stretch=1.5)
    ring.add(ask("long", 150, max_tokens=1))
    ring.step()
    assert ring.batcher.load().waiting_tokens == 150 - 32
    ring.add(ask("stream", 3, max_tokens=150))
    while not ring.tokens("stream"):
        ring.step()
    ring.add(ask("longer", [n % 7 for n in range(190)], max_tokens=1))
    ring.step()
    ring.step()
    assert ring.batcher.load().waiting_tokens <= 2 * 32
    assert ring.batcher.shares_time or not lens(ring.plans[-1][0])[1:]


# --- how far they are ----------------------------------------------------------------------------


def test_a_prompt_that_takes_long_is_told_of_once_a_second() -> None:
    ring = Ring(blocks=300, tokens=10)
    ring.now = 5.0
    ring.add(ask("long", 100, max_tokens=2), ask("short", 5, max_tokens=2))
    told = []
    while not ring.tokens("long"):
        told += [(ring.now, e.computed, e.position, e.tokens) for e in ring.step() if e.computed]
        ring.now += 0.4
    times = [now for now, *_ in told]
    assert times[0] - 5.0 >= 1.0
    assert min(later - now for now, later in pairwise(times)) >= 1.0
    assert [entry[1:] for entry in told] == [(40, 0, []), (70, 0, [])]
    ring.run()
    assert ring.tokens("long") == undisturbed(ask("long", 100), 2)


def test_what_was_computed_again_after_a_failover_is_told_within_the_prompt() -> None:
    ring = Ring(blocks=300, tokens=4)
    generated = undisturbed(ask("again", 10), 40)
    ring.now = 1.0
    ring.add(ask("again", 10, max_tokens=45, generated=generated))
    told = []
    while not ring.tokens("again"):
        told += [(entry.computed, entry.position) for entry in ring.step() if entry.computed]
        ring.now += 0.5
    assert told
    assert {position for _, position in told} == {40}
    assert max(computed for computed, _ in told) == 10
