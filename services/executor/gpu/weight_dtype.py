"""Whether the weights can be kept as `--weight-dtype` says."""

import importlib.util

import torch

from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.settings import WeightDType
from shared.errors import ConfigurationError

_CODECS: dict[WeightDType, Codec | None] = {"auto": None, "bf16": None, "fp8": FP8, "int8": INT8}
_FIRST_WITH_FP8 = (8, 9)
"""Compute capability of the first processors that multiply e4m3 (Ada)."""


def weight_codec(kind: WeightDType, device: torch.device, dtype: torch.dtype) -> Codec | None:
    """How the weights of linear layers are kept; None: as they are computed with, which is `dtype`.

    Raises `ConfigurationError` where `device` cannot multiply by such weights.
    """
    codec = _CODECS[kind]
    if codec is None:
        return None
    if device.type != "cuda":
        raise ConfigurationError(
            f"--weight-dtype {kind} is for GPUs and this rank computes on the CPU; leave it at auto, "
            "or serve on a GPU (--device cuda)."
        )
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"--weight-dtype {kind} computes in bf16 and this model would be served in fp32; give --dtype bf16, "
            "or leave --weight-dtype at auto."
        )
    capability = torch.cuda.get_device_capability(device)
    if codec is FP8 and capability < _FIRST_WITH_FP8:
        raise ConfigurationError(
            f"--weight-dtype fp8 needs a GPU that multiplies fp8 (compute capability 8.9: Ada, Hopper or newer) and "
            f"this one has {capability[0]}.{capability[1]}; use --weight-dtype int8, or leave it at auto."
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError(
            f"--weight-dtype {kind} needs Triton, which is not installed; install the triton that belongs to this "
            "torch, or leave --weight-dtype at auto."
        )
    return codec
