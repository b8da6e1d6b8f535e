"""What an environment holds, as JSON: Python packages, our own shared libraries, and Debian's packages.

Of the standard library alone, for it runs in images too: docker run --interactive ... python3 - < inventory.py
"""

import hashlib
import json
import re
import sys
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


def requires(package: Distribution) -> list[str]:
    """Names of what it depends on anywhere, without what its extras add."""
    asked = [one for one in package.requires or [] if "extra ==" not in one]
    return [normal(re.split(r"[^\w.-]", one)[0]) for one in asked]


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
        {name.lower(): one[name] for name in wanted}
        for one in fields
        if "installed" in one.get("Status", "").split()
    ]


def inventory() -> dict[str, Any]:
    found = {normal(package.metadata["Name"]): package for package in distributions()}
    return {
        "python": {
            name: {"version": one.version, "license": license_of(one), "requires": requires(one)}
            for name, one in sorted(found.items())
            if name != OURS
        },
        "libraries": libraries(found[OURS]) if OURS in found else {},
        "debian": debian(),
    }


if __name__ == "__main__":
    json.dump(inventory(), sys.stdout)
