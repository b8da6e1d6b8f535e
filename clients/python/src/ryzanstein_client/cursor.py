"""Where a reader stands in a generation."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ryzanstein_client.files import replacing


@dataclass(frozen=True, slots=True)
class Cursor:
    """A generation, and the id of the last event of it that is here. Whoever has it can go on, in any process."""

    generation: str
    """As the server's chunks name it: `chatcmpl-...` or `cmpl-...`."""
    position: str = ""
    """Empty: nothing has been read; the stream comes from its beginning."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Replaces the file at once or not at all."""
        with replacing(path) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Cursor":
        """Raises `OSError`, and `ValueError` when the file is not one that `save` wrote."""
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict) or set(found) != {"generation", "position"}:
            raise ValueError(f"{os.fspath(path)!r} is not a saved cursor.")
        return cls(str(found["generation"]), str(found["position"]))
