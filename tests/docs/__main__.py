"""`python -m tests.docs`: writes what is made of the code: docs/configuration.md, docs/models.md, and the
folders in docs/architecture.md.

With `--check` it only says whether they are stale; else it prints how many lines of Python there are.
"""

import sys

from tests.docs import configuration, models
from tests.docs.folders import with_folders
from tests.docs.lines import sums
from tests.docs.pages import ROOT

CONFIGURATION = ROOT / "docs" / "configuration.md"
MODELS = ROOT / "docs" / "models.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def main() -> None:
    made = {
        CONFIGURATION: configuration.page(),
        MODELS: models.page(),
        ARCHITECTURE: with_folders(ARCHITECTURE.read_text()),
    }
    if sys.argv[1:] != ["--check"]:
        for path, text in made.items():
            path.write_text(text)
        print(*sums(), sep="\n")
    elif stale := [path.name for path, text in made.items() if path.read_text() != text]:
        sys.exit(f"error: {' and '.join(stale)} in docs/ are stale; run: python -m tests.docs")


if __name__ == "__main__":
    main()
