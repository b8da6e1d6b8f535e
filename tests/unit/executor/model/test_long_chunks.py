"""Chunks that recurrent layers compute in several blocks: longer than any of the proofs of architectures."""

from pathlib import Path

import pytest
import torch

from services.executor.collectives.base import SingleRank
from tests.docs.models import PROVEN_ERROR
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import Script, make_runner
from tests.unit.executor.model.tiny import build, logits_of

LENGTH = 180  # tokens: more than one block of each (RWKV's are the longest, 128), and no multiple of any
CONTINUED = 150  # of them in one chunk, behind the others


@pytest.mark.parametrize("name", ["mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba"])
def test_a_long_chunk_that_continues(name: str, tmp_path: Path) -> None:
    model = build(name, {**settings_of(name), "max_position_embeddings": LENGTH})
    model.save_pretrained(str(tmp_path))
    script = Script([LENGTH])
    [expected] = logits_of(model, script.sequences)
    runner = make_runner(tmp_path, SingleRank())
    for tokens in (LENGTH - CONTINUED, CONTINUED):
        plan, sampled = script.step({0: tokens}, every_token=True)
        logits = runner.forward(plan)
        assert isinstance(logits, torch.Tensor)
        wanted = torch.stack([expected[position] for _, position in sampled])
        assert float((logits - wanted).abs().max()) < PROVEN_ERROR
