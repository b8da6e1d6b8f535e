"""CHANGELOG.md: what is unreleased becomes a release, and a release's notes are its part of it. Pure but for `main`.

python -m tests.release.changelog cut 0.1.0 2026-12-01    the part "Unreleased" is that release; a new one begins
python -m tests.release.changelog notes 0.1.0 [URL]       prints the release's part, with links below URL
"""

import argparse
import re
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
UNRELEASED = "## Unreleased"
_NOTHING = "Nothing yet.\n"


def cut(text: str, version: str, day: str) -> str:
    """Raises ValueError where there is nothing to release, or that version is there already."""
    if re.search(rf"^## {re.escape(version)}\b", text, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has a part for {version} already")
    if part(text, "Unreleased").strip() in ("", _NOTHING.strip()):
        raise ValueError("CHANGELOG.md says that nothing has changed since the last release")
    return text.replace(UNRELEASED, f"{UNRELEASED}\n{_NOTHING}\n## {version} - {day}", 1)


def part(text: str, name: str) -> str:
    """What stands under the heading that begins with `name`, up to the next one. Raises ValueError."""
    found = re.search(rf"^## {re.escape(name)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no part {name!r}")
    return found[1].strip() + "\n"


def notes(text: str, version: str, url: str = "") -> str:
    """The part of a release; with `url`, its relative links lead there."""
    body = part(text, version)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({url.rstrip('/')}/\1)", body) if url else body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cut", "notes"))
    parser.add_argument("version")
    parser.add_argument("more", nargs="?", default="", help="cut: the day; notes: the address of the files.")
    given = parser.parse_args()
    text = CHANGELOG.read_text()
    try:
        if given.what == "cut":
            CHANGELOG.write_text(cut(text, given.version, given.more))
        else:
            print(notes(text, given.version, given.more), end="")
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
