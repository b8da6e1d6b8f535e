"""Blocks that go from ring to ring: whatever fails on the way, nobody reads a wrong one, and none is leaked.

The rings' engines check the whole beginning behind every key that they read (`fake_engine.py`).
"""

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.kv_transfer.exchange import Offered, SessionBlock
from services.executor.kv_transfer.sender import Homes, TransferPeer, is_coming, peers_of
from shared.messages import GroupLoad, GroupRecord, SamplingParams
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask

TTL = 1000.0
ANSWER = 3


class Conversation:
    """A session; its turns may be answered by any ring."""

    def __init__(self, number: int, generator: random.Random, salt: str = "") -> None:
        self.name = f"session-{number}"
        self.salt = salt
        self.tokens: list[int] = []
        self.turns = 0
        self._random = generator

    @property
    def reusable(self) -> int:
        return (len(self.tokens) - 1) // BLOCK * BLOCK if self.turns else 0

    def turn(self, ring: Ring) -> int:
        """Cached tokens of its next turn. Checks the text."""
        name = f"{self.name}.{self.turns}"
        self.tokens += [self._random.randrange(VOCAB) for _ in range(self._random.randrange(1, 12))]
        request = ask(
            name,
            list(self.tokens),
            ANSWER,
            session=self.name,
            sampling=SamplingParams(seed=self.turns),
            cache_salt=self.salt,
        )
        ring.add(request)
        ring.run()
        assert ring.tokens(name) == undisturbed(request, ANSWER)
        self.tokens += ring.tokens(name)
        self.turns += 1
        return max(entry.cached_tokens for entry in ring.log if entry.generation_id == name)


class Batch(NamedTuple):
    gifts: list[SessionBlock]
    wanted: list[int]


class Way:
    """From one ring to another, block by block, as the ranks would do it."""

    def __init__(self, source: Ring, target: Ring) -> None:
        self.source = source
        self.target = target
        self.batch: Batch | None = None
        self.landed = 0

    def offer(self, most: int) -> bool:
        """Whether there is anything left to offer."""
        self.end()
        gifts = self.source.batcher.exchange.departures.next_batch("t", lambda session: "t", most)
        if not gifts:
            return False
        self.source.batcher.exchange.command(b"send")
        self.source.step()  # the plan has every copy that is owed
        offered = [Offered(g.key.parent, g.key.tokens, g.session, g.last_used) for g in gifts]
        wanted = self.target.batcher.exchange.arrivals.begin(offered, self.target.batcher.receivable)
        self.batch, self.landed = Batch(gifts, wanted), 0
        self.target.engine.landing = {}
        return True

    def land(self, count: int) -> None:
        """That many more blocks arrive."""
        for slot in range(self.landed, min(self.landed + count, len(self.batch.wanted))):
            block = self.batch.gifts[self.batch.wanted[slot]].block
            content = list(self.source.engine.blocks[block])
            assert None not in content, "a block is sent whose content is not there"
            self.target.engine.landing[slot] = content
            self.landed = slot + 1
        self.target.batcher.exchange.arrivals.landed(self.landed)

    def end(self) -> None:
        """The batch is over, whatever has come of it."""
        if self.batch is not None:
            self.source.batcher.exchange.departures.release(self.batch.gifts)
            self.target.batcher.exchange.arrivals.end()
        self.batch = None
        self.source.batcher.check()
        self.target.batcher.check()

    def give_all(self, most: int = 5) -> None:
        while self.offer(most):
            self.land(most)
            self.target.run()


def talk(ring: Ring, conversations: list[Conversation], turns: int = 2) -> None:
    for _ in range(turns):
        for conversation in conversations:
            conversation.turn(ring)


def both(**target: int) -> tuple[Ring, Ring, list[Conversation]]:
    source = Ring(blocks=24, ttl=TTL, num_quantized=200)
    talked = [Conversation(number, random.Random(number)) for number in range(5)]
    talk(source, talked)
    return source, Ring(ttl=TTL, **{"blocks": 24, "num_quantized": 200, **target}), talked


def test_every_session_finds_its_cache_where_it_was_given() -> None:
    source, target, talked = both()
    Way(source, target).give_all()
    for conversation in talked:
        reusable = conversation.reusable
        assert reusable
        assert conversation.turn(target) == reusable


def test_sessions_of_each_salt_find_their_own_cache_where_it_was_given() -> None:
    """All say the same."""
    source, target = (Ring(blocks=24, ttl=TTL, num_quantized=200) for _ in range(2))
    talked = [Conversation(n, random.Random(1), salt) for n, salt in enumerate(("", "a", "b"))]
    for conversation in talked:
        assert conversation.turn(source) == 0, "another salt's blocks are found"
        reusable = conversation.reusable
        assert conversation.turn(source) == reusable
    Way(source, target).give_all()
    for conversation in talked:
        reusable = conversation.reusable
        assert conversation.turn(target) == reusable
    stranger = Conversation(9, random.Random(1), "c")
    assert stranger.turn(target) == 0
    assert stranger.tokens == talked[0].tokens[: len(stranger.tokens)]


