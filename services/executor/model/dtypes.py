"""The data type that a model is computed in."""

import torch

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


def pytorch_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What PyTorch computes in where `dtype` would do: fp32 in place of bf16 on processors that do not multiply it,
    where it takes PyTorch hundreds of times as long."""
    return dtype if dtype is not torch.bfloat16 or platform_of(device).has_fast_bf16() else torch.float32


def choose_dtype(
    settings: ExecutorSettings, device: torch.device, config: object, *, by_kernels: bool = True
) -> torch.dtype:
    """bf16, where models need not be exacter, if the native kernels may compute or else PyTorch multiplies it fast;
    `by_kernels`: whether they compute models of this kind at all."""
    wanted = precision(settings.dtype, getattr(config, "dtype", None))
    may_be_native = by_kernels and not why_not() and family_of(getattr(config, "model_type", "")).lowered is not None
    return wanted if may_be_native else pytorch_dtype(wanted, device)


def not_finite() -> ModelLoadError:
    """A model that computes what is no number."""
    return ModelLoadError(
        "The model's weights compute NaN or infinite values; the weights file is damaged, or the data type too narrow: "
        "fetch the model again, or try --dtype fp32."
    )
