"""A file of torch.save as tensors over its mapped bytes. What it pickles is data only; code is refused."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.executor.model.mapped_file import MappedFile
from shared.errors import ModelLoadError

_GLOBAL = re.compile(r"GLOBAL (\w+(?:\.\w+)+)")
"""How torch's reader names what a pickle would import."""


def map_pytorch(path: Path) -> MappedFile:
    """The tensors of `path`.

    Raises `OSError` where the file cannot be opened, `ValueError`, with the reason, where it is not whole,
    and `ModelLoadError` where it holds code or something else than named tensors.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        code = _GLOBAL.search(str(error))
        if code is None:
            raise ValueError("its description of the tensors makes no sense") from error
        raise ModelLoadError(
            f"The weight file {path} holds {code.group(1)}, which is code, and code in weights is never run; "
            "use weights saved as safetensors."
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        if "_use_new_zipfile_serialization" in str(error) and path.stat().st_size:
            raise ModelLoadError(
                f"The weight file {path} is not in the zip format of torch 1.6 and later, so it is damaged or "
                "older; fetch it again, or load and save it once with a newer torch."
            ) from error
        raise ValueError(str(error).strip().splitlines()[0].rstrip(".")) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in content.items()
    ):
        raise ModelLoadError(
            f"The weight file {path} holds something else than named tensors; "
            "save the model's state_dict, or use safetensors weights."
        )
    return MappedFile({name: value.detach() for name, value in content.items()})


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
