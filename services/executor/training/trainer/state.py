"""The state that a job goes on from after any interruption: a safetensors file that appears whole or not at all.

    factor/<target>/a|b      float32
    moment/<target>/a|b/...  what the optimizer remembers
    metrics                  uint8: the steps so far, in MessagePack
    metadata                 job, step, and a fingerprint of everything that the result depends on

Nothing random is in it: what is drawn follows from the job's seed and the step.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import InternalError, StorageFull, reason_of
from shared.messages.training import TrainingJob, TrainingMetrics

_FORMAT = "1"
_FACTOR, _MOMENT, _METRICS = "factor/", "moment/", "metrics"
_metrics = msgspec.msgpack.Decoder(list[TrainingMetrics])


@dataclass(frozen=True)
class SavedState:
    step: int
    factors: Mapping[str, Tensor]  # by `<target>/a` and `<target>/b`
    moments: Mapping[str, Tensor]  # as `FactorOptimizer.moments` gives them
    metrics: list[TrainingMetrics]  # of all steps so far


def fingerprint(job: TrainingJob, threads: int, examples: bytes) -> str:
    """Of all that decides on a job's result: BLAKE2b, 32 bytes in hexadecimal."""
    digest = hashlib.blake2b(digest_size=32)
    settled = (job.model, job.base and job.base.source, job.base and job.base.revision, job.method, job.seed)
    digest.update(msgspec.msgpack.encode((settled, msgspec.structs.astuple(job.hyperparameters), threads)))
    digest.update(examples)
    return digest.hexdigest()


def write_state(path: Path, job: str, fingerprint: str, state: SavedState) -> tuple[int, str]:
    """Returns the file's bytes and digest (BLAKE2b, 32 bytes in hexadecimal). Raises `StorageFull`."""
    encoded = bytearray(msgspec.msgpack.encode(state.metrics))
    tensors = {_METRICS: torch.frombuffer(encoded, dtype=torch.uint8)}
    tensors |= {_FACTOR + name: factor.detach().contiguous() for name, factor in state.factors.items()}
    tensors |= {_MOMENT + name: moment for name, moment in _apart(state.moments).items()}
    about = {"format": _FORMAT, "job": job, "step": str(state.step), "fingerprint": fingerprint}
    unfinished = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, unfinished, about)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        size = unfinished.stat().st_size
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise no_room(path, error) from None
    return size, digest


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own, which a file of tensors asks for: bitsandbytes has one table for all moments."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        apart[name] = tensor.clone() if shared else tensor.contiguous()
    return apart


def no_room(path: Path, error: BaseException) -> StorageFull:
    return StorageFull(
        f"{path} cannot be written ({reason_of(error)}); make room on that disk: the job goes on from its last state."
    )


def read_state(path: Path, job: str, fingerprint: str, device: torch.device) -> SavedState:
    """What `write_state` has written, for the same job. Raises `InternalError` where it is another's or damaged."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = file.metadata() or {}
            _check(about, path, job, fingerprint)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metrics = _metrics.decode(tensors.pop(_METRICS).cpu().numpy().tobytes())
        step = int(about["step"])
    except (OSError, SafetensorError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise InternalError(
            f"The state {path.name} of the job {job} is damaged ({reason_of(error)}); create the job again."
        ) from None
    if step != len(metrics):
        raise InternalError(
            f"The state {path.name} of the job {job} has metrics of {len(metrics)} steps and not of {step}."
        )
    return SavedState(step, _below(_FACTOR, tensors), _below(_MOMENT, tensors), metrics)


def _check(about: Mapping[str, str], path: Path, job: str, fingerprint: str) -> None:
    if about.get("format") != _FORMAT:
        raise InternalError(
            f"The state {path.name} is of format {about.get('format')}, and {_FORMAT} is read; the version of "
            "Ryzanstein that wrote it goes on with it."
        )
    if about.get("job") != job:
        raise InternalError(f"The state {path.name} is of the job {about.get('job')}, and not of {job}.")
    if about.get("fingerprint") != fingerprint:
        raise InternalError(
            f"The state {path.name} of the job {job} was made with other examples, hyperparameters or threads than it "
            "has now; create the job again."
        )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
