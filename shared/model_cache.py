"""Names in the model cache, which the command line fills and executors read: one rule for both."""

import hashlib
from pathlib import Path

from shared.errors import ModelLoadError

_SAMPLE_BYTES = 1 << 20


def pulled_name(name: str) -> str:
    """The directory's name for a model with the (hub) name `name`."""
    return name.replace("/", "--")


def converted_name(gguf: Path) -> str:
    """The directory's name for what a GGUF file is converted into, the same wherever the file lies.

    Made from the file's size, beginning and end. Raises `ModelLoadError`.
    """
    digest = hashlib.sha256()
    try:
        size = gguf.stat().st_size
        with gguf.open("rb") as stream:
            digest.update(str(size).encode() + stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    except FileNotFoundError:
        raise ModelLoadError(f"The GGUF file {gguf} does not exist; check the path.") from None
    except OSError as error:
        raise ModelLoadError(f"The file {gguf} cannot be read ({error.strerror}); check the path.") from None
    return f"{gguf.stem}-{digest.hexdigest()[:12]}"
