"""The processes that train side by side on a host's CPUs where its ranks serve the base so: tensor parallelism.

    executor ──▶ rank 0, the trainer ──its specification──▶ rank 1, rank 2, ...        which end with it
                    └────────── sums in shared memory ──────────┘

Each has its share of the base, as a rank that serves it. All compute the same steps over the same batches, with all of
the factors, of which a linear uses what its share needs. Rank 0 alone hears the executor and writes. All of them are
suspended for interactive requests together: they are one process group.

What ranks have of a gradient are parts, whose sum it is: the output layer begins with those of its tokens, every linear
hands back those of its share, and a sum over the ranks hands the sum of the parts back. So Megatron's two operators are
one, and whatever a model computes on all ranks alike is right without knowing of it.

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank, Wrapped
from services.executor.collectives.shared_memory import SharedArea, SharedMemory, can_share_memory, make_area
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.ipc.trainer_pipe import TrainerSpec
from services.executor.model.loading.config_file import load_config
from shared.errors import ConfigurationError

# Seconds that one may wait for another: they are suspended together, for as long as a host is busy, and their clocks
# go on meanwhile. The end of one is noticed at once.
WAIT_WITHIN = 30 * 86400.0
COMMAND = [sys.executable, "-m", "services.executor.training"]  # with the descriptor of its events

log = structlog.get_logger(__name__)


def join_ranks(spec: TrainerSpec, settings: ExecutorSettings, device: torch.device, events_fd: int) -> Collectives:
    """Of rank 0, which starts the others, and of these. One process has nobody to meet.

    Raises `RingLost` where one has gone, which has told the reason itself.
    """
    if spec.rank:
        return _joined(SharedMemory(SharedArea.open(spec.ring), spec.rank, spec.ranks, timeout=WAIT_WITHIN))
    ranks = _how_many(spec, settings, device)
    if ranks == 1:
        return SingleRank()
    area = make_area(ranks, lanes=1)
    ring = SharedMemory(area, 0, ranks, timeout=WAIT_WITHIN)
    for rank in range(1, ranks):
        other = msgspec.structs.replace(spec, rank=rank, ranks=ranks, ring=area.path)
        process = subprocess.Popen(  # noqa: S603  # our own module
            [*COMMAND, str(events_fd)], stdin=subprocess.PIPE, pass_fds=(events_fd,), bufsize=0
        )
        threading.Thread(target=_watch, args=(process, other, ring), name=f"rank {rank}", daemon=True).start()
    log.info("training_ranks_started", ranks=ranks)
    return _joined(ring)


def _how_many(spec: TrainerSpec, settings: ExecutorSettings, device: torch.device) -> int:
    """As many as serve the base, or one."""
    if settings.tp == 1:
        return 1
    reason = ""
    if device.type != "cpu":
        reason = "a fine-tuning job has one GPU"
    elif spec.job.hyperparameters.replicas > 1:
        reason = "each replica of a job is one process"
    elif not can_share_memory():
        reason = "there are no collectives in shared memory here"
    else:
        try:
            ShardLayout.from_config(load_config(Path(spec.model_directory)), settings.tp, 0)
        except ConfigurationError as error:
            reason = str(error)
    if reason:
        log.warning("trained_by_one_process", tp=settings.tp, reason=reason)
    return 1 if reason else settings.tp


def _joined(ring: SharedMemory) -> Collectives:
    ring.meet(WAIT_WITHIN)
    return WithGradients(ring)


def _watch(process: "subprocess.Popen[bytes]", spec: TrainerSpec, ring: SharedMemory) -> None:
    """Its standard input stays open as long as this process lives. It ends before this one only where it fails."""
    assert process.stdin is not None, "it is a pipe"
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
    except OSError:
        process.kill()
    process.wait()
    ring.abort()


class WithGradients(Wrapped):
    """Sums through which gradients go."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return self._inner.all_reduce(tensor)
        summed: Tensor = _Sum.apply(tensor, self._inner)  # type: ignore[no-untyped-call]
        return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, inner: Collectives) -> Tensor:
        ctx.inner = inner
        return inner.all_reduce(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        inner: Collectives = ctx.inner
        return inner.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None
