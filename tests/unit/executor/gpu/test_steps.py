"""Texts are the same however far ahead steps are launched. What is launched is held in `test_on_pretend_gpu.py`."""

import pytest
import torch
from msgspec import structs

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.served import served
from benchmarks.on_gpu.shapes import TINY
from tests.unit.executor.gpu.texts import DRAWN, GREEDY, requests, texts

NEW = 5
PROMPTS = ([5, 9, 7], [6, 9, 7])


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the benchmark's correctness section does this"
)
def test_texts_are_the_same_however_far_ahead_the_engine_is() -> None:
    options = {"kv_dtype": "bf16", "kv_memory": 1 << 20, "max_sequences": 2, "context_length": 64}
    with served(TINY, torch.device("cpu"), torch.float32, **options) as ring:
        assert ring.spec.overlaps
        for samplings in ((GREEDY, DRAWN), (GREEDY, structs.replace(DRAWN, logprobs=1))):
            wanted = requests(PROMPTS, samplings, NEW)
            one_by_one, none = texts(ring, wanted, ahead=False)
            found, launched_ahead = texts(ring, wanted, ahead=True)
            assert none == 0
            assert launched_ahead >= NEW - 2
            assert found == one_by_one
            assert [len(tokens) for tokens in found] == [NEW, NEW]
