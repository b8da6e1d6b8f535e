"""The same prompts through this engine's loop, through transformers' `generate` and its continuous batching.

All three have the same random weights in bf16, take the likeliest token, and never stop early. Each has one run before
the one that counts: compilation, graphs and allocations are not in the figures.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.machine import release, wait
from benchmarks.on_gpu.served import generate, plain_model, served
from benchmarks.on_gpu.shapes import BLOCK, LLAMA_8B, TINY

Tokens = list[list[int]]


def run(bench: Bench) -> None:
    shape = TINY if bench.tiny else LLAMA_8B
    count, length, new = (2, 8, 4) if bench.tiny else (32, 512, 128)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, shape.vocabulary) for _ in range(length)] for _ in range(count)]
    memory = int(2 * count * (length + new) * shape.kv_bytes("bf16"))
    found: dict[str, tuple[float, Tokens]] = {}
    options = {"kv_dtype": "bf16", "kv_memory": memory, "max_sequences": count}
    # The warm-up's prompts differ, or the second run would find its prefixes in the cache.
    others = [[draw.randrange(3, shape.vocabulary) for _ in range(length)] for _ in range(count)]
    try:
        with served(shape, bench.device, context_length=length + new + BLOCK, **options) as ring:
            generate(ring, others, new)
            result = generate(ring, prompts, new)
        found["ours"] = result.seconds, [result.tokens[str(at)] for at in range(count)]
        _report(bench, found, "ours", "this engine", count * new)
    except Exception as error:  # the peers' figures are worth having without ours
        bench.failed("transformers/ours", "this engine", error)
    release(bench.device)
    model = plain_model(shape.config(), torch.bfloat16, bench.device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ways: tuple[tuple[str, str, Callable[..., Tokens]], ...] = (
        ("generate", "transformers' generate", _generate),
        ("continuous", "transformers' continuous batching", _continuous),
    )
    for name, what, way in ways:
        if bench.left() <= 0:
            bench.missing(f"transformers/{name}", what, "no time was left")
            continue
        try:
            way(model, others, new, bench.device)
            wait(bench.device)
            began = time.perf_counter()
            tokens = way(model, prompts, new, bench.device)
            wait(bench.device)
            found[name] = time.perf_counter() - began, tokens
        except Exception as error:  # a peer that does not run here is a row, not a failure of the section
            bench.failed(f"transformers/{name}", what, error)
            continue
        _report(bench, found, name, what, sum(map(len, tokens)))


def _report(bench: Bench, found: dict[str, tuple[float, Tokens]], name: str, what: str, tokens: int) -> None:
    seconds, texts = found[name]
    note = f"{len(texts)} prompts of the same tokens"
    ours, our_texts = found.get("ours", (0.0, []))
    if name != "ours" and ours:
        same = sum(a[:1] == b[:1] for a, b in zip(texts, our_texts, strict=False))
        note = f"this engine takes {ours / seconds:.0%} of its time; {same} of {len(our_texts)} first tokens are equal"
    bench.measured(f"transformers/{name}", what, tokens / seconds, "tok/s", note=note)
    if name != "ours" and ours:
        bench.measured(f"transformers/{name}/factor", f"this engine over {what}", seconds / ours, "times")


def _generate(model: Any, prompts: Tokens, new: int, device: torch.device) -> Tokens:
    ids = torch.tensor(prompts, device=device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
    )
    texts: Tokens = out[:, ids.shape[1] :].tolist()
    return texts


def _continuous(model: Any, prompts: Tokens, new: int, device: torch.device) -> Tokens:
    """One manager for both runs, so that what it captures and allocates is not measured."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By itself it takes all memory there is, which on a CPU takes a minute to fill with zeros.
    small = {"num_blocks": 8, "max_batch_tokens": 64} if device.type == "cpu" else {}
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**small),
        max_new_tokens=new,
        progress_bar=False,
        persistent_manager=True,
    )
    texts = [list(output.generated_tokens) for output in outputs.values()]
    if len(texts) < len(prompts) or any(len(text) != new for text in texts):
        errors = [str(output.error) for output in outputs.values() if output.error]
        whole = sum(len(text) == new for text in texts)
        raise RuntimeError(
            f"{whole} of {len(prompts)} prompts were finished; {(errors or ['see the log'])[0]}"
        )
    return texts
