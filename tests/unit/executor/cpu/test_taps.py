"""What the native kernels hand over of what layers read, for draft heads; transformers says what that is."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.executor.core.progress import ProgressCounter
from services.executor.cpu.decoder import NativeDecoder
from services.executor.model.draft_heads import StateTaps
from services.executor.model.loading.loader import load_config
from services.executor.worker.runner import NO_POOLS
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.lanes import LOWERED, STYLES, in_lanes, natively
from tests.unit.executor.model.ring import Script
from tests.unit.executor.model.tiny import auto_class, make_model

pytestmark = natively
PROMPT = 40


@pytest.mark.parametrize("model_type", in_lanes(LOWERED, ["llama", "gpt_oss", "gemma4_text", "qwen3_5_text"], STYLES))
def test_hands_over_what_layers_read(tmp_path: Path, model_type: str) -> None:
    directory = make_model(tmp_path, model_type, head_dim=32)
    decoder = runner_of(directory, native=True)._decoder
    assert isinstance(decoder, NativeDecoder)
    script = Script([PROMPT])
    plan, _ = script.step({0: PROMPT})
    last = len(decoder.packed.layers) - 1
    for layers in ((), (0, last, last)):
        *_, states = decoder.forward_with_states(plan, ProgressCounter.unread(), NO_POOLS, layers)
        expected = states_read(directory, script.sequences[0][:PROMPT], layers)
        assert states.shape == torch.cat(expected, dim=-1).shape
        # Each by itself, since what the first layer reads is small beside the rest. bf16 may choose others of experts
        # that are as likely: up to 0.1 off. What another layer reads is 0.4 off and more, what another row has 0.6.
        for ours, theirs in zip(states.chunk(len(expected), dim=-1), expected, strict=True):
            assert float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median()) < 0.2, layers


def states_read(
    directory: Path, tokens: list[int], layers: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """[rows, hidden] of each of `layers`, computed in float32 of weights of `dtype`; of none, what the head reads."""
    model = auto_class(load_config(directory)).from_pretrained(str(directory), attn_implementation="eager", dtype=dtype)
    with torch.inference_mode(), StateTaps(layers).watching(model.float()) as states:
        model(torch.tensor([tokens]), use_cache=False)
    return states
