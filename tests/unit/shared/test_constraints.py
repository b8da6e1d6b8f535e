"""The pinned versions that `make install` and the images take, and the files that these may be."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.release.lock import CONSTRAINTS, Pin, pins, with_builds_for_cpus

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = pins(CONSTRAINTS.read_text())
NAMES = {canonicalize_name(pin.requirement.name) for pin in PINS}


def test_every_pin_installs_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2, whose pip refuses a package that asks for a later patch release."""
    (oldest,) = (one.version for one in SpecifierSet(PROJECT["requires-python"]) if one.operator == ">=")
    refused = {}
    for name in NAMES:
        try:
            asked = metadata(name)["Requires-Python"]
        except PackageNotFoundError:
            continue  # of another platform
        if asked and not SpecifierSet(asked).contains(f"{oldest}.2"):
            refused[name] = asked
    assert not refused


def test_every_pin_has_the_hashes_of_its_files() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line]
    assert len(PINS) == len(lines) > 50
    assert not [str(pin.requirement) for pin in PINS if not pin.hashes]


def test_whatever_an_extra_asks_for_is_pinned_within_its_range() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *(line for name in extras.keys() - {"all", "clients", "training"} for line in extras[name]),
    ]
    pinned = {canonicalize_name(pin.requirement.name): pin.version for pin in PINS}
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)], prereleases=True)


def test_what_pins_ask_for_is_pinned_too() -> None:
    """Else pip would take the newest one, or refuse all."""
    missing = set()
    for name in NAMES:
        try:
            asked = requires(name) or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, asked):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing |= {canonicalize_name(requirement.name)} - NAMES
    assert not missing


def test_torch_keeps_the_hashes_of_its_builds_for_cpus_while_its_version_stays() -> None:
    before, now, other = Pin("torch==2.0 \\\n --hash=sha256:aa"), Pin("torch==2.0"), Pin("numpy==1.0")
    now.hashes, other.hashes = ["bb"], ["cc"]
    made = with_builds_for_cpus([other, now], [before])
    assert [pin.hashes for pin in made] == [["cc"], ["aa", "bb"]]
    assert str(made[1]) == "torch==2.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"


@pytest.mark.parametrize("path", ["Makefile", "Dockerfile"])
def test_every_package_that_is_installed_is_held_to_the_constraints(path: str) -> None:
    """Others are our own, a wheel or the tree, without what they depend on; or go into environments of their own."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    commands = [one for one in re.findall(r"pip install ([^&|\n]*)", text) if not re.search("termtosvg|twine", one)]
    assert len(commands) > 2
    held = ("--constraint", "--require-hashes", "--no-deps")
    assert not [command for command in commands if not any(option in command for option in held)]


@pytest.mark.parametrize("named", ["hash", "other hash", "nothing"])
def test_pip_takes_files_by_the_hashes_of_constraints(tmp_path: Path, named: str) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("thing-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pin = {"hash": f"thing==1.0 --hash=sha256:{digest}", "other hash": f"thing==1.0 --hash=sha256:{'0' * 64}"}
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"{pin.get(named, '')}\nother==1.0 --hash=sha256:{'0' * 64}\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--isolated",
        "--dry-run",
        "--no-index",
        "--find-links",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [*pip, "--constraint", str(constraints), "thing"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode == 0) == (named == "hash"), ended.stderr
