"""A whole executor whose rank pretends to have a GPU says what one on the CPU says, and tells of its GPU."""

import asyncio
import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from shared.messages import GenerationRequest, SamplingParams
from tests import pretend_gpu
from tests.integration.executor.rings import Rings, make_served_model, request_of

ROOT = Path(__file__).parents[3]
SITE = Path(pretend_gpu.__file__).with_name("site")
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=6),
    SamplingParams(temperature=0.0, logprobs=1),
]


def load(group: str) -> list[GenerationRequest]:
    return [
        request_of(group, number, 6 + 5 * number, max_tokens=6, sampling=sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]


async def texts(house: Rings, group: str) -> list[tuple[list[int], str]]:
    await house.hand_in(group, load(group))
    return await house.texts(load(group))


@pytest.mark.slow
async def test_an_executor_on_a_gpu_says_what_one_on_the_cpu_says(house: Rings, tmp_path: Path) -> None:
    model = make_served_model(tmp_path / "model")
    paths = os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ("--kv-dtype", "bf16", "--max-sequences", "3", "--max-batch-tokens", "32")
    # A layer that Triton's interpreter computes takes seconds on a busy machine, and tells of no progress meanwhile.
    # Steps that warm up have tests of their own (tests/unit/executor/gpu/test_warmup_plans.py).
    patient = ("--hung-after", "60", "--warm-up", "off")
    await house.begin("cpu", model, *options)
    await house.begin("gpu", model, *options, *patient, "--device", "cuda", variables={"PYTHONPATH": paths})
    await house.ready("cpu", "gpu", timeout=200)
    expected, found = await asyncio.gather(texts(house, "cpu"), texts(house, "gpu"))
    assert found == expected
    logged = await house.leave("gpu")
    for said in ("computing_with_gpu_decoder", '"sizes": [1, 2, 3]', '"lookahead": true'):
        assert said in logged
