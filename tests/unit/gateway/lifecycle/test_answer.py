"""When a generation that nobody listens to ends, and what its id says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.lifecycle import request_state as identity
from services.gateway.lifecycle.request_state import KEPT, RequestState, followed_answer, requests_of
from services.gateway.lifecycle.token_stream import GenerationLimits
from shared.messages import GenerationRequest, SamplingParams
from shared.messages.records import GenerationRecord

LIMITS = GenerationLimits(3, 600.0, 10.0)
GRACE = 5.0


def answer(**fields: object) -> RequestState:
    request = GenerationRequest("i-0", "r", "m", "a", [1], 5)
    record = GenerationRecord("i", "completions", 90.0, [request], **fields)  # type: ignore[arg-type]
    made = followed_answer(record, LIMITS, now=100.0, now_unix=100.0)
    made.owned = True
    return made


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({}, 0.0), ({"stream": True}, GRACE), ({"idempotency": "k"}, GRACE), ({"background": 60.0}, 60.0)],
)
def test_how_long_it_goes_on_while_nobody_listens(fields: dict[str, object], seconds: float) -> None:
    made = answer(**fields)
    assert made.forsaken(100.0 + seconds, GRACE)
    assert not made.forsaken(99.0 + seconds, GRACE)
    made.readers = 1
    assert not made.forsaken(1e9, GRACE)
    made.readers, made.listened_until = 0, 200.0  # another gateway's client listens
    assert not made.forsaken(199.0, GRACE)
    assert made.forsaken(200.0 + seconds, GRACE)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({"stream": True}, 0.0), ({"stream": True, "idempotency": "k"}, GRACE), ({"background": 60.0}, 60.0)],
)
def test_who_left_gives_its_place_to_those_who_wait_unless_it_said_that_it_comes_back(
    fields: dict[str, object], seconds: float
) -> None:
    made = answer(**fields)
    made.generations[0].tokens = [1]
    assert not made.forsaken(100.0, GRACE, crowded=True)  # cut off with its gateway
    made.left = True
    assert made.forsaken(100.0 + seconds, GRACE, crowded=True)
    assert not made.forsaken(100.0, GRACE)
    made.generations[0].tokens = []
    assert made.forsaken(100.0, GRACE) is not made.expects_return  # nothing to come back to


def test_what_may_be_forgotten() -> None:
    made = answer(stream=True)
    assert not made.forgettable(1e9)  # it is ours to end
    made.owned = False
    assert not made.forgettable(100.0)
    assert made.forgettable(100.0 + KEPT)
    made.readers = 1
    assert not made.forgettable(1e9)


def test_an_attempt_of_a_followed_one_is_as_old_as_its_record() -> None:
    assert answer().generations[0].attempt_at == 90.0


def test_choices_are_told_apart_by_id_and_seed_alone() -> None:
    prompts = [
        GenerationRequest(f"i-{index}", "r", "m", "a", [index], 5, sampling=SamplingParams(seed=9)) for index in (0, 2)
    ]
    record = GenerationRecord("i", "completions", 0.0, prompts, choices=2, prompts=2)
    requests = requests_of(record)
    assert [request.generation_id for request in requests] == ["i-0", "i-1", "i-2", "i-3"]
    assert [request.prompt for request in requests] == [[0], [0], [2], [2]]
    assert requests[0].prompt is requests[1].prompt  # usage counts a prompt once
    assert requests[0].sampling.seed == requests[2].sampling.seed == 9
    assert requests[1].sampling.seed == requests[3].sampling.seed != 9


@given(st.text(min_size=1), st.floats(0, 4e9))
def test_an_id_says_where_its_record_is(consumer: str, now: float) -> None:
    writer = identity.writer_of(consumer)
    made = identity.new_identity(writer, now)
    for prefix in ("", *map(identity.prefix_of, (*identity.PREFIXES, "rerank", "nobody.has2"))):
        assert identity.parse(prefix + made) == made
    assert identity.place(made) == (writer, f"{int(now):08x}")


@given(st.text())
def test_what_is_no_id(text: str) -> None:
    found = identity.parse(text)
    assert found is None or text.endswith(found)
