"""The data type that a model is computed in."""

import torch

from services.executor.core.settings import ExecutorSettings
from services.executor.families.registry import family_of
from services.executor.native.library import why_not
from services.executor.platforms.catalog import platform_of
from shared.errors import ModelLoadError


def choose_dtype(settings: ExecutorSettings, device: torch.device, config: object) -> torch.dtype:
    """`auto`: for models stored in 16 bits, bf16 on GPUs, on CPUs that multiply it natively, and where the native
    kernels may compute; else fp32."""
    if settings.dtype != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype]
    stored = getattr(config, "dtype", None)
    if stored in (torch.float32, "float32"):
        return torch.float32
    may_be_native = not why_not() and family_of(getattr(config, "model_type", "")).lowered is not None
    return torch.bfloat16 if platform_of(device).has_fast_bf16() or may_be_native else torch.float32


def not_finite() -> ModelLoadError:
    """A model that computes what is no number."""
    return ModelLoadError(
        "The model's weights compute NaN or infinite values; the weights file is damaged, or the data type too narrow: "
        "fetch the model again, or try --dtype fp32."
    )