def test_snapshots_of_recurrent_state_go_along() -> None:
    state = {"num_states": 3, "state_blocks": 2}
    source, target = (Ring(blocks=24, ttl=TTL, num_quantized=200, **state) for _ in range(2))
    talked = [Conversation(number, random.Random(number)) for number in range(5)]
    talk(source, talked)
    said = [len(conversation.tokens) for conversation in talked]
    Way(source, target).give_all()
    for conversation, tokens in zip(talked, said, strict=True):
        prompt_end, regular = (tokens - ANSWER - 1) // BLOCK * BLOCK, (tokens - 1) // (4 * BLOCK) * 4 * BLOCK
        assert conversation.turn(target) == max(prompt_end, regular)
    assert target.engine.state_loads >= len(talked)


def test_what_a_ring_has_found_on_its_disk_goes_along_once_it_was_used() -> None:
    """The next turn of a session brings its blocks back, and they are the session's again."""
    small = {"blocks": 16, "num_quantized": 30, "num_disk": 200}
    last = Ring(ttl=TTL, **small)
    talked = [Conversation(number, random.Random(number)) for number in range(5)]
    talk(last, talked, 5)
    source, target = Ring(ttl=TTL, **small), Ring(blocks=24, ttl=TTL, num_quantized=200)
    assert source.recover(last)
    found = {one.name: one for one in talked if one.turn(source)}
    assert found
    Way(source, target).give_all()
    given = [session for session, _ in source.batcher.exchange.departures._allocator.sessions()]
    both_have = [found[session] for session in given if session in found]
    assert both_have
    for conversation in both_have:
        assert conversation.turn(target) > 0


def test_what_a_ring_has_found_on_its_disk_is_not_wanted_of_others() -> None:
    last = Ring(blocks=16, ttl=TTL, num_quantized=30, num_disk=200)
    talked = [Conversation(number, random.Random(number)) for number in range(5)]
    talk(last, talked, 5)
    target = Ring(blocks=16, ttl=TTL, num_quantized=30, num_disk=200)
    kept = {block.key[0] for block in last.on_disk()}
    assert target.recover(last) == len(kept) > 0
    way = Way(last, target)
    while way.offer(50):
        assert not {way.batch.gifts[index].key.digest for index in way.batch.wanted} & kept
        way.land(50)
        target.run()
    for conversation in talked:
        conversation.turn(target)


def test_what_the_peer_has_is_not_wanted_again() -> None:
    source, target, talked = both()
    way = Way(source, target)
    way.give_all()
    received = target.batcher.exchange.arrivals.received
    back = Way(target, source)
    while back.offer(50):
        assert not back.batch.wanted
    way.end()
    assert target.batcher.exchange.arrivals.received == received
    assert not way.offer(50), "nothing is offered twice"
    source.now += 1
    talked[0].turn(source)
    assert way.offer(50), "but what has been computed since"
    way.end()


def test_a_ring_that_has_stayed_and_leaves_again_offers_everything_again() -> None:
    source, target, _ = both()
    way = Way(source, target)
    way.give_all()
    assert not way.offer(50)
    source.batcher.exchange.departures.restart()
    assert way.offer(50)
    way.end()


def test_a_block_without_its_beginning_is_not_wanted() -> None:
    source, target, _ = both()
    gifts = source.batcher.exchange.departures.next_batch("t", lambda session: "t", 100)
    offered = [Offered(g.key.parent, g.key.tokens, g.session, g.last_used) for g in gifts]
    assert len(target.batcher.exchange.arrivals.begin(offered, 100)) == len(gifts)
    assert target.batcher.exchange.arrivals.begin(offered[1:3], 100) == []


def test_the_last_used_sessions_go_first_and_stay_longest() -> None:
    source = Ring(blocks=24, ttl=TTL, num_quantized=200)
    talked = [Conversation(number, random.Random(number)) for number in range(4)]
    for conversation in talked:
        source.now += 10
        talk(source, [conversation])
    target = Ring(blocks=24, ttl=TTL, num_quantized=200)
    own = Conversation(9, random.Random(9))
    target.now = 5.0
    own.turn(target)
    way = Way(source, target)
    assert way.offer(100)
    order = list(dict.fromkeys(gift.session for gift in way.batch.gifts))
    assert order == [f"session-{number}" for number in (3, 2, 1, 0)]
    way.land(100)
    target.run()
    way.end()
    kept = [session for session, _ in target.batcher.exchange.departures._allocator.sessions()]
    assert kept == [f"session-{number}" for number in (3, 2, 1, 0, 9)]


def test_a_full_peer_keeps_its_own_sessions() -> None:
    source, target, talked = both(blocks=12, num_quantized=24)
    own = [Conversation(number, random.Random(number)) for number in (7, 8)]
    talk(target, own, 1)
    Way(source, target).give_all()
    for conversation in own:
        reusable = conversation.reusable
        assert conversation.turn(target) == reusable
    talk(target, talked, 1)


