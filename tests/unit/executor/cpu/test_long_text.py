"""What stands once in a long text is found by pages and not by a window, by a model made to look for it."""

import random
from collections.abc import Iterator

import pytest

from services.executor.kv_cache.codecs import INT8
from shared.messages import GenerationRequest, SamplingParams, SparseAttention
from tests.unit.executor.cpu.exact_ring import Cuts, ExactRing, Ranks
from tests.unit.executor.model.induction import PASSAGE, make_induction_model
from tests.unit.executor.model.lanes import natively

pytestmark = natively

LENGTH, BLOCK = 1200, 16
FIRST, *REST = PASSAGE
PAGES = SparseAttention("pages", 128, 16, 64, budget=32, share=0.0, dense_layers=0)
WINDOW = SparseAttention("window", 128, 16, 64, dense_layers=0)


@pytest.fixture(scope="module", params=["int8", "as written"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory = make_induction_model(tmp_path_factory.mktemp("induction"))
    compressed = request.param == "int8"
    writable, quantized = (24, 200) if compressed else (200, 0)
    made = Ranks(directory, [INT8] * 2 if compressed else [], BLOCK, writable, quantized, 1, summaries=True)
    yield made
    made.close()


def asked(depth: float, sparse: SparseAttention | None, name: str = "g") -> GenerationRequest:
    """The passage stands at `depth` of noise, and its first token at the end."""
    rng = random.Random(7)
    noise = [rng.randrange(1, FIRST) for _ in range(LENGTH)]
    at = round(depth * (LENGTH - len(PASSAGE)))
    prompt = [*noise[:at], *PASSAGE, *noise[at + len(PASSAGE) :], FIRST]
    greedy = SamplingParams(temperature=0.0)
    return GenerationRequest(name, "r", "m", "c", prompt, len(REST), greedy, sparse=sparse)


def said(ranks: Ranks, *requests: GenerationRequest, budget: int = 512) -> list[list[int]]:
    """What the ring answers to each."""
    quantized = 200 if ranks.writable < 200 else 0
    cuts = Cuts(quantized, budget, 4, 0, lookahead=False, spills=False, session_ttl=0.0, seed=0)
    ring = ExactRing(ranks, cuts)
    ring.run(requests)
    return [[one.token for one in ring.said[request.generation_id]] for request in requests]


@pytest.mark.parametrize("depth", [0.05, 0.5, 0.9])
def test_pages_find_what_a_window_never_sees_again(ranks: Ranks, depth: float) -> None:
    dense, pages, window = (said(ranks, asked(depth, choice))[0] for choice in (None, PAGES, WINDOW))
    assert dense == REST
    assert pages == REST, "of 75 blocks those with the passage score best"
    assert not set(window) & set(REST), "the window has noise alone"


def test_a_window_sees_its_sinks_and_what_is_recent(ranks: Ranks) -> None:
    """The first 16 tokens, and the last 64."""
    assert said(ranks, asked(0.003, WINDOW)) == said(ranks, asked(0.99, WINDOW)) == [REST]


def test_prompts_in_pieces_and_beside_others_find_the_same(ranks: Ranks) -> None:
    requests = [asked(0.3, PAGES, "pages"), asked(0.3, WINDOW, "window"), asked(0.6, None, "dense")]
    pages, window, dense = said(ranks, *requests, budget=100)
    assert pages == dense == REST
    assert window == said(ranks, asked(0.3, WINDOW))[0]
