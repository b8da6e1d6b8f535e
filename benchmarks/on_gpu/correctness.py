"""Whether what a GPU computes is right, before how fast it is.

kernels      attention against float64, over shapes                          (`kernel_cases.py`, `kernel_shard.py`)
models       tiny ones of several architectures in fp32, against transformers' own forward on the same device
bf16         a middle-sized model: its logits as near to those of fp32 as transformers' bf16 has them
graphs       the tokens of replayed graphs against those of eager launches, in fp32: bf16 may tie, and then
             the order of sums decides
sampling     tokens drawn on the device against those that the host draws
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from msgspec import structs

from benchmarks.engine.steps import Row as Sequence
from benchmarks.engine.steps import step_plan
from benchmarks.on_gpu.bench import Bench, Row
from benchmarks.on_gpu.kernel_shard import chosen, run_shards
from benchmarks.on_gpu.served import GREEDY, Served, generate, plain_model, prefill_plan, random_prompts, served
from benchmarks.on_gpu.shapes import BLOCK, MIDDLE, TINY
from services.executor.core.step_plan import StepPlan, to_bytes
from shared.messages import SamplingParams

# Largest error of logits in fp32, in parts of their standard deviation. TF32 would be off by 1e-3.
LOGITS = 1e-4
# By how much the share of equal top-1 tokens may be below that of transformers' own bf16: of 2,048 positions of which
# nine in ten are equal, chance alone takes 0.01.
TOP_1 = 0.04
# How many times as large as transformers' own the bf16 error of logits may be, as a root mean square: kernels that cut
# numbers off instead of rounding them have 1.5.
ERROR = 1.25
INTERPRETED = 2.5  # the same in Triton's interpreter, which does cut them off
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 32},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
}
PROMPT, DECODED = 37, 5
SHARDS = 14  # processes that check attention's kernels


def models(bench: Bench) -> None:
    """All but the kernels."""
    bench.each("correctness", (_models, _bf16, _graphs, _sampling), wrong=True)


def kernels(bench: Bench) -> None:
    """Each kernel on its own."""
    bench.each("correctness", (_kernels,), wrong=True)


# --- kernels -------------------------------------------------------------------------------------


def _kernels(bench: Bench) -> None:
    """In processes beside each other, since most of it is compiling."""
    shards = 1 if bench.tiny else min(SHARDS, len(os.sched_getaffinity(0)))
    found = run_shards(shards, bench.tiny, max(bench.left(), 1.0))
    wrong = [f"{one.key}: {one.note}" for one in found.checked if not one.ok]
    largest = max((one.figure for one in found.checked if one.figure is not None), default=0.0)
    wanted = len(chosen(bench.tiny))
    note = f"{len(found.checked)} of {wanted} cases" + "".join(f"; {why}" for why in found.ended)
    for why in wrong:
        print(f"wrong: {why}", file=sys.stderr)
    if wrong:
        note += f"; {len(wrong)} wrong: {'; '.join(wrong[:3])}"
    ok = not wrong and bool(found.checked)
    what = "attention's kernels against float64, in parts of what is allowed"
    bench.report(Row("correctness/kernels", what, largest, "error", 1.0, note=note, ok=ok))


# --- whole models --------------------------------------------------------------------------------


def _models(bench: Bench) -> None:
    names = ("llama", "qwen3") if bench.tiny else tuple(ARCHITECTURES)
    for name in names:
        key, what = f"correctness/{name}", f"{name}, fp32 logits against transformers'"
        with bench.case(key, what, wrong=True):
            error = _logit_error(name, bench.device)
            bench.wrong_or_right(key, what, error < LOGITS, error, LOGITS)


def _logit_error(name: str, device: torch.device) -> float:
    """The largest, over a prompt in one step and tokens after it one at a time."""
    config = _config(name)
    (ids,) = random_prompts([PROMPT + DECODED], 3)
    with served(config, device, torch.float32, kv_dtype="bf16", kv_memory=8 << 20, max_sequences=2) as ring:
        found = torch.cat([_all_logits(ring, plan) for plan in _plans(ids, ring)])
    plain = plain_model(config, torch.float32, device, attention="eager")
    expected = plain(input_ids=torch.tensor([ids], device=device)).logits[0]
    expected = expected.to(found.device)
    return float((found - expected).abs().max() / expected.std())


def _config(name: str) -> Any:
    from transformers import AutoConfig

    fields = {key: value for key, value in (SMALL | ARCHITECTURES[name]).items() if value is not None}
    return AutoConfig.for_model(name, **fields, architectures=None)


def _plans(ids: list[int], ring: Served) -> Iterator[StepPlan]:
    """The prompt, every row of it sampled, then decodes over its blocks."""
    prompt = prefill_plan(PROMPT, 0, ring.spec.num_blocks, ring.spec.num_quantized, last=True)
    yield structs.replace(prompt, token_ids=to_bytes(ids[:PROMPT]), sample_rows=to_bytes(np.arange(PROMPT)))
    for at in range(PROMPT, len(ids)):
        row = Sequence(at + 1, 1, range(at // BLOCK + 1))
        yield step_plan([row], BLOCK, token_ids=to_bytes([ids[at]]))


def _all_logits(ring: Served, plan: StepPlan) -> torch.Tensor:
    """float32 [R, vocabulary]"""
    logits = ring.runner.forward(plan)
    assert isinstance(logits, torch.Tensor)
    return logits.clone()


def _bf16(bench: Bench) -> None:
    shape = TINY if bench.tiny else MIDDLE
    tokens = 32 if bench.tiny else 2048
    config = shape.config()
    (ids,) = random_prompts([tokens], 3, shape.vocabulary)
    batch = torch.tensor([ids], device=bench.device)
    config.dtype = "bfloat16"
    model = plain_model(config, torch.bfloat16, bench.device)
    theirs = model(input_ids=batch).logits[0].float()
    true = model.float()(input_ids=batch).logits[0]  # of the same weights: what differs is how it is computed
    del model
    memory = int(4 * tokens * shape.kv_bytes("bf16")) + (1 << 20)
    options: dict[str, Any] = {
        "kv_dtype": "bf16",
        "kv_memory": memory,
        "max_sequences": 1,
        "context_length": 2 * tokens,
    }
    with served(config, bench.device, **options) as ring:
        plan = prefill_plan(tokens, 0, ring.spec.num_blocks, ring.spec.num_quantized, last=True)
        plan = structs.replace(plan, token_ids=to_bytes(ids), sample_rows=to_bytes(np.arange(tokens)))
        ours = _all_logits(ring, plan).float().to(true.device)
    _judge(bench, f"{shape.name} in bf16", true, ours, theirs)


def _judge(bench: Bench, what: str, true: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Logits in bf16, by us and by transformers, by those of fp32: [T, vocabulary]."""
    share, peer = (float((one.argmax(-1) == true.argmax(-1)).float().mean()) for one in (ours, theirs))
    off, peer_off = (float((one - true).square().mean().sqrt() / true.std()) for one in (ours, theirs))
    bench.report(
        Row(
            "correctness/bf16",
            f"{what}: top-1 of {len(true)} positions equal to fp32's",
            share,
            "share",
            note=f"transformers' bf16: {peer:.3f}; random weights decide more narrowly than trained ones",
            ok=share >= peer - TOP_1,
        )
    )
    note = f"root mean squares of the errors of logits: {off:.2g} and {peer_off:.2g} of their deviation"
    key, what = "correctness/bf16-error", f"{what}: its error over that of transformers' bf16"
    times, most = off / max(peer_off, 1e-9), INTERPRETED if bench.tiny else ERROR
    bench.report(Row(key, what, times, "times", most, note=note, ok=times <= most))


