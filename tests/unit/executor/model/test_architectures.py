"""Every architecture that is served, against transformers' own forward: same weights, same tokens, same logits."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.families.registry import DECODERS
from services.executor.model.catalogue import TEXT_ALONE
from services.executor.model.parallel.layers import piece_of
from tests.docs.models import PROVEN_ERROR, PROVEN_RANKS
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of
from tests.unit.executor.model.lanes import STYLES, in_lanes
from tests.unit.executor.model.ring import decode_script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of, precise_logits_of, save_as_part

# A bias of the experts' outputs is whole where it is held, on rank 0; a head's own layer computes few rows. What
# comes before the heads of latent attention is of all heads, behind norms of its whole width; what an indexer chooses
# is chosen alike on all ranks; gates of norms and weights of hyper-connections are narrow, and follow the whole
# width. What DeepSeek V4 keeps of tokens is one line for all heads; what Qwen 4 adds of several tokens goes to the
# whole width. Of the two factors of a gate of Kimi's delta attention the first is one head wide. Experts that compute
# in a latent need all of it. RWKV mixes a token with the one before by a number for each value of the hidden state.
# Of the two factors of an adapter the first is narrow.
REPLICATED = re.compile(
    r"(^|\.)(router|gate|shared_expert_gate|wpe|embed_positions|positions_embed|lm_head\.dense|project_in|project_out"
    r"|experts\.down_proj_bias|per_layer_(model_projection|input_gate|projection)|laurel\.linear_\w+"
    r"|q_a_proj|kv_a_proj_with_mqa|indexer\.\w+|\w+_layernorm\.mlp\.fc\d|\w+_hc\.fn|hc_head\.hc_fn"
    r"|self_attn\.kv_proj|compressor\.(\w+\.)*\w+|\w*hyper_connection\w*\.\w+|ple\.(key_proj|value_proj|conv1d)"
    r"|f_a_proj|g_a_proj|fc\d_latent_proj|\w+_adapter_list\.\d+\.0|time_mix_\w+"
    r"|altup\.\w+|altup_(unembed_)?projections\.\d)\b"
)

# Models that transformers builds with libraries that are not here, or saves under other names than it reads; their
# text model stands for them.
BY_TEXT_MODEL = {"gemma3n": "gemma3n_text", "kimi_k25": "deepseek_v3"}

# Types whose own float32 differs from their float64 by as much as is allowed here: they are computed in float64.
ROUNDED = ("qwen3_5_moe", "qwen3_next")

Logits = dict[tuple[int, int], torch.Tensor]  # by (sequence, position)


@dataclass(frozen=True)
class Proof:
    """A saved model and what transformers computes with it."""

    directory: Path
    expected: list[torch.Tensor]
    model: Any  # transformers' own


TYPES = [name for name in ARCHITECTURES if "/" not in name]
# Besides the styles, types with code of their own that no other fast test runs.
FAST = STYLES | {"bailing_hybrid", "diffllama", "doge", "gpt_neo", "gptj", "jetmoe", "mpt"}


@pytest.fixture(scope="module", params=in_lanes(sorted(ARCHITECTURES), FAST, TYPES))
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    directory = tmp_path_factory.mktemp(request.param.replace("/", "-"))
    name = BY_TEXT_MODEL.get(request.param, request.param)
    model = build(name, settings_of(name))
    if request.param in BY_TEXT_MODEL:
        save_as_part(model, request.param, directory)
    else:
        model.save_pretrained(str(directory))
    reference = precise_logits_of if name.startswith(ROUNDED) else logits_of
    expected = reference(model, decode_script()[0].sequences)  # RWKV's scales its weights in place
    return Proof(directory, expected, model)


class Served(NamedTuple):
    """What a ring computes: prefill in chunks and decodes, over the paged cache."""

    logits: Logits
    whole: list[str]  # names of matrices that a rank holds whole, of every rank


def served(proof: Proof, ranks: int, dtype: torch.dtype) -> Served:
    steps = decode_script()[1]

    def work(collectives: Collectives) -> tuple[list[torch.Tensor | None], list[str]]:
        # The longest sequence: transformers chooses frequencies that follow the length by it (test_rotary.py).
        runner = make_runner(proof.directory, collectives, dtype, context=40)
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


# What a type's own code computes shows in float32; what all share, in one type of each style.
in_bfloat16 = pytest.mark.parametrize("proof", in_lanes(sorted(ARCHITECTURES), slow=()), indirect=True)


@pytest.fixture(scope="module")
def on_two_ranks(proof: Proof) -> Served:
    return served(proof, 2, torch.bfloat16)


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in PROVEN_RANKS[:-1]), PROVEN_RANKS[-1]]
)
def test_logits_equal_transformers(proof: Proof, ranks: int) -> None:
    assert proof.expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"
    logits = served(proof, ranks, torch.float32).logits
    assert len(logits) == 34 + 23 + 20
    error = max(
        float((row - proof.expected[sequence][position]).abs().max()) for (sequence, position), row in logits.items()
    )
    assert error < PROVEN_ERROR


@in_bfloat16
def test_bfloat16_stays_close_to_transformers(proof: Proof, on_two_ranks: Served) -> None:
    close = sum(
        is_close(row, proof.expected[sequence][position]) for (sequence, position), row in on_two_ranks.logits.items()
    )
    # A router may choose another expert for a token whose scores nearly tie, and its text is then another: with
    # recurrent state that of the tokens behind it too, in transformers' own bfloat16 as well.
    wanted = len(on_two_ranks.logits)
    assert close >= 0.9 * wanted or close >= 0.9 * close_in_bfloat16(proof)


def close_in_bfloat16(proof: Proof) -> int:
    """How many rows transformers itself computes as close in bfloat16."""
    logits = logits_of(proof.model.to(torch.bfloat16), decode_script()[0].sequences)
    rows = zip(torch.cat(logits).float(), torch.cat(proof.expected), strict=True)
    return sum(is_close(row, expected) for row, expected in rows)


def is_close(row: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.nn.functional.cosine_similarity(row, expected, dim=0) > 0.99)


@in_bfloat16
def test_only_routers_and_position_embeddings_are_whole_on_every_rank(on_two_ranks: Served) -> None:
    """What is replicated by mistake computes the same, only slower."""
    assert [name for name in on_two_ranks.whole if not REPLICATED.search(name)] == []


def test_every_architecture_that_is_served_is_proven() -> None:
    assert {name.partition("/")[0] for name in ARCHITECTURES} == set(DECODERS) | TEXT_ALONE
