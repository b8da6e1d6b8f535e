"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` at the end; after an exception nothing has changed."""
    target = Path(path)
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=target.name, delete=False) as file:
        part = Path(file.name)
        try:
            yield file
        except BaseException:
            part.unlink()
            raise
    part.replace(target)
