"""What an environment holds, as JSON: Python packages, our own shared libraries, and Debian's packages.

Of the standard library alone, for it runs in images too: docker run --interactive ... python3 - < inventory.py
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

OURS = "ryzanstein"
DPKG = Path("/var/lib/dpkg/status")


def normal(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def license_of(package: Distribution) -> str:
    """An SPDX expression where its metadata has one, else what they have instead."""
    metadata = package.metadata
    said = metadata["License-Expression"] or metadata["License"] or ""
    if said and "\n" not in said and said != "UNKNOWN":
        return str(said)
    listed = [one for one in metadata.get_all("Classifier") or [] if one.startswith("License :: ")]
    return " OR ".join(one.rpartition(" :: ")[2] for one in listed)


def requires(package: Distribution, extras: set[str]) -> list[str]:
    """Names of what it depends on anywhere, with these extras of it."""
    lines = [(one, re.search(r"extra == ['\"]([\w.-]+)", one)) for one in package.requires or []]
    asked = [one for one, extra in lines if extra is None or normal(extra[1]) in extras]
    return [normal(re.split(r"[^\w.-]", one)[0]) for one in asked]


def extras_asked(packages: Iterable[Distribution]) -> dict[str, set[str]]:
    """Extras by the package that any other asks them of."""
    asked: dict[str, set[str]] = {}
    for line in (line for package in packages for line in package.requires or []):
        if match := re.match(r"([\w.-]+) *\[([^]]+)\]", line):
            asked.setdefault(normal(match[1]), set()).update(normal(one.strip()) for one in match[2].split(","))
    return asked


def libraries(package: Distribution) -> dict[str, str]:
    """SHA-256 of its shared libraries, by their paths in it."""
    paths = {str(path): Path(str(path.locate())) for path in package.files or [] if path.suffix == ".so"}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(paths.items())}


def debian() -> list[dict[str, str]]:
    """Of a Debian image; [] elsewhere."""
    text = DPKG.read_text() if DPKG.exists() else ""
    fields = [dict(re.findall(r"^([\w-]+): (.*)$", one, re.MULTILINE)) for one in text.split("\n\n")]
    wanted = ("Package", "Version", "Architecture")
    return [
        {name.lower(): one[name] for name in wanted} for one in fields if "installed" in one.get("Status", "").split()
    ]


def inventory() -> dict[str, Any]:
    found = {normal(package.metadata["Name"]): package for package in distributions()}
    extras = extras_asked(found.values())
    return {
        "python": {
            name: {
                "version": one.version,
                "license": license_of(one),
                "requires": requires(one, extras.get(name, set())),
            }
            for name, one in sorted(found.items())
            if name != OURS
        },
        "libraries": libraries(found[OURS]) if OURS in found else {},
        "debian": debian(),
    }


if __name__ == "__main__":
    json.dump(inventory(), sys.stdout)
