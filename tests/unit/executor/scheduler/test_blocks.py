"""Blocks of a batch: preemption, room, and beginnings that are shared."""

import random

import pytest

from services.executor.core.engine import EngineSpec
from services.executor.kv_cache.prefix_index import BlockChain
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.block_tables import BlockTables, PrefixMatch
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import ScheduledTokens, build_plan
from shared.errors import InternalError
from shared.messages import SamplingParams
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, arrays, ask, lens

# --- blocks ----------------------------------------------------------------------------------------


def test_the_youngest_of_the_least_urgent_lane_gives_up_its_blocks() -> None:
    ring = Ring(blocks=9, tokens=32)
    requests = [ask("old", 8, max_tokens=9), ask("bulk", 8, max_tokens=9, lane="batch"), ask("newest", 8, max_tokens=9)]
    ring.add(*requests)
    seen: list[set[str]] = []
    while ring.batcher.preemptions == 0:
        seen.append({entry.generation_id for entry in ring.step()})
    assert seen[-2] == {"old", "newest", "bulk"}
    assert seen[-1] == {"old", "newest"}
    ring.run()
    for request in requests:
        assert ring.tokens(request.generation_id) == undisturbed(request, 9)
        assert ring.last(request.generation_id).finish == "length"
    assert ring.batcher.load().free_blocks == 9


def test_text_is_the_same_however_often_a_sequence_is_preempted() -> None:
    rng = random.Random(7)
    ring = Ring(blocks=14, tokens=12, sequences=5)
    requests = [
        ask(
            str(i),
            [j % 3 for j in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 20),
            lane=rng.choice(["interactive", "batch"]),
            sampling=SamplingParams(seed=i),
        )
        for i in range(60)
    ]
    ring.add(*requests)
    ring.run()
    assert ring.batcher.preemptions > 10
    assert ring.engine.largest <= 12
    for request in requests:
        assert ring.tokens(request.generation_id) == undisturbed(request, request.max_tokens)


def test_a_sequence_that_outgrows_the_whole_cache_ends_with_an_error() -> None:
    ring = Ring(blocks=3)
    ring.add(ask("a", 8, max_tokens=100))
    ring.run()
    last = ring.last("a")
    assert (last.finish, last.error_code, last.retryable) == ("error", "context_length_exceeded", False)
    assert "KV cache of 12 tokens" in last.error
    assert ring.tokens("a") == undisturbed(ask("a", 8), 5)
    assert ring.batcher.load().free_blocks == 3


def test_a_prompt_that_fills_the_whole_cache_is_computed() -> None:
    ring = Ring(blocks=4)
    ring.add(ask("small", 4, max_tokens=4), ask("whole", 16, max_tokens=1))
    ring.run()
    assert ring.tokens("whole") == undisturbed(ask("whole", 16), 1)


def test_a_waiting_sequence_takes_the_room_that_another_leaves() -> None:
    ring = Ring(blocks=4)
    ring.add(ask("a", 12, max_tokens=3), ask("b", 12, max_tokens=3))
    ring.step()
    load = ring.batcher.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 12)
    assert (load.free_blocks, load.total_blocks) == (0, 4), "the fourth is promised to the next token"
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b", 12), 3)


# --- prefix cache ----------------------------------------------------------------------------------


def test_the_next_turn_finds_prompt_and_answer_of_the_one_before() -> None:
    ring = Ring(tokens=32)
    first = ask("turn-1", 9, max_tokens=8)
    ring.add(first)
    ring.run()
    assert ring.log[0].cached_tokens == 0
    answer = ring.tokens("turn-1")
    # 9 prompt tokens and 7 of the answer are in the cache; the last token was never computed.
    second = ask("turn-2", [*first.prompt, *answer, 1, 2, 3])
    ring.add(second)
    [entry] = ring.step()
    assert entry.cached_tokens == 16
    assert lens(ring.plans[-1][0]) == [4]
    [entry] = ring.step()
    assert entry.cached_tokens == 0
    ring.run()
    assert ring.tokens("turn-2") == undisturbed(second, 4)


def test_a_repeated_prompt_still_computes_its_last_block() -> None:
    ring = Ring()
    ring.add(ask("a", [1] * 8, max_tokens=1))
    ring.run()
    ring.add(ask("b", [1] * 8, max_tokens=1))
    [entry] = ring.step()
    assert entry.cached_tokens == 4
    assert lens(ring.plans[-1][0]) == [4]


