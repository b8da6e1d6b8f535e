"""What the command line's `models list --supported` runs: `python -m services.executor.model.supported`.

Prints one JSON line, `{"result": ...}`, as `services.executor.model.conversion` does, and imports neither PyTorch nor
transformers for it.
"""

import re
import sys

import msgspec

from services.executor.families.family import ModelFamily
from services.executor.families.registry import DECODERS, ENCODERS
from services.executor.model.catalogue import REFUSED, Unsupported
from services.executor.model.states.catalog import STATE_KINDS


class Supported(msgspec.Struct, frozen=True):
    """A served architecture."""

    model_type: str
    title: str
    examples: str
    shown: str
    state: list[str]  # kinds of state that its layers keep


class Catalogue(msgspec.Struct, frozen=True):
    served: list[Supported]
    refused: tuple[Unsupported, ...]


def state_of(row: ModelFamily) -> list[str]:
    """The kinds of state that the layers of an architecture keep; an encoder's keep none."""
    if row.model_type in ENCODERS:
        return []
    named = [("sliding", "sliding"), *(named for kind in STATE_KINDS for named in kind.shown.items())]
    found = list(dict.fromkeys(state for state, words in named if re.search(words, row.shown)))
    instead = {"latent", "compressed"} & set(found)
    return found if instead or row.state_heads else ["full", *found]


def catalogue() -> Catalogue:
    """All architectures, the served ones by title."""
    return Catalogue(
        [
            Supported(name, row.title, row.examples, row.shown, state_of(row))
            for name, row in sorted({**DECODERS, **ENCODERS}.items(), key=lambda item: item[1].title.lower())
        ],
        REFUSED,
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode({"result": catalogue()}).decode() + "\n")
