"""Requests of an engine that schedules for itself, under any order of requests, and of what the engine tells.

The engine is made up: it has what it was given, tells any number of tokens of any of them, also behind the end of an
answer and for a while after an abort. Its text is a pure function, so that every token can be checked by its position.
"""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.executor.engines.base import EngineDelta, EngineRequest, EngineStep
from services.executor.scheduler.batcher import Entries
from shared.errors import InvalidRequest
from shared.messages import LANES, GenerationRequest
from tests.unit.executor.engines.test_requests import (
    CONTEXT,
    REGEX,
    STOPS,
    VOCABULARY,
    ask,
    grammar_state,
    made,
    text,
    whole,
)

requests = st.builds(
    ask,
    name=st.integers(0, 9).map(str),
    prompt=st.integers(1, 28),
    max_tokens=st.integers(1, 12),
    seed=st.integers(0, 5),
    stop_token_ids=st.sampled_from([[], STOPS]),
    lane=st.sampled_from([*LANES, "batch"]),
    prefill=st.sampled_from([False, False, False, True]),
    attempt=st.integers(0, 3),
    suspected=st.sampled_from([""] * 7 + ["crashed"]),
    grammar=st.sampled_from([None, None, None, REGEX]),
    deadline=st.sampled_from([0.0, 0.0, 50.0]),
)