def test_what_is_on_its_way_is_not_written_to_meanwhile() -> None:
    source = Ring(blocks=24, ttl=TTL)
    talked = [Conversation(number, random.Random(number)) for number in range(2)]
    talk(source, talked)
    target = Ring(blocks=64, ttl=TTL)
    way = Way(source, target)
    assert way.offer(100)
    for number in range(6):  # two at a time need all that the source has, and get what is left
        source.add(ask(f"other-{number}", [number] * 30, 16))
    source.run()
    way.land(100)
    target.run()
    way.end()
    for conversation in talked:
        reusable = conversation.reusable
        assert conversation.turn(target) == reusable


def test_a_sequence_that_needs_the_blocks_has_the_sending_stopped() -> None:
    source = Ring(blocks=24, ttl=TTL)
    talked = Conversation(0, random.Random(0))
    talk(source, [talked])
    way = Way(source, Ring(blocks=64, ttl=TTL))
    assert way.offer(100)
    departures = source.batcher.exchange.departures
    source.add(ask("large", [1] * 90, 4))
    while (step := source.next_step()) is not None:
        assert not departures.crowded
        source.finish(step)
    assert departures.crowded
    gifts = way.batch.gifts
    way.end()
    source.run()
    assert source.last("large").finish == "length"
    assert not way.offer(100)
    departures.again("t", gifts)
    source.now += 1
    talk(source, [talked], 1)
    assert way.offer(100), "what has not arrived goes once more, as far as it is still there"
    way.end()


class Chaos:
    """Two rings with sessions, and all that may happen to them, in any order."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._random = random.Random(self._number(0, 2**16))
        quantized, disk = data.draw(st.sampled_from([0, 30, 90])), data.draw(st.sampled_from([0, 40]))
        small = data.draw(st.booleans())
        state = data.draw(st.sampled_from([{}, {"num_states": 4, "state_blocks": 2}]))
        self.source = Ring(blocks=30 if quantized else 60, ttl=TTL, num_quantized=quantized, num_disk=disk, **state)
        room = {"blocks": 20 if quantized or small else 60, "num_quantized": min(quantized, 30) if small else quantized}
        self.target = Ring(ttl=TTL, num_disk=disk, **room, **state)
        self.talked = [Conversation(number, self._random) for number in range(6)]
        talk(self.source, self.talked, 1)
        self.way = Way(self.source, self.target)
        self._moved: set[str] = set()
        self.happenings = [self.offer, self.land, self.step, self.turn_at_target, self.turn_at_source, self.way.end]

    def _number(self, least: int, most: int) -> int:
        return self._data.draw(st.integers(min_value=least, max_value=most))

    def offer(self) -> None:
        self.way.offer(self._number(1, 12))

    def land(self) -> None:
        if self.way.batch is not None:
            self.way.land(self._number(1, 6))

    def step(self) -> None:
        if self.target.batcher.has_work:
            self.target.step()

    def turn_at_target(self) -> None:
        """The peer goes on, and the next turn of a session may come early."""
        conversation = self._random.choice(self.talked)
        self._moved.add(conversation.name)
        if len(conversation.tokens) < 80:
            conversation.turn(self.target)

    def turn_at_source(self) -> None:
        """The leaving ring ends what it has begun."""
        conversation = self._random.choice(self.talked)
        if conversation.name not in self._moved and len(conversation.tokens) < 40:
            conversation.turn(self.source)


@settings(max_examples=40)
@given(st.data())
def test_random_faults_cost_cache_and_nothing_else(data: st.DataObject) -> None:
    chaos = Chaos(data)
    for _ in range(data.draw(st.integers(min_value=1, max_value=40))):
        data.draw(st.sampled_from(chaos.happenings))()
    chaos.way.end()
    chaos.target.run()
    for conversation in chaos.talked:
        conversation.turn(chaos.target)
    chaos.target.batcher.check()
    chaos.source.batcher.check()
    assert not any(chaos.target.batcher.exchange.held)
    assert not any(chaos.source.batcher.exchange.held)


def record(group: str, state: str = "ready", model: str = "m", free: int = 10) -> GroupRecord:
    return GroupRecord(group, model, state, 1, [], GroupLoad(free_blocks=free))  # type: ignore[arg-type]


def test_peers_serve_the_model_and_are_somebody_else() -> None:
    records = [record("a"), record("b"), record("c", "draining"), record("d", model="n"), record("e", "busy")]
    assert set(peers_of(records, "m", "a")) == {"b", "e"}
    assert not is_coming([*records, record("a", "starting"), record("f", "starting", "n")], "m", "a")
    assert is_coming([record("f", "starting")], "m", "a")


def test_a_session_goes_where_its_pin_says_else_where_most_room_is() -> None:
    homes = Homes({name: TransferPeer(record(name, free=free)) for name, free in (("b", 10), ("c", 18))})
    homes.assign("s", 10, "b")
    homes.assign("t", 10, "gone")
    homes.assign("u", 5, "")
    assert [homes.of(session) for session in "stuv"] == ["b", "c", "c", ""]
    homes.drop("c")
    assert homes.of("t") == ""
    homes.assign("t", 1, "c")
    assert homes.of("t") == "b"
    homes.drop("b")
    homes.assign("t", 1, "")
    assert homes.of("t") == ""
