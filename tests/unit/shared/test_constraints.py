"""The pinned versions that `make install` takes."""

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]


def test_every_pin_installs_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, whose pip refuses a package that asks for a later patch release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (one.version for one in SpecifierSet(project["requires-python"]) if one.operator == ">=")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    refused = {}
    for name in pins:
        try:
            asked = metadata(name)["Requires-Python"]
        except PackageNotFoundError:
            continue  # of another platform
        if asked and not SpecifierSet(asked).contains(f"{oldest}.2"):
            refused[name] = asked
    assert not refused
    assert len(pins) > 50
