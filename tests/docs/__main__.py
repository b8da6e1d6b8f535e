"""`python -m tests.docs`: writes docs/configuration.md. With `--check` it only says whether the page is stale."""

import sys
from pathlib import Path

from tests.docs.configuration import page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def main() -> None:
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("error: docs/configuration.md is stale; run: python -m tests.docs")


if __name__ == "__main__":
    main()
