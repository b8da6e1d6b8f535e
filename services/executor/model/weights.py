"""The weight files of a model directory: which tensors there are, and slices of them.

safetensors files are mapped, never read whole: a rank touches the bytes of its own slices only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.model.layers import TensorSlice
from shared.errors import ModelLoadError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")


class WeightFiles:
    """The safetensors files of a directory, open for reading. A context manager."""

    def __init__(self, directory: Path):
        """Opens them. Raises `ModelLoadError` when a file is missing, damaged or of another format."""
        self._directory = directory
        self._handles: dict[Path, Any] = {}
        self._slices: dict[str, Any] = {}
        expected = _weight_map(directory)
        try:
            for path in _files(directory, expected):
                self._open(path)
        except BaseException:
            self.close()
            raise
        missing = sorted(set(expected or ()) - self.names)
        if missing:
            raise ModelLoadError(
                f"{_INDEX} in {directory} names {_some(missing)}, which the weight files do not hold; "
                "fetch the model again."
            )

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def names(self) -> set[str]:
        return set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def read(self, name: str, piece: TensorSlice | None) -> Tensor:
        """`piece` of tensor `name` (None: all of it), in the file's dtype, on the CPU."""
        try:
            tensor: Tensor
            if piece is None:
                tensor = self._slices[name][...]
            else:
                lead = (slice(None),) * piece.dim
                stored = self._slices[name]
                parts = [stored[(*lead, slice(span.start, span.stop))] for span in piece.spans]
                tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=piece.dim)
        except (SafetensorError, OSError) as error:
            raise _damaged(self._directory / name, error) from error
        return tensor

    def close(self) -> None:
        self._slices.clear()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.__exit__(None, None, None)

    def _open(self, path: Path) -> None:
        try:
            handle: Any = safe_open(str(path), framework="pt", device="cpu")
            self._handles[path] = handle.__enter__()
            names: list[str] = handle.keys()
            self._slices.update({name: handle.get_slice(name) for name in names})
        except FileNotFoundError as error:
            raise ModelLoadError(
                f"The weight file {path} is missing, though {_INDEX} names it; fetch the model again."
            ) from error
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error


def _files(directory: Path, expected: Mapping[str, str] | None) -> list[Path]:
    if expected is not None:
        return [directory / name for name in sorted(set(expected.values()))]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"only {_some(others)}" if others else "no weights"
    raise ModelLoadError(
        f"The model directory {directory} holds {found}, where {_SINGLE} or {_INDEX} is needed; "
        "save the model as safetensors (save_pretrained does), or give a .gguf file by its own path."
    )


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None where the weights are one file."""
    path = directory / _INDEX
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
            raise ValueError("a file name is not plain")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return dict(names)


def _damaged(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"The weights at {path} cannot be read ({error}); the file is damaged or was not fetched to its end, "
        "fetch the model again."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