def test_running_sequences_share_their_beginning() -> None:
    ring = Ring(blocks=6)
    ring.add(ask("a", [1] * 8 + [2], max_tokens=3))
    ring.step()
    ring.add(ask("b", [1] * 8 + [3], max_tokens=3))
    ring.step()
    assert ring.batcher.load().free_blocks == 6 - 4
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b", [1] * 8 + [3]), 3)


def test_equal_prompts_are_computed_once() -> None:
    """As with n > 1: the later ones wait for what the first computes, and compute their last block alone."""
    ring = Ring(tokens=64, sequences=3)
    prompt = [i % VOCAB for i in range(30)]
    ring.add(*(ask(name, prompt, sampling=SamplingParams(seed=seed)) for seed, name in enumerate("abc")))
    [first] = ring.step()
    assert (first.generation_id, first.cached_tokens) == ("a", 0)
    entries = ring.step()
    assert {entry.generation_id: entry.cached_tokens for entry in entries[1:]} == {"b": 28, "c": 28}
    assert lens(ring.plans[-1][0]) == [1, 2, 2]
    ring.run()
    for seed, name in enumerate("abc"):
        assert ring.tokens(name) == undisturbed(ask(name, prompt, sampling=SamplingParams(seed=seed)), 4)


def test_whoever_waits_for_a_beginning_goes_on_when_its_computer_is_cancelled() -> None:
    ring = Ring(tokens=8)
    prompt = [i % VOCAB for i in range(30)]
    ring.add(ask("a", prompt), ask("b", prompt))
    ring.step()
    ring.batcher.cancel(["a"])
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b", prompt), 4)
    assert ring.log[1].cached_tokens == 8


def test_what_another_has_computed_is_shared_also_after_a_failed_step() -> None:
    ring = Ring(tokens=8)
    prompt = [i % VOCAB for i in range(14)]
    ring.add(ask("a", prompt))
    plan, sequences = ring.schedule()
    ring.engine.execute(plan, [s.sampling for s in sequences])
    ring.take(ring.batcher.fail_step(InternalError("NaN"), []))
    ring.add(ask("b", prompt, lane="recovery"))
    ring.run()
    assert ring.tokens("a") == ring.tokens("b") == undisturbed(ask("a", prompt), 4)
    assert {entry.generation_id: entry.cached_tokens for entry in ring.log if entry.cached_tokens} == {"a": 12}


def test_a_sequence_gets_only_room_that_is_promised_to_nobody() -> None:
    ring = Ring(blocks=12, tokens=8)
    ring.add(ask("long", 32))
    ring.step()
    ring.add(ask("other", 12))
    ring.step()
    load = ring.batcher.load()
    assert (load.running, load.waiting, load.free_blocks) == (1, 1, 4)
    ring.run()
    assert ring.batcher.preemptions == 0


# --- compressed blocks ---------------------------------------------------------------------------


def test_full_blocks_are_compressed_and_writable_ones_are_used_again() -> None:
    ring = Ring(blocks=3, num_quantized=20, tokens=8)
    request = ask("a", 40, max_tokens=12)
    ring.add(request)
    ring.run()
    assert ring.tokens("a") == undisturbed(request, 12)
    assert ring.engine.compressions == 51 // BLOCK
    assert all(lens(plan)[0] <= 8 for plan, _ in ring.plans)
    load = ring.batcher.load()
    assert (load.free_blocks, load.total_blocks) == (20, 20)


def test_without_a_quantized_block_nobody_goes_on_over_writable_ones() -> None:
    ring = Ring(blocks=8, num_quantized=10, tokens=32)
    first, second = ask("first", 16, max_tokens=16), ask("second", 15, max_tokens=25)
    ring.add(first, second)
    ring.run()
    assert ring.tokens("second") == undisturbed(second, 25)
    assert ring.tokens("first") == undisturbed(first, 16)
    assert ring.batcher.preemptions


def _tables(num_quantized: int, *tokens: int) -> tuple[BlockTables, list[Sequence]]:
    """Of sequences of so many tokens, of which nothing is computed."""
    tables = BlockTables(EngineSpec(BLOCK, 4, 100, VOCAB, num_quantized=num_quantized), BatchSettings())
    sequences = [Sequence(ask(str(n), [n] * count), n, BLOCK, b"") for n, count in enumerate(tokens)]
    for sequence in sequences:
        tables.admit(sequence, PrefixMatch([]))
    return tables, sequences


def test_a_block_is_not_filled_before_there_is_a_quantized_id_for_it() -> None:
    tables, [other, sequence] = _tables(2, 5, 9)
    assert tables.ensure_slots(other, 5)
    assert not tables.ensure_slots(sequence, 9), "it fills two blocks, and one quantized id is left"
    assert tables.slots(sequence) == 7
    tables.free(other)
    assert tables.ensure_slots(sequence, 9)
    assert (len(sequence.table), len(sequence.quantized)) == (3, 2)
    tables.check([sequence])


