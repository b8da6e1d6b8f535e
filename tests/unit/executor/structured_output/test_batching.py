"""Requests with a grammar in the batch: held until it is compiled, continued, preempted, ended."""

import msgspec
import pytest

from services.executor.structured_output import GrammarCompiler
from services.executor.worker.stub import STUB_EOS_TOKEN, StubSettings
from shared.errors import InvalidGrammar, NoGroupAvailable
from shared.messages import Grammar
from tests.unit.executor.structured_output.guided_ring import GuidedRing, ask

OBJECT = Grammar(
    "json_schema",
    '{"type":"object","properties":{"a":{"type":"array","items":{"enum":[1,22,"x"]},"minItems":4,"maxItems":6}},'
    '"required":["a"],"additionalProperties":false}',
)
TEN = Grammar("regex", "[0-9]{10}")


@pytest.fixture
def ring(compiler: GrammarCompiler) -> GuidedRing:
    return GuidedRing(compiler)


def test_a_request_waits_for_its_grammar_and_others_go_on(ring: GuidedRing) -> None:
    held = ask(TEN, "held")
    assert ring.batcher.add(held) is None
    assert not ring.batcher.has_work
    assert ring.batcher.load().waiting == 1
    assert ring.batcher.load().waiting_tokens == 3
    ring.add(ask(None, "plain", max_tokens=5))
    ring.run()
    assert len(ring.tokens("plain")) == 5
    assert ring.tokens("held") == []
    ring.batcher.release(held, ring.compiler.start(held))
    ring.run()
    assert len(ring.text("held")) == 10
    assert ring.last("held").finish == "stop"
    assert ring.batcher.load().waiting == 0


def test_a_grammar_that_cannot_be_compiled_ends_its_request(ring: GuidedRing) -> None:
    request = ask(TEN)
    ring.batcher.add(request)
    ring.batcher.release(request, InvalidGrammar("No."))
    ring.run()
    entry = ring.last()
    assert (entry.finish, entry.error_code, entry.error, entry.retryable) == ("error", "invalid_grammar", "No.", False)
    ring.batcher.check()


def test_what_is_held_can_be_cancelled_replaced_expired_and_handed_back(ring: GuidedRing) -> None:
    batcher = ring.batcher
    gone, old, late, left = (ask(TEN, name) for name in ("gone", "old", "late", "left"))
    late = msgspec.structs.replace(late, deadline=5.0)
    for request in (gone, old, late, left):
        batcher.add(request)
    batcher.cancel(["gone"])
    newer = ask(TEN, "old", attempt=1)
    batcher.add(newer)
    assert batcher.expire(6.0)
    batcher.check()
    for request in (gone, old, late):
        batcher.release(request, ring.compiler.start(request))  # nobody waits for these any more
    batcher.release(newer, ring.compiler.start(newer))
    ring.run()
    assert ring.last("gone").finish == "cancelled"
    assert ring.last("late").error_code == "deadline_exceeded"
    assert {entry.attempt for entry in ring.log if entry.generation_id == "old"} == {1}
    assert len(ring.text("old")) == 10
    ring.take(batcher.fail_all(NoGroupAvailable("Gone.")))
    assert ring.last("left").retryable
    batcher.release(left, ring.compiler.start(left))
    assert not batcher.has_work
    batcher.check()


def test_a_continuation_is_the_undisturbed_text(ring: GuidedRing) -> None:
    for seed in range(4):
        ring.add(ask(OBJECT, f"whole-{seed}", seed=seed))
    ring.run()
    for seed in range(4):
        whole = ring.tokens(f"whole-{seed}")
        for cut in range(1, len(whole), 6):
            name = f"{seed}-{cut}"
            ring.add(ask(OBJECT, name, seed=seed, generated=whole[:cut], attempt=1))
            ring.run()
            assert whole[:cut] + ring.tokens(name) == whole
            assert ring.last(name).finish == "stop"


def test_a_text_that_was_complete_ends_at_once(ring: GuidedRing) -> None:
    ring.add(ask(TEN, generated=list(b"0123456789"), attempt=1))
    ring.run()
    [entry] = ring.log
    assert (entry.tokens, entry.finish, entry.position) == ([], "stop", 10)
    ring.batcher.check()


def test_a_text_that_is_cut_ends_with_length_and_a_whole_one_with_stop(ring: GuidedRing) -> None:
    ring.add(ask(TEN, "cut", max_tokens=9), ask(TEN, "whole", max_tokens=10))
    ring.run()
    assert (len(ring.tokens("cut")), ring.last("cut").finish) == (9, "length")
    assert (len(ring.tokens("whole")), ring.last("whole").finish) == (10, "stop")


def test_an_end_that_is_ignored_never_comes(ring: GuidedRing) -> None:
    grammar = Grammar("regex", "[a-z]+")
    ring.add(ask(grammar, "ignored", max_tokens=300, stop_token_ids=[]), ask(grammar, "heeded", max_tokens=300))
    ring.run()
    assert STUB_EOS_TOKEN not in ring.tokens("ignored")
    assert ring.last("ignored").finish == "length"
    assert ring.tokens("heeded")[-1] == STUB_EOS_TOKEN
    assert ring.last("heeded").finish == "stop"


def test_preemption_changes_no_text(compiler: GrammarCompiler) -> None:
    requests = [ask(OBJECT, str(seed), seed=seed) for seed in range(6)]
    alone, crowded = GuidedRing(compiler), GuidedRing(compiler, StubSettings(block_size=4, num_blocks=20))
    for request in requests:
        alone.add(request)
        alone.run()
    crowded.add(*requests)
    crowded.run()
    assert crowded.batcher.preemptions > 0
    for request in requests:
        name = request.generation_id
        assert crowded.tokens(name) == alone.tokens(name)


def test_a_grammar_that_fails_under_way_ends_its_own_text_alone(ring: GuidedRing) -> None:
    ring.add(ask(OBJECT, "fine", max_tokens=50), ask(TEN, "broken"))
    ring.step()
    [broken] = [s for s in ring.batcher._planner.running if s.request.generation_id == "broken"]
    broken.sampling.grammar.advance(ord("x"))
    ring.run()
    assert ring.last("broken").error_code == "invalid_grammar"
    assert not ring.last("broken").retryable
    undisturbed = GuidedRing(ring.compiler)
    undisturbed.add(ask(OBJECT, "fine", max_tokens=50))
    undisturbed.run()
    assert ring.tokens("fine") == undisturbed.tokens("fine")
