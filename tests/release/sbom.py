"""The SBOM of a wheel or an image, in CycloneDX: what is in it, and what it needs, with versions, hashes and licences.

python -m tests.release.sbom wheel dist/ryzanstein-*.whl > ...        in the environment that has its dependencies
python -m tests.release.sbom image NAME BASE < INVENTORY > ...        of `inventory`, run in the image

The same input gives the same document: its time is SOURCE_DATE_EPOCH, and its number is made of the rest.
"""

import hashlib
import json
import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from tests.release.inventory import inventory, normal
from tests.release.lock import CONSTRAINTS, pins

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VENDORED = ROOT / "services/gateway/api/console/static/vendor/vendored.json"
NOT_SERVING = {"dev", "docs", "clients", "training"}  # extras that no service needs
EMPTY: dict[str, Any] = {"python": {}, "libraries": {}, "debian": []}
_licenses = LicenseFactory()


def bom_of(subject: Component, held: dict[str, Any]) -> Bom:
    """`held`: an inventory."""
    bom = Bom()
    bom.metadata.component = subject
    packages = {name: _package(name, one) for name, one in held["python"].items()}
    others = [
        *(_file(name, sha256) for name, sha256 in held["libraries"].items()),
        *(_vendored(one) for one in json.loads(VENDORED.read_text())["packages"]),
        *(_debian(one) for one in held["debian"]),
    ]
    for component in (*packages.values(), *others):
        bom.components.add(component)
    bom.register_dependency(subject, [*packages.values(), *others])
    for name, component in packages.items():
        needed = [packages[one] for one in held["python"][name]["requires"] if one in packages]
        bom.register_dependency(component, needed)
    return bom


def serving(held: dict[str, Any]) -> dict[str, Any]:
    """The Python packages of an inventory that the services need, at whatever distance."""
    extras = PROJECT["optional-dependencies"]
    lines = [line for name in extras.keys() - NOT_SERVING for line in extras[name]]
    waiting = [normal(re.split(r"[^\w.-]", line)[0]) for line in [*PROJECT["dependencies"], *lines]]
    needed: set[str] = set()
    while waiting:
        if (name := waiting.pop()) in held["python"] and name not in needed:
            needed.add(name)
            waiting += held["python"][name]["requires"]
    return {name: held["python"][name] for name in sorted(needed)}


def wheel(path: Path) -> Bom:
    """Of the wheel and what it needs with the extra `all`, in the versions that this environment has."""
    with zipfile.ZipFile(path) as archive:
        native = {name: _sha256(archive.read(name)) for name in archive.namelist() if name.endswith(".so")}
    held = {**EMPTY, "python": serving(inventory()), "libraries": native}
    return bom_of(_ours(path.name, ComponentType.LIBRARY, [_sha256(path.read_bytes())]), held)


def image(name: str, base: str, held: dict[str, Any]) -> Bom:
    """`base`: the image that it is made from, whose own packages an inventory tells only where it has Python."""
    bom = bom_of(_ours(name, ComponentType.CONTAINER, []), held)
    tagged, _, digest = base.partition("@sha256:")
    bom.components.add(Component(name=tagged, type=ComponentType.CONTAINER, hashes=_hashes([digest] if digest else [])))
    return bom


def document(bom: Bom) -> str:
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    bom.serial_number = uuid5(NAMESPACE_URL, "")
    bom.serial_number = uuid5(NAMESPACE_URL, JsonV1Dot6(bom).output_as_string())
    return JsonV1Dot6(bom).output_as_string(indent=2)


def _ours(name: str, kind: ComponentType, sha256: Iterable[str]) -> Component:
    return Component(
        name=name,
        type=kind,
        bom_ref=name,
        version=PROJECT["version"],
        licenses=[_licenses.make_from_string(PROJECT["license"])],
        hashes=_hashes(sha256),
        purl=PackageURL("pypi", name=PROJECT["name"], version=PROJECT["version"]),
    )


def _package(name: str, one: dict[str, Any]) -> Component:
    """With the hashes of all its files, one of which is installed."""
    public = one["version"].partition("+")[0]
    files = [pin for pin in PINS if normal(pin.requirement.name) == name and pin.version == public]
    hashes = [sha256 for pin in files for sha256 in pin.hashes]
    index = XsUri(f"https://pypi.org/project/{name}/{public}/")
    return Component(
        name=name,
        bom_ref=f"{name}=={one['version']}",
        version=one["version"],
        licenses=[_licenses.make_from_string(one["license"])] if one["license"] else [],
        purl=PackageURL("pypi", name=name, version=one["version"]),
        external_references=[
            ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=index, hashes=_hashes(hashes))
        ],
    )


def _vendored(one: dict[str, Any]) -> Component:
    """A library of the console, as its npm package has it."""
    files = [_file(name, file["sha256"]) for name, file in one["files"].items()]
    return Component(
        name=one["name"],
        bom_ref=f"npm:{one['name']}",
        version=one["version"],
        licenses=[_licenses.make_from_string(one["license"])],
        purl=PackageURL("npm", name=one["name"], version=one["version"]),
        components=files,
    )


def _debian(one: dict[str, str]) -> Component:
    name, version = one["package"], one["version"]
    purl = PackageURL("deb", "debian", name, version, {"arch": one["architecture"]})
    return Component(name=name, bom_ref=f"deb:{name}:{one['architecture']}", version=version, purl=purl)


def _file(name: str, sha256: str) -> Component:
    return Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=_hashes([sha256]))


def _hashes(sha256: Iterable[str]) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=one) for one in sha256]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PINS = pins(CONSTRAINTS.read_text())


def main(kind: str, *arguments: str) -> None:
    if kind == "wheel":
        bom = wheel(Path(arguments[0]))
    else:
        name, base = arguments
        bom = image(name, base, {**EMPTY, **json.load(sys.stdin)})
    print(document(bom))


if __name__ == "__main__":
    main(*sys.argv[1:])
