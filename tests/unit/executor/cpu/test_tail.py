"""The tail of a step (tail.h): what nobody samples is left out of a model's end, and other rows keep their bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.executor.core.progress import ProgressCounter
from services.executor.cpu.decoder import NativeDecoder
from services.executor.kv_cache.codecs import INT8, Codec
from services.executor.model.loading.loader import load_config
from tests.unit.executor.cpu.test_decoder import pages_of, runner_of, unreadable
from tests.unit.executor.model import ring as rings
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.tiny import make_model

pytestmark = natively


@pytest.mark.parametrize(
    ("model_type", "codec", "weights"),
    [
        *(("gemma4_text", None, ""), ("gemma4_text", INT8, "")),  # its last layers store nothing
        *(("llama", None, ""), ("gpt_oss", INT8, ""), ("deepseek_v3", INT8, ""), ("qwen2_moe", INT8, "q4_k")),
        *(("qwen3_5_text", INT8, ""), ("granitemoehybrid", None, "")),  # gated, recurrent
    ],
    ids=str,
)
def test_what_nobody_reads_is_not_computed(tmp_path: Path, model_type: str, codec: Codec | None, weights: str) -> None:
    """The last rows of prompts come to the same bits, whether the others go through a model's end or not."""
    directory = make_model(tmp_path, model_type, head_dim=32, max_position_embeddings=2048)

    def logits_of(*, every_token: bool) -> dict[tuple[int, int], Tensor]:
        runner = runner_of(directory, native=True, num_blocks=900, codec=codec, weights=weights)
        progress = ProgressCounter.unread()
        script = rings.Script([900, 30, 5], num_blocks=900, compresses=codec is not None)
        found = {}
        for tokens in ({2: 4}, {0: 600}, {2: 1, 0: 299, 1: 29}, {0: 1, 1: 1}):
            plan, sampled = script.step(tokens, every_token=every_token)
            logits = runner.forward(plan, progress)
            assert isinstance(logits, Tensor)
            found |= dict(zip(sampled, logits, strict=True))
        plan, _ = rings.Script([7], num_blocks=900).step({0: 7}, sample=False)
        runner.forward(plan, progress)
        assert progress.count == 5 * load_config(directory).num_hidden_layers
        return found

    every, last = logits_of(every_token=True), logits_of(every_token=False)
    assert set(last) == {(2, 3), (0, 599), (2, 4), (0, 898), (1, 28), (0, 899), (1, 29)}
    for row, logits in last.items():
        assert torch.equal(logits, every[row])


def test_a_prompt_that_goes_on_reads_no_weight_behind_its_last_attention(tmp_path: Path) -> None:
    runner = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True)
    assert isinstance(runner._decoder, NativeDecoder)
    last = runner._decoder.packed.layers[-1]
    assert last.gate_up is not None
    assert last.down is not None
    plan, _ = rings.Script([9]).step({0: 7}, sample=False)
    with unreadable([pages_of(linear.packed) for linear in (last.output, last.gate_up, last.down)]):
        runner.forward(plan)
