"""The SBOM of a wheel names all that it needs, and that of an image all that the image says it holds."""

import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release import inventory, sbom

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "services/executor/native/_kernels.abi3.so"


def read(bom: Any) -> dict[str, Any]:
    """The document, which is valid."""
    text = sbom.document(bom)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found: dict[str, Any] = json.loads(text)
    return found


def needed() -> set[str]:
    """What `ryzanstein[all]` installs here, by the packages' own metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    served = [line for name in extras.keys() - {"dev", "docs", "clients", "training"} for line in extras[name]]
    waiting = [(one, "") for one in map(Requirement, [*project["dependencies"], *served])]
    names: set[str] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == "ryzanstein" or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        if name not in names or requirement.extras:
            names.add(name)
            asked = map(Requirement, requires(name) or [])
            waiting += [(one, extra) for one in asked for extra in ("", *requirement.extras)]
    return names


@pytest.mark.slow
def test_that_of_a_wheel_names_what_it_needs_with_version_hash_and_licence(tmp_path: Path) -> None:
    path = tmp_path / "ryzanstein-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(KERNELS, b"compiled")
    found = read(sbom.wheel(path))
    assert found == read(sbom.wheel(path)), "the same wheel has the same SBOM"
    components = {one["name"]: one for one in found["components"]}
    assert needed() > {"torch", "uvicorn", "msgspec"}
    assert needed() <= components.keys()
    for name in needed():
        one = components[name]
        assert one["version"] == version(name)
        assert one["licenses"]
        assert one["externalReferences"][0]["hashes"], name
    assert components[KERNELS]["hashes"][0]["content"] == sbom._sha256(b"compiled")
    assert {"marked", "dompurify", "temml"} <= components.keys()
    assert found["metadata"]["component"]["hashes"][0]["content"] == sbom._sha256(path.read_bytes())


@pytest.mark.slow
def test_that_of_an_image_is_what_a_bare_python_finds_there() -> None:
    """The inventory is a script for the image's own Python."""
    script = Path(inventory.__file__).read_text()
    ended = subprocess.run([sys.executable, "-I", "-"], input=script, capture_output=True, text=True, check=True)
    held = json.loads(ended.stdout)
    held["debian"] = [{"package": "libc6", "version": "2.36-9", "architecture": "amd64"}]
    found = read(sbom.image("ryzanstein/cli:1", f"python:3@sha256:{'a' * 64}", held))
    components = {one["name"]: one for one in found["components"]}
    assert components["python:3"]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert components["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9?arch=amd64"
    assert components["msgspec"]["version"] == version("msgspec")


def test_that_of_an_image_without_python_is_its_base() -> None:
    found = read(sbom.image("ryzanstein/nats:1", "nats:2", sbom.EMPTY))
    assert "nats:2" in {one["name"] for one in found["components"]}
