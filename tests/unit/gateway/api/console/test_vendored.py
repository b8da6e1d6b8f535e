"""The libraries of the console are those that were published, with their licences, and small."""

import hashlib
import json
from pathlib import Path

from services.gateway.api.console import pages

STATIC = Path(pages.__file__).parent / "static"
VENDOR = STATIC / "vendor"
BOUND = 1 << 20  # bytes of all files that the console serves


def test_vendored_files_are_as_published() -> None:
    packages = json.loads((VENDOR / "vendored.json").read_text())["packages"]
    files = {name: file["sha256"] for package in packages for name, file in package["files"].items()}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name not in ("vendored.json", "README.md")
    }
    assert found == files
    for package in packages:
        assert any(name.endswith(".LICENSE") for name in package["files"]), package["name"]


def test_all_that_is_served_is_below_a_mebibyte() -> None:
    sizes = {name: (STATIC / name).stat().st_size for name in (*pages.FILES, *pages.PAGES.values())}
    assert sum(sizes.values()) < BOUND, sizes
    assert not any(name.endswith((".LICENSE", ".json", ".md")) for name in sizes)
