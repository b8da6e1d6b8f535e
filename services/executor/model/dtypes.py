"""The data type that a model is computed in."""

from weakref import WeakKeyDictionary

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.families.registry import family_of
from services.executor.native.library import why_not
from services.executor.platforms.catalog import platform_of
from shared.data_types import DType
from shared.errors import ModelLoadError


def precision(asked: DType, stored: object) -> torch.dtype:
    """How exactly a model is to be computed: as `--dtype` says; `auto`: fp32 where it is `stored` so, else bf16."""
    if asked == "auto":
        return torch.float32 if stored in (torch.float32, "float32") else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]


def pytorch_dtype(dtype: torch.dtype, device: torch.device, collectives: Collectives | None = None) -> torch.dtype:
    """What PyTorch computes in where `dtype` would do: fp32 in place of bf16 on processors that do not multiply it,
    where it takes PyTorch hundreds of times as long. `collectives`: of a ring that may have agreed on it."""
    fast = _agreed.get(collectives) if collectives is not None else None
    fast = platform_of(device).has_fast_bf16() if fast is None else fast
    return dtype if dtype is not torch.bfloat16 or fast else torch.float32


# Whether all ranks of a ring multiply bf16, by the collectives of each.
_agreed: "WeakKeyDictionary[Collectives, bool]" = WeakKeyDictionary()


def agree_on_bf16(device: torch.device, collectives: Collectives) -> None:
    """To be called by each rank of a ring before it loads anything: ranks add what they compute, so all do it in one
    type, and a ring's hosts may have processors of several kinds."""
    slow = torch.tensor([int(not platform_of(device).has_fast_bf16())], device=device)
    _agreed[collectives] = not int(collectives.all_reduce(slow))


def choose_dtype(
    settings: ExecutorSettings,
    device: torch.device,
    config: object,
    collectives: Collectives | None = None,
    *,
    by_kernels: bool = True,
) -> torch.dtype:
    """bf16, where models need not be exacter, if the native kernels may compute or else PyTorch multiplies it fast;
    `by_kernels`: whether they compute models of this kind at all; `collectives`: as of `pytorch_dtype`."""
    wanted = precision(settings.dtype, getattr(config, "dtype", None))
    may_be_native = by_kernels and not why_not() and family_of(getattr(config, "model_type", "")).lowered is not None
    return wanted if may_be_native else pytorch_dtype(wanted, device, collectives)


def not_finite() -> ModelLoadError:
    """A model that computes what is no number."""
    return ModelLoadError(
        "The model's weights compute NaN or infinite values; the weights file is damaged, or the data type too narrow: "
        "fetch the model again, or try --dtype fp32."
    )
