from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.serve.workloads import WORKLOADS, PromptSource, Vocabulary, calibrate, sessions
from tests.unit.benchmarks.fake_server import FIRST_OVERHEAD, NEXT_OVERHEAD, FakeServer

VOCABULARY = Vocabulary(
    starts=tuple(f"s{i}" for i in range(40)),
    words=tuple(f"w{i}" for i in range(50)),
    overhead=FIRST_OVERHEAD,
    turn_overhead=2 * NEXT_OVERHEAD,
)


def test_the_workloads_are_those_of_the_peers() -> None:
    shapes = {name: (w.clients, w.requests, w.prompt_tokens, w.output_tokens, w.turns) for name, w in WORKLOADS.items()}
    assert shapes == {
        "W1": (1, 5, 128, 128, 1),
        "W2": (16, 48, 256, 128, 1),
        "W3": (64, 128, 64, 64, 1),
        "W4": (8, 32, 100, 64, 4),
        "W4s": (1, 32, 100, 64, 4),
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_sessions_have_the_prompt_sizes_of_their_workload(name: str) -> None:
    workload = WORKLOADS[name]
    server = FakeServer()
    found = sessions(workload, PromptSource(VOCABULARY, 1), "run")
    assert len(found) == workload.sessions
    for session in found:
        assert len(session.messages) == workload.turns
        assert (session.session_id is None) == (workload.turns == 1)
        contents: list[str] = []
        for turn, message in enumerate(session.messages, 1):
            contents.append(message)
            prompt = [{"role": "user", "content": text} for text in contents]
            answers = turn - 1  # of one token each
            assert server.count(prompt) == turn * workload.prompt_tokens + answers
            contents.append("answer")
    ids = [session.session_id for session in found if session.session_id]
    assert len(set(ids)) == len(ids)


@given(st.integers(0, 2**32), st.integers(1, 1000))
def test_no_two_prompts_share_more_than_their_first_word(seed: int, count: int) -> None:
    source = PromptSource(VOCABULARY, seed)
    openings = [tuple(source.prompt(30).split()[:2]) for _ in range(count)]
    assert len(set(openings)) == count
    for at in range(0, count, 40):
        some = openings[at : at + 40]
        assert len({first for first, _ in some}) == len(some)


@given(st.integers(0, 2**32), st.integers(FIRST_OVERHEAD + 2, 300))
def test_a_prompt_has_exactly_the_tokens_asked_for(seed: int, tokens: int) -> None:
    prompt = PromptSource(VOCABULARY, seed).prompt(tokens)
    assert FakeServer().count([{"role": "user", "content": prompt}]) == tokens


def test_the_seed_decides_the_prompts() -> None:
    first, again, other = (PromptSource(VOCABULARY, seed).prompt(50) for seed in (1, 1, 2))
    assert first == again != other


def test_a_prompt_smaller_than_the_template_is_refused() -> None:
    with pytest.raises(BenchError, match="ask for at least 12"):
        PromptSource(VOCABULARY, 1).prompt(11)


async def test_calibration_leaves_out_words_of_several_tokens() -> None:
    server = FakeServer(long_words=frozenset({"a", "name", "The", "people", "road"}))

    async def measure(contents: Sequence[str]) -> int:
        return server.count([{"role": "user", "content": text} for text in contents])

    found = await calibrate(measure)
    assert (found.overhead, found.turn_overhead) == (FIRST_OVERHEAD, 2 * NEXT_OVERHEAD)
    assert not server.long_words & {*found.starts, *found.words}
    assert len(found.starts) >= 128
    assert len(found.words) >= 96


async def test_calibration_gives_up_on_a_server_that_counts_something_else() -> None:
    async def measure(contents: Sequence[str]) -> int:
        return 7

    with pytest.raises(BenchError, match=r"usage\.prompt_tokens does not grow"):
        await calibrate(measure)
