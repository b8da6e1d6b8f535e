"""How the ranks of a ring find each other: the plan channel, and the collectives under them.

    leader     listens ──▶ announces where ──▶ waits for all ──┬─▶ (plan sender, collectives)
    follower                 is told where ──▶ connects      ──┴─▶ (plan receiver, collectives)

The leader chooses the collectives; its announcement tells the others. On CPU the ranks share memory and torch's process
group is not started at all, where they are on one host; on several (`supervisor/multinode/`) they use gloo. GPUs use
NCCL, and for small sums between those of one host symmetric memory. Collectives write down what they do in the flight
recorder, for whoever looks into a ring that hangs in one.
"""

import ctypes
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank, Wrapped
from services.executor.collectives.shared_memory import SharedArea, SharedMemory, can_share_memory, make_area
from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.core.spans import span
from services.executor.ipc.flight_recorder import CollectiveKind, RankRecorder
from services.executor.ipc.plan_channel import PlanListener, PlanReceiver, PlanSender
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.platforms.base import Platform
from services.executor.platforms.catalog import PLATFORMS, platform_of
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def recorded(collectives: Collectives, recorder: RankRecorder) -> Collectives:
    """The same collectives. Those in shared memory write themselves, also where native code calls them."""
    if isinstance(collectives, SharedMemory):
        collectives.show(recorder.collective)
        return collectives
    return collectives if collectives.world_size == 1 else RecordedCollectives(collectives, recorder)


class RecordedCollectives(Wrapped):
    """On GPUs an operation counts as over when it is queued."""

    def __init__(self, inner: Collectives, recorder: RankRecorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._recorder.enter(CollectiveKind.ALL_REDUCE, tensor.nbytes)
        with span("communicate: all_reduce"):
            result = self._inner.all_reduce(tensor)
        self._recorder.leave()
        return result

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        self._recorder.enter(CollectiveKind.GATHER, tensor.nbytes)
        with span("communicate: gather"):
            result = self._inner.gather_to_leader(tensor, widths)
        self._recorder.leave()
        return result

    def barrier(self) -> None:
        self._recorder.enter(CollectiveKind.BARRIER, 0)
        with span("communicate: barrier"):
            self._inner.barrier()
        self._recorder.leave()


JOIN_TIMEOUT = 120.0
_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
Announce = Callable[[Rendezvous], None]


def choose_backend(setting: str, platform: Platform, can_share: Callable[[], bool]) -> str:
    """ "shm", "gloo" or "nccl". Raises `ConfigurationError` for what the platform cannot do."""
    if setting == "auto":
        first = platform.collectives[0]
        return "gloo" if first == "shm" and not can_share() else first
    if setting not in platform.collectives:
        needed = " and ".join(one.name for one in PLATFORMS if setting in one.collectives)
        raise ConfigurationError(
            f"--collectives {setting} works on {needed or 'no platform here'} only and the ring computes on "
            f"{platform.name}; use --collectives auto."
        )
    return setting


def lead(
    settings: ExecutorSettings,
    spec: RankSpec,
    device: torch.device,
    directory: Path,
    announce: Announce,
    draft: Path | None = None,
) -> tuple[PlanSender, Collectives]:
    """Rank 0: announces the ring, with the directories of its model and draft model, and waits for the other ranks. A
    ring of one has nobody to meet.

    Raises `RingLost` when they do not come.
    """
    one_host = settings.nnodes == 1
    if spec.world_size == 1:
        return PlanSender([]), _alone(settings, device)
    backend = choose_backend(settings.collectives, platform_of(device), lambda: one_host and can_share_memory())
    if backend == "shm" and not one_host:
        raise ConfigurationError(
            f"--collectives shm works on one host only and the ring has {settings.nnodes}; use --collectives auto."
        )
    listener = PlanListener(settings.meeting_host)
    place = (settings.meeting_host, listener.port, listener.secret)
    others = spec.world_size - 1
    found = Rendezvous(*place, model_directory=str(directory), draft_directory=str(draft or ""))
    if backend == "shm":
        lanes = thread_count(settings)
        area = make_area(spec.world_size, lanes)
        announce(structs.replace(found, shared_memory=area.path))
        sender = listener.accept(others, JOIN_TIMEOUT)
        return sender, _share(area, spec, lanes)
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it without saying so

    # Our own socket, since the store would listen on every address of the host.
    own = socket.create_server((settings.meeting_host, 0))
    listening = own.dup()
    store = TCPStore(
        settings.meeting_host,
        own.getsockname()[1],
        spec.world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=own.detach(),
    )
    announce(structs.replace(found, store_port=store.port, backend=backend))
    sender = listener.accept(others, JOIN_TIMEOUT)
    collectives = _join(settings, spec, backend, store, device)
    if backend == "gloo":  # NCCL may connect to the store anew, for its watchdog
        refuse_connections(listening)
    listening.close()
    return sender, collectives


def refuse_connections(listening: socket.socket) -> None:
    """Whoever comes to that port from now on hears nothing; connections that stand go on.

    The store has no keys and cannot be told to stop listening. A socket filter (Linux, socket(7)) that lets nothing
    through drops what would open a connection before it is one.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def follow(
    settings: ExecutorSettings, spec: RankSpec, rendezvous: Rendezvous, device: torch.device
) -> tuple[PlanReceiver, Collectives]:
    """Every other rank: goes where the leader said. Raises `RingLost`."""
    receiver = PlanReceiver(rendezvous.host, rendezvous.plan_port, rendezvous.secret, JOIN_TIMEOUT)
    if rendezvous.shared_memory:
        return receiver, _share(SharedArea.open(rendezvous.shared_memory), spec, thread_count(settings))
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(rendezvous.host, rendezvous.store_port, spec.world_size, is_master=False)
    return receiver, _join(settings, spec, rendezvous.backend, store, device)


def _alone(settings: ExecutorSettings, device: torch.device) -> Collectives:
    """A ring of one has nothing to say, unless NCCL is asked for by name: then it says it, as a larger one would."""
    if settings.collectives != "nccl":
        return SingleRank()
    from torch._C._distributed_c10d import HashStore

    from services.executor.collectives.torch_distributed import TorchDistributed

    backend = choose_backend("nccl", platform_of(device), lambda: False)
    return TorchDistributed.join(backend, HashStore(), 0, 1, device)


def _join(
    settings: ExecutorSettings, spec: RankSpec, backend: str, store: "Store", device: torch.device
) -> Collectives:
    """Torch's process group; with `--collectives auto` on GPUs small sums go through symmetric memory."""
    from services.executor.collectives.torch_distributed import TorchDistributed

    collectives = TorchDistributed.join(backend, store, spec.rank, spec.world_size, device)
    if backend != "nccl" or settings.collectives != "auto":
        return collectives
    from services.executor.collectives.symmetric_memory import with_symmetric_memory

    return with_symmetric_memory(collectives, device, settings.nnodes == 1)


def _share(area: SharedArea, spec: RankSpec, lanes: int) -> SharedMemory:
    collectives = SharedMemory(area, spec.rank, spec.world_size, lanes)
    collectives.meet(JOIN_TIMEOUT)
    return collectives
