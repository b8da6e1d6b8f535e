"""What of a GPU's memory the KV cache may take: what is free once the weights are there, less what steps need.

    |<────────────────────────────── total ──────────────────────────────>|
    | weights, NCCL, others' | KV cache            | steps' needs, or     |
    | |<─── not free ───────>|<─────────── free ────| 1 - utilization ────>|
                                                   the larger of the two

Needs are estimated, and generously: a step that finds no memory loses the ring, a tenth more of cache gains little.
"""

from typing import NamedTuple

import torch

DEFAULT_UTILIZATION = 0.9
"""Share of a GPU's memory that may be in use once the cache stands."""
MIB = 1 << 20
WORKSPACES = 512 * MIB
"""cuBLAS (32 MiB per stream and handle on Hopper), split attention, what NCCL takes later, Triton's kernels."""
GRAPHS = 512 * MIB
"""CUDA graphs of a ladder of batch sizes: some 400 nodes each, over one pool of activations."""
FRAGMENTS = 1.5
"""What PyTorch's allocator reserves for what is allocated, at most."""


class StepWidths(NamedTuple):
    """What decides how large a step's tensors are on one rank; in values."""

    hidden: int
    attention: int
    """Of q, k, v and the attention's output together, this rank's."""
    intermediate: int
    """Of the MLP, this rank's; of a mixture's, all experts' that a token meets."""
    vocab: int
    """The whole vocabulary."""
    ranks: int


def widths_of(config: object, ranks: int) -> StepWidths:
    """From a transformers configuration; what it does not name is taken as in Llama."""
    hidden = _number(config, "hidden_size", 4096)
    heads = _number(config, "num_attention_heads", 32)
    head_dim = _number(config, "head_dim", max(1, hidden // heads))
    kv_heads = _number(config, "num_key_value_heads", heads)
    experts = max(1, _number(config, "num_experts_per_tok", 1))
    intermediate = max(
        _number(config, "intermediate_size", 4 * hidden),
        _number(config, "moe_intermediate_size", 0) * experts,
    )
    return StepWidths(
        hidden,
        -(-2 * (heads + kv_heads) * head_dim // ranks),
        -(-intermediate // ranks),
        _number(config, "vocab_size", 0),
        ranks,
    )


def step_bytes(widths: StepWidths, tokens: int, rows: int, dtype: torch.dtype, graphs: int = GRAPHS) -> int:
    """Bytes that a rank may need beside weights and cache, for steps of at most `tokens` that sample at most `rows`;
    `graphs`: what CUDA graphs may take.

    Activations of one layer at a time: the residual, its norm and the products around attention and MLP; of the rows
    that are sampled the rank's logits, and on rank 0 everybody's, twice in float32.
    """
    values = 4 * widths.hidden + widths.attention + 3 * widths.intermediate
    activations = tokens * values * dtype.itemsize
    logits = rows * (-(-widths.vocab // widths.ranks) * dtype.itemsize + widths.vocab * (dtype.itemsize + 8))
    return int(FRAGMENTS * (activations + logits)) + WORKSPACES + graphs


def gpu_budget(free: int, total: int, needs: int, utilization: float = DEFAULT_UTILIZATION) -> int:
    """Bytes for the cache; `free` of `total` bytes with the weights loaded. Pure."""
    return max(0, int(free - max(needs, (1 - utilization) * total)))


def free_memory(device: torch.device) -> tuple[int, int]:
    """(bytes free, bytes in all) on a GPU. What PyTorch holds from loading and does not use counts as free."""
    give_back(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def give_back(device: torch.device) -> None:
    """Gives the memory that PyTorch keeps for later back to a GPU's driver: for libraries that ask it themselves, and
    get nothing of that (NCCL, Triton's kernels as they are loaded)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # else copies under way keep their buffers
        torch.cuda.empty_cache()


def _number(config: object, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default
