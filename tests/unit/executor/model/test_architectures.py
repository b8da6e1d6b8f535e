"""Every architecture that is served, against transformers' own forward: same weights, same tokens, same logits."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.model.catalogue import SERVED
from services.executor.model.parallel.layers import piece_of
from tests.docs.models import PROVEN_ERROR, PROVEN_RANKS
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of
from tests.unit.executor.model.ring import decode_script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of

REPLICATED = re.compile(
    r"\.(router|gate|shared_expert_gate|wpe|embed_positions|project_in|project_out|experts\.down_proj_bias)\b"
)
"""A bias of the experts' outputs is whole where it is held, on rank 0."""

Logits = dict[tuple[int, int], torch.Tensor]
"""By (sequence, position)."""


@dataclass(frozen=True)
class Proof:
    """A saved model and what transformers computes with it."""

    directory: Path
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    directory = tmp_path_factory.mktemp(request.param.replace("/", "-"))
    model = build(request.param, settings_of(request.param))
    expected = logits_of(model, decode_script()[0].sequences)
    model.save_pretrained(str(directory))
    return Proof(directory, expected)


class Served(NamedTuple):
    """What a ring computes: prefill in chunks and decodes, over the paged cache."""

    logits: Logits
    whole: list[str]
    """Names of matrices that a rank holds whole, of every rank."""


def served(proof: Proof, ranks: int, dtype: torch.dtype) -> Served:
    steps = decode_script()[1]

    def work(collectives: Collectives) -> tuple[list[torch.Tensor | None], list[str]]:
        runner = make_runner(proof.directory, collectives, dtype)
        runner.warm_up()
        return [runner.forward(plan) for plan, _ in steps], whole(runner._model)

    results = on_ring(ranks, work)
    logits: Logits = {}
    for (_, sampled), rows in zip(steps, results[0][0], strict=True):
        assert rows is not None
        logits.update(zip(sampled, rows, strict=True))
    return Served(logits, [name for _, names in results for name in names])


def whole(model: torch.nn.Module) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
        and piece_of(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) is None
    ]


@pytest.fixture(scope="module")
def on_two_ranks(proof: Proof) -> Served:
    return served(proof, 2, torch.bfloat16)


@pytest.mark.parametrize(
    "ranks",
    [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in PROVEN_RANKS[:-1]), PROVEN_RANKS[-1]],
)
def test_logits_equal_transformers(proof: Proof, ranks: int) -> None:
    assert proof.expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"
    logits = served(proof, ranks, torch.float32).logits
    assert len(logits) == 34 + 23 + 20
    error = max(
        float((row - proof.expected[sequence][position]).abs().max())
        for (sequence, position), row in logits.items()
    )
    assert error < PROVEN_ERROR


def test_bfloat16_stays_close_to_transformers(proof: Proof, on_two_ranks: Served) -> None:
    close = [
        torch.nn.functional.cosine_similarity(row, proof.expected[sequence][position], dim=0) > 0.99
        for (sequence, position), row in on_two_ranks.logits.items()
    ]
    # A router may choose another expert for a token whose scores nearly tie, and its text is then another.
    assert sum(close) >= 0.9 * len(close)


def test_only_routers_and_position_embeddings_are_whole_on_every_rank(on_two_ranks: Served) -> None:
    """What is replicated by mistake computes the same, only slower."""
    assert [name for name in on_two_ranks.whole if not REPLICATED.search(name)] == []


def test_every_architecture_that_is_served_is_proven() -> None:
    assert {name.partition("/")[0] for name in ARCHITECTURES} == set(SERVED)
