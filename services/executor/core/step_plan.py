"""The step plan: what every rank of a ring computes in one step.

A plan is the only thing that the leader sends to the other ranks. It holds token ids, positions
and block ids, never tensors or Python objects, so that a step costs one short message per rank.

    flat batch (T tokens, S sequences; decodes first, then prefill chunks)

      token_ids   [ d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 ]       T = 9
      query_lens  [ 1    1    1    4             2     ]       S = 5, sum = T
      sample_rows [ 0    1    2    6                   ]       rows of the flat batch that get logits
                                                               (p4 is a chunk that is not its prompt's last)
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One forward pass over a flat batch. Every array travels as little-endian int32 bytes.

    Sequences with exactly one token in this step (decodes) come first; `num_decodes` says how many.
    T may be 0: such a plan only copies blocks (`kv_cache/block_pool.py` says why in this order).
    """

    step: int
    num_decodes: int
    # int32 [T]: the tokens to compute; -1 - k: what row k of the step before, which was `on_device`, has sampled.
    token_ids: bytes
    positions: bytes  # int32 [T]: absolute position of each token in its sequence
    # int32 [T]: where each token's key and value go: writable block id * block size + offset. So it tells each token's
    # own block, too, which it reads as it is written.
    slots: bytes
    query_lens: bytes  # int32 [S]: tokens of each sequence in this step
    context_lens: bytes  # int32 [S]: tokens of each sequence in the cache once this step has run
    # int32 [sum of ceil(context_len / block size)]: the sequences' block tables, end to end. The last block of each is
    # as it is written; those before it are as they are kept, also where this step fills them (`compressions`).
    block_tables: bytes
    sample_rows: bytes  # int32 [R]: rows of the flat batch whose logits the sampler needs, in ascending order
    saves: bytes = b""  # int32 [n, 2]: (block id, spill slot), copied first
    # int32 [n, 2]: (writable block id, quantized block id) of the blocks that this step fills. In each layer they are
    # compressed behind the step's writes, before it attends: a token reads its own block as it is written, and those
    # before it as they are kept.
    compressions: bytes = b""
    # int32 [n, 2]: (spill slot, block id), copied after the saves and adoptions and before the forward pass.
    restores: bytes = b""
    # `WANT` of `sampling/candidates.py` [R]: how much of each of these rows it needs; empty: all of all.
    candidates: bytes = b""
    # int32 [P, 2]: (first, end) rows of the flat batch whose final hidden states are summed up; none is in two,
    # and none is sampled.
    pools: bytes = b""
    # Whether somebody traces a sequence of the step: each rank notes what it spends on it (`ipc/board.py`).
    traced: bool = False
    # int32 [n, 2]: (landing slot, block id), copied after the saves: what another ring has given.
    adoptions: bytes = b""
    # What the ranks' sides of a hand-over are to do (`kv_transfer/board.py`), after these copies; empty: nothing.
    handover: bytes = b""
    # Whether the rows are sampled on the ranks' devices, where token ids of -1 - k in the next plan find them
    # (`gpu/steps.py`).
    on_device: bool = False
    # int32 [Q]: rows of the flat batch of which the log probability of a given token is wanted; none is sampled.
    score_rows: bytes = b""
    score_targets: bytes = b""  # int32 [Q]: these tokens
    score_top: int = 0  # how many of the most likely tokens are wanted of each of these rows too
    # int32 [S]: where each sequence's recurrent state is; empty where the model keeps none. A sequence whose first
    # token of the step has position 0 begins with zeros, whatever its slot holds.
    state_slots: bytes = b""
    # int32 [n, 2]: (row of the flat batch, slot): its sequence's state after that row is copied to that slot: for a
    # snapshot, or since the row behind it is a draft, which may be wrong.
    state_snapshots: bytes = b""
    # int32 [n, 1 + m]: (slot, m ids of full blocks): the slot's bytes go to these blocks, after the saves and
    # before the adoptions (m: `EngineSpec.state_blocks`).
    state_saves: bytes = b""
    state_loads: bytes = b""  # int32 [n, 1 + m]: and back, after the restores and before the forward pass
    # int32 [S]: slot of each sequence's LoRA adapter, -1: none; empty where no sequence of the step has one.
    adapters: bytes = b""
    # (slot, directory of the adapter's files): read into that slot before the forward pass, in place of what it held
    # (`scheduler/adapter_slots.py`).
    adapter_loads: list[tuple[int, str]] = []
    # How many of `score_rows`, the last ones, are scored for tokens that requests name: one row for each token, so
    # that the same row comes several times.
    score_named: int = 0
    # int32 [S]: position at which each sequence's second segment begins (`GenerationRequest.second_segment`); empty
    # where none has one.
    second_segments: bytes = b""
    # The draft model computes it, and not the model that is served (`core/engine.py`, `DraftPlan`).
    of_draft: bool = False
    # The draft model computes the rows too, for its own keys and values, beside the model that is served.
    followed: bool = False

    # int32 [S, 7]: which earlier blocks each sequence's tokens read (`sparse_attention.py`); empty where all read
    # all.
    sparse: bytes = b""
    # Of each of `saves` what it holds (digest, parent, tokens; `kv_cache/prefix_index.py`), which ranks write beside
    # its bytes; empty where nothing is saved to disk.
    save_keys: list[tuple[bytes, bytes, bytes]] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(payload: bytes | bytearray | memoryview) -> StepPlan:
    """The plan in `payload`; raises `msgspec.DecodeError` when it is not one."""
    return _decoder.decode(payload)


def as_int32(payload: bytes) -> Int32Array:
    """A read-only view of one of a plan's arrays, without a copy."""
    return np.frombuffer(payload, dtype="<i4")


def to_bytes(values: NDArray[np.integer[Any]] | list[int] | list[tuple[int, int]]) -> bytes:
    """`values`, which fit 32 bits, as little-endian int32 bytes."""
    if isinstance(values, list) and not values:  # most of a plan's arrays, in most steps
        return b""
    return np.asarray(values, dtype="<i4").tobytes()


def plan_alone(context: int, slots: list[int], block_size: int) -> StepPlan:
    """A step of one sequence of `context` tokens, whose last ones go to `slots`: all of them token 0, all read from
    block 0, and its recurrent state in slot 0. The last one is sampled."""
    tokens = len(slots)
    return StepPlan(
        step=0,
        num_decodes=int(tokens == 1),
        token_ids=to_bytes([0] * tokens),
        positions=to_bytes(np.arange(context - tokens, context, dtype=np.int32)),
        slots=to_bytes(slots),
        query_lens=to_bytes([tokens]),
        context_lens=to_bytes([context]),
        block_tables=to_bytes([0] * -(-context // block_size)),
        sample_rows=to_bytes([tokens - 1]),
        state_slots=to_bytes([0]),
    )


class StepLimits(NamedTuple):
    """How large the steps of an engine get, where a backend prepares for them."""

    max_sequences: int
    max_batch_tokens: int
    context_length: int
    graph_memory: int  # bytes that graphs may take; 0: there are none
    batch_invariant: bool = False
    prompt_graphs: bool = False  # whether steps with prompt chunks have graphs too