def test_a_block_that_drafts_fill_stays_writable_until_they_are_right() -> None:
    tables, [sequence] = _tables(3, 6)
    assert tables.ensure_slots(sequence, 6)
    sequence.num_computed = 5
    tables.seal([sequence])
    chunk = ScheduledTokens(sequence, 1, samples=True, drafts=(7, 8, 9))
    assert tables.ensure_draft_slots(sequence, 3, [sequence]) == 3
    writable, quantized = sequence.table[1], sequence.quantized[0]
    plan, _ = build_plan(1, [chunk], tables.take_copies(), BLOCK)
    assert arrays(plan, "block_tables") == [[sequence.table[0], quantized, sequence.table[2]]]
    assert arrays(plan, "compressions") == [[writable, quantized]]
    assert [slot // BLOCK for slot in arrays(plan, "slots")[0]] == [writable] * 3 + [sequence.table[2]]
    sequence.append(1)  # the first draft is wrong
    sequence.num_computed += 1
    tables.free_unused([sequence])
    tables.seal([sequence])
    assert (list(sequence.table[1:]), list(sequence.quantized)) == ([writable], []), "it is written again"
    sequence.append(2)
    assert tables.ensure_slots(sequence, 8)
    [quantized] = sequence.quantized
    sequence.num_computed += 2
    tables.seal([sequence])
    assert (sequence.table[1], list(sequence.quantized)) == (quantized, [])
    tables.check([sequence])


def test_a_block_that_is_known_already_is_taken_over_and_both_of_its_ids_are_free() -> None:
    tables, [first, second] = _tables(4, 5, 5)
    second.tokens[:] = first.tokens
    second.chain = BlockChain(second.tokens, BLOCK, b"")
    for sequence in (first, second):
        assert tables.ensure_slots(sequence, 5)
    for sequence in (first, second):
        sequence.num_computed = 4
        tables.seal([sequence])
    assert first.table[0] == second.table[0] >= 4
    assert tables.census().quantized.empty == 3
    tables.check([first, second])


def test_one_sequence_may_fill_all_quantized_blocks() -> None:
    ring = Ring(blocks=2, num_quantized=3)
    request = ask("a", 3, max_tokens=100)
    ring.add(request)
    ring.run()
    assert ring.last("a").error_code == "context_length_exceeded"
    assert "KV cache of 15 tokens" in ring.last("a").error
    assert ring.tokens("a") == undisturbed(request, 13)


# --- sessions and spilling -----------------------------------------------------------------------


def _turn(ring: Ring, name: str, prompt: list[int], session: str = "s") -> int:
    """Runs a turn; the prompt tokens that were found."""
    ring.add(ask(name, prompt, max_tokens=2, session=session))
    ring.run()
    assert ring.tokens(name) == undisturbed(ask(name, prompt, max_tokens=2), 2)
    return next(entry.cached_tokens for entry in ring.log if entry.generation_id == name)


def _others(ring: Ring, name: str, count: int) -> None:
    """As many tokens of somebody else, who has no session."""
    _turn(ring, name, [(7 * i + ord(name[0])) % 47 for i in range(count)], session="")


def test_a_pinned_session_outlives_others_until_its_time_is_over() -> None:
    said = list(range(20))
    ring = Ring(blocks=12, ttl=60.0)
    _turn(ring, "one", said)
    _others(ring, "x", 24)
    _others(ring, "y", 25)
    assert _turn(ring, "two", [*said, 1]) == 20
    ring.now = 61.0
    _others(ring, "z", 25)
    assert _turn(ring, "three", [*said, 2]) < 20, "its blocks are the first to be evicted now"


def test_pins_never_keep_anybody_out() -> None:
    ring = Ring(blocks=12, ttl=60.0)
    for session in range(4):
        _turn(ring, f"s{session}", [session] * 11, session=str(session))
    _others(ring, "all", 46)
    assert ring.batcher.load().free_blocks == 12


@pytest.mark.parametrize("spec", [{"num_host": 40}, {"num_disk": 40}, {"num_quantized": 8, "num_host": 40}])
def test_a_session_that_returns_finds_what_was_spilled(spec: dict[str, int]) -> None:
    ring = Ring(blocks=12, copies_per_step=3, **spec)
    said = list(range(30))
    _turn(ring, "one", said)
    _others(ring, "x", 33 if "num_quantized" in spec else 46)
    assert ring.engine.saves
    assert _turn(ring, "two", [*said, 1, 2, 3]) >= 3 * BLOCK
    assert ring.engine.restores >= 3
    assert max(len(plan.restores) // 8 for plan, _ in ring.plans) <= 3


@pytest.mark.parametrize("spec", [{"num_host": 40}, {"num_disk": 40}])
def test_an_announced_turn_brings_its_session_back_from_where_it_was_spilled(spec: dict[str, int]) -> None:
    ring = Ring(blocks=12, copies_per_step=3, ttl=60.0, **spec)
    said = list(range(30))
    _turn(ring, "one", said)
    _others(ring, "x", 46)
    ring.add(ask("ahead", [*said, 1], max_tokens=1, session="s", prefill=True))
    ring.run()
    restored = ring.engine.restores
    assert restored >= 3
    assert ring.last("ahead").finish == "length"
    assert _turn(ring, "two", [*said, 1, 2, 3]) >= 7 * BLOCK, "nothing is left to be computed of it"
    assert ring.engine.restores == restored, "nor to be restored"


def test_what_cannot_be_restored_is_computed_again() -> None:
    ring = Ring(blocks=12, num_host=40)
    said = list(range(30))
    _turn(ring, "one", said)
    _others(ring, "x", 46)
    ring.engine.unreadable = set(ring.engine.spilled)
    assert _turn(ring, "two", [*said, 1, 2, 3]) == 0
    assert ring.engine.restores


def test_decodes_go_on_while_another_restores() -> None:
    ring = Ring(blocks=14, num_host=40, copies_per_step=1, tokens=4)
    said = list(range(30))
    _turn(ring, "one", said)
    _others(ring, "x", 50)
    ring.add(ask("busy", 3, max_tokens=16))
    ring.step()
    ring.add(ask("back", [*said, 1], max_tokens=2, session="s"))
    while "back" not in [entry.generation_id for entry in ring.step()]:
        assert ring.log[-1].generation_id == "busy"
    assert ring.engine.restores >= 3


def test_a_cancelled_sequence_leaves_nothing_locked() -> None:
    ring = Ring(blocks=12, num_host=40, copies_per_step=1, tokens=4)
    said = list(range(30))
    _turn(ring, "one", said)
    _others(ring, "x", 46)
    ring.add(ask("back", [*said, 1], session="s"))
    step = ring.schedule()
    assert step[0].restores
    assert not step[0].token_ids
    ring.batcher.cancel(["back"])
    ring.finish(step)
    assert not ring.batcher.has_work
    assert ring.batcher.load().free_blocks == 12
    ring.batcher.check()


# --- a ring that starts with what another had on disk ----------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"num_disk": 40},
        {"num_disk": 40, "num_host": 8},
        {"num_disk": 40, "num_quantized": 12},
        {"num_disk": 40, "num_states": 6, "state_blocks": 2},
    ],
)
def test_the_next_ring_restores_what_the_last_one_had_on_disk(spec: dict[str, int]) -> None:
    said = list(range(30))
    last = Ring(blocks=16, copies_per_step=3, **spec)
    _turn(last, "one", said)
    _others(last, "x", 46)
    _others(last, "y", 46)
    blocks = last.on_disk()
    ring = Ring(blocks=16, copies_per_step=3, **spec)
    assert ring.recover(last) == len(blocks) > 0
    ring.batcher.check()
    assert _turn(ring, "two", [*said, 1, 2, 3]) == 28, "all full blocks; the last token is computed"
    assert ring.engine.restores == 7 + spec.get("state_blocks", 0)
    assert _turn(ring, "three", [*said, 4], session="") == 28, "by whoever comes with these tokens"


def test_what_a_ring_has_recovered_and_cannot_read_is_computed() -> None:
    said = list(range(30))
    last = Ring(blocks=12, num_disk=40)
    _turn(last, "one", said)
    _others(last, "x", 46)
    blocks = last.on_disk()
    ring = Ring(blocks=12, num_disk=40)
    ring.recover(last)
    ring.engine.unreadable = {block.slot for block in blocks[:3]}
    _turn(ring, "two", [*said, 1, 2, 3])
    _others(ring, "y", 46)
    assert _turn(ring, "three", [*said, 1, 2]) >= 28, "its slots are used again"


def test_plans_of_rings_without_a_disk_carry_no_keys() -> None:
    ring = Ring(blocks=12, num_host=40)
    _turn(ring, "one", list(range(30)))
    _others(ring, "x", 46)
    assert ring.engine.saves
    assert not any(plan.save_keys for plan, _ in ring.plans)
