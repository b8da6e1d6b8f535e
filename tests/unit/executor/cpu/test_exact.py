"""What a position comes to does not depend on how its step was cut: to the bit, whatever else happens (ADR 0024)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.executor.kv_cache.code_groups import to_groups
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from shared.messages import GenerationRequest, SamplingParams, SparseAttention
from tests.unit.executor.cpu.exact_ring import Cuts, ExactRing, Ranks, Said, needs_disk
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.tiny import make_model

pytestmark = natively

# One after the other, each prompt in one piece, no drafts, and room for all.
ALONE = Cuts(400, 4096, 1, 0, lookahead=False, spills=False, session_ttl=0.0, seed=0)


class Case(NamedTuple):
    model: dict[str, object]
    model_type: str
    codecs: list[Codec | None]
    block_size: int
    world_size: int
    prompts: tuple[int, ...]
    outputs: int
    sparse: SparseAttention | None = None  # what most of its requests ask for
    mapped: bool = False  # full blocks lie in files, which leave memory now and then


PAGES = SparseAttention(threshold=12, sinks=5, recent=7, budget=8, share=0.25, dense_layers=1)
WINDOW = SparseAttention("window", threshold=12, sinks=5, recent=7, dense_layers=0)
SMALL = {"head_dim": 32}
WIDE = {"head_dim": 64}  # whose codes lie in groups, in blocks of 16
# Whose snapshots take a block or two.
RECURRENT = {
    **SMALL,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
STATE_SPACE = {
    **SMALL,
    "hidden_size": 32,
    "num_local_experts": 0,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_expand": 1,
    "mamba_n_heads": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
CASES = {
    "int8": Case(SMALL, "llama", [INT8] * 3, 4, 1, (9, 23, 40), 24),
    "fp8": Case(SMALL, "llama", [FP8] * 3, 4, 1, (9, 23, 40), 24),
    "mixed": Case(SMALL, "llama", [INT8, None, FP8], 4, 1, (9, 23, 40), 24),
    "heads of their own": Case(
        {**WIDE, "num_attention_heads": 2, "num_key_value_heads": 2}, "llama", [INT8] * 3, 16, 1, (70, 33), 24
    ),
    "windows": Case({**SMALL, "sliding_window": 10}, "mistral", [INT8] * 3, 4, 1, (9, 23, 40), 24),
    "latent": Case(SMALL, "deepseek_v3", [INT8] * 3, 4, 1, (9, 23, 40), 24),
    "latent on two ranks": Case(SMALL, "deepseek_v2", [INT8, None, FP8], 16, 2, (40, 70), 24),
    "recurrent": Case(RECURRENT, "qwen3_5_text", [INT8], 16, 1, (40, 70), 24),
    "recurrent on two ranks": Case(
        {**RECURRENT, "linear_num_key_heads": 2}, "qwen3_5_text", [FP8], 16, 2, (40, 70), 24
    ),
    "state space": Case(STATE_SPACE, "granitemoehybrid", [INT8], 16, 1, (40, 70), 24),
    "state space on two ranks": Case(STATE_SPACE, "granitemoehybrid", [INT8], 16, 2, (40, 70), 24),
    "keys of other layers": Case(SMALL, "gemma4_text", [INT8] * 4, 4, 1, (9, 23, 40), 24),
    "keys of other layers on two ranks": Case(SMALL, "gemma4_text", [INT8] * 4, 4, 2, (9, 23, 40), 24),
    "two ranks": Case(SMALL, "llama", [INT8, FP8, INT8], 4, 2, (9, 23, 40), 24),
    "three ranks": Case(SMALL, "llama", [INT8, None, INT8], 4, 3, (9, 23, 40), 24),
    "long": Case(
        {**WIDE, "max_position_embeddings": 640, "num_hidden_layers": 1}, "llama", [INT8], 16, 1, (500, 530), 30
    ),
    "sparse": Case(SMALL, "llama", [INT8, FP8, INT8], 4, 1, (9, 33, 60), 24, PAGES),
    "sparse as written": Case(SMALL, "llama", [], 4, 1, (9, 33, 60), 24, PAGES),
    "sinks": Case({**SMALL, "sliding_window": 10}, "gemma2", [INT8] * 3, 4, 1, (9, 33, 60), 24, WINDOW),
    "sparse beside states": Case(RECURRENT, "qwen3_5_text", [INT8], 4, 1, (40, 70), 24, PAGES),
    "sparse on three ranks": Case(SMALL, "llama", [INT8, None, INT8], 4, 3, (9, 33, 60), 24, PAGES),
    "mapped": Case(SMALL, "llama", [INT8, FP8, None], 4, 1, (9, 33, 60), 24, mapped=True),
    "sparse and mapped": Case(SMALL, "llama", [INT8] * 3, 4, 1, (9, 33, 60), 24, PAGES, mapped=True),
    "sparse and mapped as written on two ranks": Case(
        SMALL, "llama", [None] * 3, 4, 2, (9, 33, 60), 24, PAGES, mapped=True
    ),
    "sparse over parts": Case(
        {**WIDE, "max_position_embeddings": 1400, "num_hidden_layers": 2},
        "llama",
        [INT8] * 2,
        16,
        1,
        (1200, 1000),
        20,
        SparseAttention(threshold=256, sinks=16, recent=64, budget=560, share=0.5, dense_layers=0),
    ),
}


@dataclass(frozen=True, repr=False)
class Ring:
    case: Case
    ranks: Ranks
    requests: list[GenerationRequest]
    said: dict[str, list[Said]]


FAST = {"mixed"}  # what `make test` has: all codecs, on one rank
SLOW = {
    "recurrent",
    "state space",
    "sparse and mapped",
    "latent",
    "keys of other layers",
    "sinks",
    "sparse over parts",
    "sparse on three ranks",
}
SLOW |= {"windows", "sparse and mapped as written on two ranks"}
"""What CI has: each kind of state, and rings of two and three."""


@pytest.fixture(scope="module", params=in_lanes(CASES, FAST, SLOW))
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    case = CASES[request.param]
    directory = make_model(Path(tmp_path_factory.mktemp("model")), case.model_type, **case.model)
    if case.mapped:
        needs_disk(directory)
    ranks = Ranks(
        directory,
        case.codecs,
        case.block_size,
        160,
        400,
        case.world_size,
        summaries=bool(case.sparse),
        mapped=case.mapped,
    )
    requests = list(_requests(case))
    alone = ExactRing(ranks, ALONE)
    alone.run(requests)
    yield Ring(case, ranks, requests, alone.said)
    ranks.close()


def _requests(case: Case) -> Iterator[GenerationRequest]:
    """Some greedy, some drawn, with log probabilities; two of each length begin alike, and then differ."""
    ways = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, logprobs=0),
        SamplingParams(temperature=0.7, top_k=7, top_p=0.9, seed=6),
    ]
    for at, length in enumerate(case.prompts):
        for twin in (0, 1):
            prompt = [(7 * i + at) % 120 for i in range(length - twin)] + [3] * twin
            params = ways[(2 * at + twin) % len(ways)]
            name = f"{length}-{twin}"
            sparse = case.sparse if not (twin and at % 2) else None
            yield GenerationRequest(name, "r", "m", "c", prompt, case.outputs, params, session=name, sparse=sparse)


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    room=st.sampled_from([1, 1, 2, 8]),
    budget=st.sampled_from([3, 7, 16, 33, 200]),
    sequences=st.integers(1, 3),
    drafts=st.sampled_from([0, 3, 15, 40]),
    lookahead=st.booleans(),
    spills=st.booleans(),
    ttl=st.sampled_from([0.0, 1000.0]),
    seed=st.integers(0, 1 << 16),
    visits=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20)), min_size=2, max_size=5),
)
def test_every_position_says_the_same_however_steps_are_cut(
    ring: Ring,
    room: int,
    budget: int,
    sequences: int,
    drafts: int,
    lookahead: bool,
    spills: bool,
    ttl: float,
    seed: int,
    visits: list[tuple[int, int]],
) -> None:
    """`room`: for so many of the longest sequences. `visits`: (which request, how far it has come elsewhere): some come
    back, and find their prompts' beginnings; some are another ring's heirs, in the middle of their answers."""
    longest = max(ring.case.prompts) + ring.case.outputs
    quantized = room * -(-longest // ring.case.block_size) + 1
    least = longest // 50  # tokens of a step: a long prompt takes no more than some fifty
    cuts = Cuts(quantized, max(budget, sequences, least), sequences, drafts, lookahead, spills, ttl, seed)
    disturbed = ExactRing(ring.ranks, cuts, ring.said)
    disturbed.run(_attempt(ring, which, done, number) for number, (which, done) in enumerate(visits))
    assert disturbed.compared


def test_a_request_that_finds_its_prompt_in_the_cache_says_what_it_said_before(ring: Ring) -> None:
    again = ExactRing(
        ring.ranks, Cuts(400, 512, 2, 15, lookahead=False, spills=False, session_ttl=60.0, seed=1), ring.said
    )
    count = len(ring.requests)
    for number in range(2):
        again.run(_attempt(ring, which, 0, number) for which in range(count))
    assert again.compared >= 2 * count * ring.case.outputs
    assert again.batcher.cached_tokens > 0


@pytest.mark.parametrize("sparse", [None, structs.replace(PAGES, budget=16)], ids=["all", "pages"])
def test_codes_in_groups_say_what_codes_in_order_do(tmp_path: Path, sparse: SparseAttention | None) -> None:
    case = Case(WIDE, "llama", [INT8, FP8, INT8], 16, 1, (40, 70), 40, sparse)
    directory = make_model(tmp_path, case.model_type, **case.model)
    rings, stores = [], []
    for in_groups in (False, True):
        ranks = Ranks(directory, case.codecs, 16, 160, 400, 1, summaries=bool(sparse), in_groups=in_groups)
        rings.append(ExactRing(ranks, ALONE))
        rings[-1].run(_requests(case))
        stores += ranks.stores
        ranks.close()
    plain, grouped = rings
    assert plain.said == grouped.said
    ordered, there = stores
    assert [there.shape.is_in_groups(layer) for layer in range(3)] == [True, False, True]
    written = ordered.codes(0).flatten(1).any(1)
    assert written.any()
    assert torch.equal(to_groups(ordered.codes(0)[written].flatten(-2), 16), there.codes(0)[written].flatten(-2))


def test_heads_that_are_attended_together_say_what_each_says_alone(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    long = {**WIDE, **heads, "max_position_embeddings": 640, "num_hidden_layers": 1}
    case = Case(long, "llama", [INT8], 16, 1, (500, 530), 30)
    ranks = Ranks(make_model(tmp_path, case.model_type, **case.model), case.codecs, 16, 160, 400, 1, threads=1)
    alone = ExactRing(ranks, ALONE)
    alone.run(_requests(case))
    # Four sequences of two parts each are enough for a thread, with both KV heads in one.
    together = ExactRing(ranks, ALONE._replace(sequences=4), alone.said)
    together.run(_requests(case))
    assert together.compared
    ranks.close()


def _attempt(ring: Ring, which: int, done: int, number: int) -> GenerationRequest:
    """The `number`-th attempt at one of the requests, whose earlier ones have come some tokens far."""
    request = ring.requests[which % len(ring.requests)]
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    said = ring.said[request.generation_id]
    generated = [one.token for one in said[: done % len(said)]]  # one that is finished would compute nothing
    return GenerationRequest(**{**fields, "generated": generated, "attempt": number})
