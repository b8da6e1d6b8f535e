"""Sums of small tensors between the GPUs of one host through symmetric memory: each rank reads the others' memory.

Decoding sums 64 times a step over a few kilobytes: what counts is how often the ranks wait for each other, and
NCCL's rings and trees wait several times. In memory that all ranks have mapped, they wait twice:

    tensor ──copy──▶ own part of the buffer ──▶ all are there ──▶ read, add ──▶ all have read ──▶ tensor
                          rank 0 │ rank 1 │ ...                    one shot: everything of everybody
                                                                   two shot: one share, written to everybody
                                                                   multimem: the same, added by the switch

    8B model, hidden size 4096 in bf16, 2 sums in each of 32 layers, 4 ranks, 450 GB/s each way (NVLink 4), 5 us for a
    one-shot sum and 12 us for one of NCCL's, both of small messages in a CUDA graph:
        batch   message   one shot moves   takes        64 sums   with NCCL
            1     8 KiB         24 KiB     5.1 us       0.32 ms   0.77 ms
            8    64 KiB        192 KiB     5.4 us       0.35 ms   0.78 ms
           32   256 KiB        768 KiB     6.7 us       0.43 ms   0.82 ms      beside 0.85 ms of reading weights

The 5 and 12 us are estimates until `benchmarks/on_gpu/collective_speed.py` has been run. The operators are PyTorch's
(torch.distributed._symmetric_memory, an alpha interface, hence the fallback at every turn). They add in the order of
the ranks (one shot, two shot) or once for all ranks (multimem_all_reduce_), so all ranks have the same bits; its
one-shot multimem variants promise no order and are not used. `one_shot_all_reduce_copy` would save the copy, but
signals the other ranks before all warps of a block have copied.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from services.executor.collectives.base import Wrapped
from services.executor.collectives.torch_distributed import TorchDistributed
from services.executor.core.gpu_errors import is_gpu_error
from shared.errors import reason_of

log = structlog.get_logger(__name__)

# Of each rank's part: 1024 tokens of a hidden size of 4096. Larger messages fill the links whoever moves them.
BUFFER_BYTES = 8 << 20
TWO_SHOT_BYTES = 1 << 20  # without a switch that adds, NCCL is better at what is larger
# Bytes that reading everything may move more than reading shares: 0.9 us, what the second way of data costs.
ONE_SHOT_MORE = 384 << 10
ONE_SHOT_BYTES = 1 << 20
ALIGNMENT = 16  # bytes that a thread loads at a time
CHECKED = 16 << 10  # numbers of the sums that are tried at the start
DTYPES = (torch.bfloat16, torch.float32)  # what PyTorch's operators add
OPERATORS = ("one_shot_all_reduce_out", "two_shot_all_reduce_", "multimem_all_reduce_")


class Way(Enum):
    NOTHING = "nothing"
    ONE_SHOT = "one shot"
    TWO_SHOT = "two shot"
    MULTIMEM = "multimem"
    NCCL = "nccl"


def choose_way(size: int, dtype: torch.dtype, ranks: int, multicast: bool) -> Way:
    """How to sum `size` bytes of `dtype` over `ranks`: alike on all, since it asks for nothing that differs.
    `multicast`: the switch between them adds."""
    if ranks == 1:
        return Way.NOTHING
    if dtype not in DTYPES or size % ALIGNMENT or not 0 < size <= BUFFER_BYTES:
        return Way.NCCL
    if size <= one_shot_limit(ranks):
        return Way.ONE_SHOT
    if multicast:
        return Way.MULTIMEM
    return Way.TWO_SHOT if size <= TWO_SHOT_BYTES else Way.NCCL


def one_shot_limit(ranks: int) -> int:
    """Bytes of a message up to which one shot is the fastest way.

    One shot moves (n-1) messages to each rank, two shot and multimem at most 2 (n-1)/n: with n = 2 the same, with
    4 it pays up to 256 KiB, with 8 up to 73 KiB.
    """
    more = (ranks - 1) * (ranks - 2) / ranks
    return ONE_SHOT_BYTES if not more else min(ONE_SHOT_BYTES, int(ONE_SHOT_MORE / more))


class Circumstances(NamedTuple):
    ranks: int
    one_host: bool
    operators: bool  # this PyTorch has them
    peers: bool  # every GPU of the ring reads every other's memory


def why_not(found: Circumstances) -> str:
    """Why sums do not go through symmetric memory; empty: they may."""
    if found.ranks == 1:
        return "there is one rank, and nothing to add"
    if not found.one_host:
        return "the ranks are on several hosts"
    if not found.operators:
        return "this PyTorch has no symmetric memory; use 2.11 or newer"
    if not found.peers:
        return "the GPUs cannot read each other's memory (nvidia-smi topo -p2p r shows which)"
    return ""


class SharedSums(Protocol):
    """A buffer that all ranks have mapped, and the operators on it."""

    multicast: bool  # the switch between the GPUs adds

    def run(self, way: Way, tensor: Tensor) -> None:
        """Sums `tensor` (contiguous, at most `BUFFER_BYTES`) in place; `way`: one of the three through the buffer.
        No synchronisation with the host, and nothing that a CUDA graph cannot hold."""
        ...


class TorchSums:
    """`SharedSums` by PyTorch. One stream at a time may use it: its signals are in the buffer."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Called by all ranks together. Raises `RuntimeError` where the driver does not let them."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self._buffer = symmetric_memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self._buffer, group)
        if self._handle is None:  # only a warning tells of it, and the operators end the process
            raise RuntimeError("the buffer is in no symmetric memory")
        self._group = group.group_name
        self._operators: Any = torch.ops.symm_mem
        self.multicast = bool(getattr(self._handle, "multicast_ptr", 0))

    def run(self, way: Way, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        part = self._buffer[: tensor.nbytes].view(tensor.dtype)
        part.copy_(flat)
        if way is Way.ONE_SHOT:
            # The kernel stores ALIGNMENT bytes at a time and looks at the buffer's alignment only.
            out = flat if flat.data_ptr() % ALIGNMENT == 0 else torch.empty_like(flat)
            self._operators.one_shot_all_reduce_out(part, "sum", self._group, out)
            if out is not flat:
                flat.copy_(out)
            return
        sum_ = self._operators.multimem_all_reduce_
        if way is Way.TWO_SHOT:
            sum_ = self._operators.two_shot_all_reduce_
        sum_(part, "sum", self._group)
        flat.copy_(part)


class SymmetricCollectives(Wrapped):
    """Sums go through symmetric memory where that is the faster way, all else through `others`."""

    def __init__(self, others: TorchDistributed, sums: SharedSums | None, multicast: bool = False) -> None:
        """`sums`: none for one rank. `multicast`: what all of them have."""
        super().__init__(others)
        self._others = others
        self._sums = sums
        self._multicast = multicast

    def all_reduce(self, tensor: Tensor) -> Tensor:
        way = choose_way(tensor.nbytes, tensor.dtype, self.world_size, self._multicast)
        if way is Way.NOTHING:
            return tensor
        if way is Way.NCCL or self._sums is None:
            return self._others.all_reduce(tensor)
        with self._others.measured(tensor.device):
            self._sums.run(way, tensor)
        return tensor

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return [tensor] if self.world_size == 1 else self._others.gather_to_leader(tensor, widths)

    def close(self) -> None:
        self._sums = None
        self._others.close()


def with_symmetric_memory(
    others: TorchDistributed,
    device: torch.device,
    one_host: bool,
    look: Callable[[TorchDistributed, torch.device, bool], Circumstances] | None = None,
    make: Callable[[dist.ProcessGroup, torch.device], SharedSums] = TorchSums,
) -> TorchDistributed | SymmetricCollectives:
    """`others` with symmetric memory where all ranks have it, else `others`; says once which, and why. Called by all
    ranks together. `look`, `make`: what asks the machine, and what makes the buffer."""
    reason = why_not((look or circumstances)(others, device, one_host))
    if others.world_size == 1:
        return SymmetricCollectives(others, None)
    sums: SharedSums | None = None
    # The others would wait in the rendezvous for a rank that does not come: all go, or none.
    if _all_agree(others, device, not reason):
        try:
            sums = make(others.group, device)
        except Exception as error:  # an alpha interface: another PyTorch may call it otherwise
            if is_gpu_error(error):
                raise  # the GPU is lost, not only this way of using it
            reason = reason_of(error)
        if not _all_agree(others, device, sums is not None):
            sums = None
    multicast = False
    if sums is not None:
        multicast = _all_agree(others, device, sums.multicast)
        right = adds_up(sums, others, device, multicast)
        if not _all_agree(others, device, right):
            reason = "" if right else "its sums are wrong here"
            sums = None
    if sums is None:
        log.info("all_reduce_by_nccl", reason=reason or "another rank of the ring cannot, see its log")
        return others
    limit = one_shot_limit(others.world_size)
    log.info("all_reduce_in_symmetric_memory", multicast=multicast, one_shot_bytes=limit)
    return SymmetricCollectives(others, sums, multicast)


def adds_up(sums: SharedSums, others: TorchDistributed, device: torch.device, multicast: bool) -> bool:
    """Whether sums that are known come out of each way through the buffer. Called by all ranks together.

    An alpha interface over drivers and switches of many kinds: where it is wrong, it is so without a word.
    """
    some = torch.arange(CHECKED, device=device) % 3 == 0  # small whole numbers, which bf16 has
    whole = others.world_size * (others.world_size + 1) // 2
    found = []
    for way in (Way.ONE_SHOT, Way.MULTIMEM if multicast else Way.TWO_SHOT):
        for dtype in DTYPES:
            tensor = (some * (others.rank + 1)).to(dtype)
            sums.run(way, tensor)
            found.append((tensor == (some * whole).to(dtype)).all())
    return bool(torch.stack(found).all())


def circumstances(others: TorchDistributed, device: torch.device, one_host: bool) -> Circumstances:
    """Those of this machine. The ring's GPUs are the first that this process sees, one for each rank."""
    operators = all(hasattr(torch.ops.symm_mem, name) for name in OPERATORS)
    pairs = permutations(range(others.world_size), 2)
    peers = one_host and all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return Circumstances(others.world_size, one_host, operators, peers)


def _all_agree(others: TorchDistributed, device: torch.device, mine: bool) -> bool:
    against = torch.tensor([0 if mine else 1], dtype=torch.int64, device=device)
    return int(others.all_reduce(against).item()) == 0