# --- graphs and sampling -------------------------------------------------------------------------


def _tokens(
    bench: Bench, sampling: SamplingParams, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> list[list[int]]:
    """What prompts of different lengths become."""
    shape = TINY
    prompts = random_prompts((3, 17) if bench.tiny else (3, 9, 17, 33, 40), 9)
    most = 2 if bench.tiny else 8
    known = {"kv_dtype": "bf16", "kv_memory": 8 << 20, "max_sequences": most, "context_length": 256}
    with served(shape, bench.device, dtype, **known, **settings) as ring:
        run = generate(ring, prompts, 4 if bench.tiny else 40, sampling)
        return [run.tokens[str(at)] for at in range(len(prompts))]


def _graphs(bench: Bench) -> None:
    key, what = "correctness/graphs", "tokens of graphs against those of eager launches"
    eager = _tokens(bench, GREEDY, torch.float32, cuda_graphs="off")
    graphs = _tokens(bench, GREEDY, torch.float32)
    _equal(bench, key, what, graphs, eager)
    prompts = _tokens(bench, GREEDY, torch.float32, cuda_graphs="all", max_batch_tokens=64)
    what = "tokens where prompts are graphs too against those of eager launches"
    _equal(bench, "correctness/prompt-graphs", what, prompts, eager)


def _sampling(bench: Bench) -> None:
    """Host and device draw the same: that a row's log probability is asked for sends it to the host."""
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=21)
    by_host = structs.replace(sampled, logprobs=0)
    here, there = _tokens(bench, sampled), _tokens(bench, by_host)
    _equal(bench, "correctness/sampling", "tokens drawn on the device against the host's", here, there)


def _equal(bench: Bench, key: str, what: str, one: list[list[int]], other: list[list[int]]) -> None:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    different = sum(a != b for a, b in pairs)
    bench.wrong_or_right(key, what, not different, float(different), 0.0, f"of {len(pairs)} tokens differ")
