"""The weight files of a model directory, whatever their format: named tensors over mapped bytes.

Opening them reads headers alone. A rank then touches the bytes of its own slices only.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.executor.model.mapped_file import MappedFile
from services.executor.model.pytorch_file import map_pytorch
from services.executor.model.safetensors_file import map_safetensors
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class _Format:
    single: str
    """The name of weights that are one file."""
    open: Callable[[Path], MappedFile]

    @property
    def index(self) -> str:
        """The name of the file that says which tensor is in which of several files."""
        return f"{self.single}.index.json"


_FORMATS = (
    _Format("model.safetensors", map_safetensors),
    _Format("pytorch_model.bin", map_pytorch),
)
"""Best first."""
_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")


class WeightFiles:
    """The weights of a directory, open for reading. A context manager."""

    def __init__(self, directory: Path):
        """Opens them. Raises `ModelLoadError` when a file is missing, damaged or of another format."""
        format_, index = _choose(directory)
        self._files: dict[str, MappedFile] = {}
        """Tensor name -> its file."""
        for file in sorted(set(index.values())) if index is not None else [format_.single]:
            mapped = _opened(directory / file, format_)
            # Where two files hold a name, the index says which is meant.
            meant = (name for name in mapped.tensors if index is None or index.get(name, file) == file)
            self._files.update(dict.fromkeys(meant, mapped))
        missing = sorted(name for name in index or () if name not in self._files)
        if missing:
            raise ModelLoadError(
                f"{format_.index} in {directory} names {_some(missing)}, which the weight files do not hold; "
                "fetch the model again."
            )

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {name: tuple(file.tensors[name].shape) for name, file in self._files.items()}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` over its mapped bytes, on the CPU, in the file's dtype. Do not write to it."""
        return self._files[name].tensors[name]

    def copy(self, name: str, view: Tensor, into: Tensor) -> None:
        """Copies `view`, part of the tensor `name`, to `into`, contiguous and of its shape and dtype: in the calling
        thread alone, so that several threads can. Raises `ModelLoadError` where the file cannot be read any more."""
        try:
            self._files[name].copy(view, into)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelLoadError(
                f"The weights of {name} cannot be read ({reason}); check the disk, and that nobody writes to the model."
            ) from error

    def let_go(self, name: str, view: Tensor) -> None:
        """Says that `view`, part of the tensor `name`, has been read and need not stay in this process."""
        self._files[name].let_go(view)

    def close(self) -> None:
        """Lets the files go; tensors handed out keep theirs."""
        for file in set(self._files.values()):
            file.close()
        self._files.clear()


def _choose(directory: Path) -> tuple[_Format, Mapping[str, str] | None]:
    """The format to read, and where it is in several files, tensor name -> file name."""
    for format_ in _FORMATS:
        if (directory / format_.index).is_file():
            return format_, _weight_map(directory / format_.index)
        if (directory / format_.single).is_file():
            return format_, None
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"only {_some(others)}" if others else "no weights"
    names = " or ".join(name for format_ in _FORMATS for name in (format_.single, format_.index))
    raise ModelLoadError(
        f"The model directory {directory} holds {found}, where {names} is needed; "
        "save the model as safetensors (save_pretrained does), or give a .gguf file by its own path."
    )


def _opened(path: Path, format_: _Format) -> MappedFile:
    try:
        return format_.open(path)
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"The weight file {path} is missing, though {format_.index} names it; fetch the model again."
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"The weight file {path} cannot be read ({error.strerror}); check its rights and its disk."
        ) from error
    except ValueError as error:
        raise _damaged(path, error) from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
            raise ValueError("a file name is not plain")
        return dict(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"The weights at {path} cannot be read ({error}); the file is damaged or was not fetched to its end, "
        "fetch the model again."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
