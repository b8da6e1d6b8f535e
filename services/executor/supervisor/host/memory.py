"""What the groups of a host take of its memory, and whether another one fits. Pure.

    |<───────────────────────── capacity of a device ─────────────────────────>|
    | group a: weights, KV cache, overhead | group b ... | asleep | room        |

A host without GPUs is one device, which all ranks of a group share; of GPUs each rank takes one. What a group is
promised is held until its last process has ended. Weights that sleep are in the host's memory and make way for whatever
is loaded, those that have slept longest first. Jobs (`jobs.py`) have what groups leave, and make way for them: the
latest first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import ModelDoesNotFit

GIB = 1 << 30
# Bytes that a rank takes on a CPU beside weights and KV cache: its process, and what a step computes with.
RANK_OVERHEAD = 96 << 20
GPU_OVERHEAD = 2 * GIB  # on a GPU: CUDA's context, workspaces, graphs, and what a step computes with
# Share of its devices' memory that the KV cache of a group that is loaded at run time may take, unless its entry in
# the registry says how much.
KV_SHARE = 0.25
KV_SEQUENCES = 64  # sequences of full length beyond which that share is not used on a CPU
# How much more than one sequence's a cache must hold: ranks differ by a head, and blocks are whole.
KV_MARGIN = 1.25
LEAST_KV = 16 << 20  # bytes of a cache of a model whose configuration does not tell what a sequence takes


class ModelSize(NamedTuple):
    """What is known of a model before its weights are read, in bytes."""

    weights: int
    sequence: int  # KV cache of one sequence of full length, as it is computed; 0: not known


class Footprint(NamedTuple):
    """What a group takes on all its ranks, in bytes."""

    weights: int
    kv: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.overhead


class MemoryPlacement(NamedTuple):
    footprint: Footprint
    devices: tuple[int, ...]  # GPUs of its ranks, by rank; empty on a CPU
    woken: tuple[str, ...] = ()  # models that sleep no more: their weights have made way
    jobs: tuple[str, ...] = ()  # jobs that must end first, by their keys


class HostMemory:
    """The memory of one host, by group and by model that sleeps."""

    def __init__(self, capacities: Sequence[int], *, gpus: bool, asleep_limit: int = 0) -> None:
        """`capacities`: bytes that groups may take of each device. `asleep_limit`: bytes of host memory for weights
        that sleep, where the devices are GPUs."""
        self._capacities = tuple(capacities)
        self._gpus = gpus
        self._asleep_limit = asleep_limit if gpus else sum(capacities)
        self._held: dict[str, tuple[int, ...]] = {}  # by group: bytes on each device
        self._asleep: dict[str, int] = {}  # by model, the one that has slept longest first
        # By job, in the order of their coming: bytes on each device.
        self._jobs: dict[str, tuple[int, ...]] = {}

    @property
    def total(self) -> int:
        return sum(self._capacities)

    @property
    def used(self) -> int:
        """Bytes of groups; weights that sleep are not among them, since they make way."""
        return sum(map(sum, self._held.values()))

    @property
    def asleep(self) -> int:
        return sum(self._asleep.values())

    @property
    def sleepers(self) -> int:
        """Models that sleep."""
        return len(self._asleep)

    @property
    def devices(self) -> int:
        """GPUs."""
        return len(self._capacities) if self._gpus else 0

    # --- groups ----------------------------------------------------------------------------------

    def place(self, group: str, size: ModelSize, ranks: int, kv: int) -> MemoryPlacement:
        """Promises a new group of `ranks` ranks its memory. `kv`: bytes of its KV caches together; 0: `KV_SHARE` of
        the memory of its devices, or what is left of it. Raises `ModelDoesNotFit`."""
        devices = self._devices_for(ranks)
        capacity = sum(self._capacities[device] for device in devices)
        room = self._room(devices, ranks)
        overhead = ranks * (GPU_OVERHEAD if self._gpus else RANK_OVERHEAD)
        left = room - size.weights - overhead
        footprint = Footprint(size.weights, kv or self._kv(size, capacity, left), overhead)
        if footprint.total > room:
            raise self._refusal(footprint, room, ranks)
        self._held[group] = self._shares(footprint.total, devices)
        woken = () if self._gpus else tuple(self._make_way(self.total - self.used))
        return MemoryPlacement(footprint, tuple(devices) if self._gpus else (), woken, tuple(self._in_the_way()))

    def least(self, size: ModelSize, ranks: int, kv: int) -> int:
        """Bytes that a group takes at least; arguments as of `place`."""
        overhead = ranks * (GPU_OVERHEAD if self._gpus else RANK_OVERHEAD)
        return size.weights + (kv or _least_kv(size)) + overhead

    def hold(self, group: str, size: int, devices: Sequence[int] = ()) -> None:
        """A group that is there anyway takes `size` bytes."""
        on = (devices or range(len(self._capacities))) if self._gpus else (0,)
        self._held[group] = self._shares(size, on)

    def release(self, group: str) -> None:
        """Its processes have ended."""
        self._held.pop(group, None)

    # --- jobs ------------------------------------------------------------------------------------

    def place_job(self, job: str, size: int) -> tuple[int, ...]:
        """Promises a job `size` bytes; returns the GPU that it has, none on a CPU. Raises `ModelDoesNotFit`."""
        device = max(range(len(self._capacities)), key=lambda device: (self._left(device), -device))
        left = max(0, self._left(device))
        if size > left:
            raise ModelDoesNotFit(
                f"The job takes {size} bytes, and its host has {left} of {self.total} left; unload a "
                "model, or choose a smaller rank or shorter examples."
            )
        self._jobs[job] = self._shares(size, (device,))
        return (device,) if self._gpus else ()

    def job_devices(self, job: str) -> tuple[int, ...] | None:
        """As `place_job` has returned it; None: nothing was promised."""
        held = self._jobs.get(job)
        if held is None or not self._gpus:
            return None if held is None else ()
        return tuple(device for device, size in enumerate(held) if size)

    def release_job(self, job: str) -> None:
        """Its process has ended."""
        self._jobs.pop(job, None)

    def _left(self, device: int) -> int:
        return self._free(device) - sum(held[device] for held in self._jobs.values())

    def _in_the_way(self) -> list[str]:
        """Jobs without which groups have all that they are promised, the latest first."""
        going: list[str] = []
        for device in range(len(self._capacities)):
            left = self._left(device) + sum(self._jobs[job][device] for job in going)
            for job in reversed([job for job in self._jobs if job not in going]):
                if left >= 0:
                    break
                if self._jobs[job][device]:
                    left += self._jobs[job][device]
                    going.append(job)
        return going

    def _devices_for(self, ranks: int) -> list[int]:
        """Those with the most room. Raises `ModelDoesNotFit` where there are fewer GPUs than ranks."""
        if not self._gpus:
            return [0]
        if ranks > len(self._capacities):
            raise ModelDoesNotFit(
                f"The model is to have {ranks} ranks, and its host has {len(self._capacities)} GPUs; set its tp to "
                "that or less."
            )
        by_room = sorted(range(len(self._capacities)), key=lambda device: (-self._free(device), device))
        return sorted(by_room[:ranks])

    def _room(self, devices: Sequence[int], ranks: int) -> int:
        """Bytes that a group may have there: its ranks take the same each."""
        least = min(self._free(device) for device in devices)
        return max(0, least * ranks if self._gpus else least)

    def _free(self, device: int) -> int:
        return self._capacities[device] - sum(held[device] for held in self._held.values())

    def _kv(self, size: ModelSize, capacity: int, left: int) -> int:
        least = _least_kv(size)
        wanted = int(capacity * KV_SHARE)
        if size.sequence and not self._gpus:
            wanted = min(wanted, KV_SEQUENCES * size.sequence)
        return max(least, min(wanted, left))

    def _shares(self, size: int, devices: Sequence[int]) -> tuple[int, ...]:
        each = -(-size // len(devices))
        return tuple(each if device in devices else 0 for device in range(len(self._capacities)))

    def _refusal(self, footprint: Footprint, room: int, ranks: int) -> ModelDoesNotFit:
        where = f"the {ranks} emptiest of its host's {self.devices} GPUs" if self._gpus else "its host"
        return ModelDoesNotFit(
            f"The model takes {footprint.total} bytes ({footprint.weights} for weights, {footprint.kv} for the KV "
            f"cache, {footprint.overhead} beside them), and {where} has {room} of {self.total} left; unload another "
            "model, or set a smaller kv_memory or context_length."
        )

    # --- sleep -----------------------------------------------------------------------------------

    def put_to_sleep(self, model: str, size: int) -> list[str] | None:
        """The weights of `model`, `size` bytes, stay in the host's memory; returns the models that make way for them.
        None: there is no room however many do."""
        self._asleep.pop(model, None)
        room = self._asleep_limit - (0 if self._gpus else self.used)
        if size > room:
            return None
        woken = self._make_way(room - size)
        self._asleep[model] = size
        return woken

    def wake(self, model: str) -> None:
        self._asleep.pop(model, None)

    def _make_way(self, limit: int) -> list[str]:
        """Until what sleeps takes `limit` bytes at most."""
        gone = []
        while self._asleep and self.asleep > limit:
            gone.append(next(iter(self._asleep)))
            del self._asleep[gone[-1]]
        return gone


def _least_kv(size: ModelSize) -> int:
    return int(size.sequence * KV_MARGIN) or LEAST_KV