class Attempt:
    """What a consumer knows of one that was accepted."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens = list(request.generated)
        self.finish = ""
        self.held = request.grammar is not None

    @property
    def is_batch(self) -> bool:
        return self.request.lane == "batch" or self.request.prefill


class RequestsMachine(RuleBasedStateMachine):
    @initialize(places=st.integers(1, 3))
    def build(self, places: int) -> None:
        self.places = places
        self.requests = made(places=places)
        self.engine: dict[str, tuple[EngineRequest, int]] = {}  # by submission, and the tokens told of it
        self.live: dict[str, Attempt] = {}
        self.ended: list[Attempt] = []
        self.submitted: set[str] = set()  # ever
        self.aborted: set[str] = set()
        self.steps = 0

    @rule(request=requests, continued=st.integers(0, 12))
    def add(self, request: GenerationRequest, continued: int) -> None:
        """A newer attempt has a part of the text, or all of it."""
        if request.attempt:
            request = msgspec.structs.replace(request, generated=whole(request)[0][:continued])
        known = self.requests.knows(request)
        refusal = self.requests.add(request)
        assert refusal is None or refusal.code == "context_length_exceeded", refusal
        if known:
            return
        self.live.pop(request.generation_id, None)  # the newer one takes its place, or none does
        if refusal is None:
            self.live[request.generation_id] = Attempt(request)
        self.collect(self.requests.take_entries())

    @rule(pick=st.integers(0, 9), outcome=st.sampled_from(["goes on", "goes on", "complete", "error"]))
    def compiled(self, pick: int, outcome: str) -> None:
        held = [one for one in self.live.values() if one.held]
        if held:
            one = held[pick % len(held)]
            error = InvalidRequest("No.")
            self.requests.release(
                one.request, error if outcome == "error" else grammar_state(complete=outcome[0] == "c")
            )
            one.held = False
            self.collect(self.requests.take_entries())
            assert (one.request.generation_id in self.live) == (outcome == "goes on")

    @rule()
    def hand_out(self) -> None:
        new = self.requests.take_submissions(1.0)
        assert [self.urgency(one.id) for one in new] == sorted(self.urgency(one.id) for one in new)
        for one in new:
            attempt = self.live[one.id.split("/")[0]]
            assert not attempt.held
            assert list(one.tokens) == [*attempt.request.prompt, *attempt.tokens], "it goes on from the tokens it has"
            assert one.prompt_tokens == len(attempt.request.prompt)
            assert one.max_tokens == min(attempt.request.max_tokens, CONTEXT - one.prompt_tokens) - len(attempt.tokens)
            assert one.id not in self.submitted, "given out once"
            self.submitted.add(one.id)
            self.engine[one.id] = one, 0
        self.take_aborts()
        self.check_places()

    def take_aborts(self) -> None:
        aborts = self.requests.take_aborts()
        assert len({*self.aborted, *aborts}) == len(self.aborted) + len(aborts), "told once"
        assert self.submitted.issuperset(aborts)
        self.aborted.update(aborts)

    def check_places(self) -> None:
        """Of what the engine has, and what it is not given."""
        theirs = [self.live[one.generation_id] for one in self.requests.under_way]
        assert len(theirs) <= self.places
        assert len(theirs) == 1 or not any(one.request.suspected for one in theirs), "it is alone"
        waiting = [one for one in self.live.values() if one not in theirs and not one.held]
        if waiting and not any(one.request.suspected for one in (*waiting, *theirs)):
            assert len(theirs) == self.places, "no place is left empty"
            assert all(one.is_batch for one in waiting) or not any(one.is_batch for one in theirs)

    def urgency(self, submission: str) -> int:
        request = self.live[submission.split("/")[0]].request
        return 2 if request.lane == "batch" or request.prefill else LANES.index(request.lane)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some of what the engine has goes on; it may not have read of aborts yet, or tell more than was asked for."""
        deltas = []
        chosen = data.draw(st.lists(st.sampled_from([*self.engine]), unique=True)) if self.engine else []
        for name in chosen:
            request, told = self.engine[name]
            count = data.draw(st.integers(0, 5))
            start = len(request.tokens) - request.prompt_tokens + told
            tokens = text(request.sampling.seed, start, start + count)
            fault = data.draw(st.sampled_from([""] * 12 + ["error", "bad token"]))
            if fault == "bad token":
                tokens.append(VOCABULARY)
            over = told + count >= request.max_tokens or bool({*tokens} & {*request.stop_token_ids})
            ends = fault == "error" or (over and data.draw(st.booleans()))
            finish = "" if not ends else "error" if fault else "length"
            deltas.append(EngineDelta(name, tokens, finish, error="It cannot." if fault else ""))  # type: ignore[arg-type]
            self.engine[name] = request, told + count
            if ends or (name in self.aborted and data.draw(st.booleans())):
                del self.engine[name]
        self.steps += 1
        self.collect(self.requests.update(EngineStep(self.steps, deltas), 2.0))

    @rule(name=st.integers(0, 9).map(str), attempt=st.integers(-1, 3), claim=st.integers(-1, 2))
    def cancel(self, name: str, attempt: int, claim: int) -> None:
        self.requests.cancel([name, "unknown"], attempt, claim)
        self.collect(self.requests.take_entries())

    @rule(name=st.integers(0, 9).map(str), claim=st.integers(0, 2))
    def claim(self, name: str, claim: int) -> None:
        self.requests.claim([name, "unknown"], claim)

    @rule(now=st.sampled_from([1.0, 60.0]))
    def expire(self, now: float) -> None:
        self.requests.expire(now)
        self.collect(self.requests.take_entries())

    def collect(self, entries: Entries) -> None:
        assert {*entries} <= {"me"}
        for entry in entries.get("me", []):
            one = self.live[entry.generation_id]
            assert entry.attempt == one.request.attempt, "nobody hears of an older attempt"
            assert entry.position == len(one.tokens), "a gap or a repeat"
            one.tokens += entry.tokens
            answer, finish = whole(one.request)
            assert one.tokens == answer[: len(one.tokens)]
            assert entry.finish or entry.tokens
            if entry.finish:
                one.finish = entry.finish
                self.ended.append(self.live.pop(entry.generation_id))
                if entry.finish == "length" or (entry.finish == "stop" and one.request.grammar is None):
                    assert (one.tokens, one.finish) == (answer, finish), "all of it"

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "requests"):
            load = self.requests.load()
            assert load.running == len(self.requests.under_way)
            assert load.running + load.waiting == len(self.live)
            assert self.requests.interactive == sum(not one.is_batch for one in self.live.values())
            assert self.requests.has_work == bool(self.live)

    def teardown(self) -> None:
        """Everything that is live comes to its own end: nothing was lost."""
        for one in [one for one in getattr(self, "live", {}).values() if one.held]:
            self.requests.release(one.request, grammar_state(complete=False))
            one.held = False
        while getattr(self, "live", {}):
            self.hand_out()
            self.engine = {name: entry for name, entry in self.engine.items() if name not in self.aborted}
            assert self.engine, "somebody has a place"
            deltas = [
                EngineDelta(name, text(one.sampling.seed, at := len(one.tokens) - one.prompt_tokens + told, at + 1))
                for name, (one, told) in self.engine.items()
            ]
            self.engine = {name: (one, told + 1) for name, (one, told) in self.engine.items()}
            self.collect(self.requests.update(EngineStep(0, deltas), 3.0))


def test_no_order_of_things_loses_or_repeats_a_token() -> None:
    run_state_machine_as_test(RequestsMachine, settings=settings(stateful_step_count=60))
