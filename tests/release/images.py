"""`make pin-images`: others' images by digest, as the registries have their tags now, wherever they are named."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# All that name an image which is not ours.
FILES = ("Dockerfile", "compose/.env", "k8s/base/nats/statefulset.yaml", "k8s/components/monitoring/nats-exporter.yaml")
_NAMED = re.compile(
    r"^(?P<before>(?:ARG )?\w+_IMAGE=|\s+image: )(?P<name>[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?$",
    re.MULTILINE,
)


def images() -> Iterator[tuple[str, str, str]]:
    """(file, name and tag, digest with its @ or nothing)."""
    for file in FILES:
        for named in _NAMED.finditer((ROOT / file).read_text()):
            if not named["name"].startswith("ryzanstein/"):
                yield file, named["name"], named["digest"] or ""


def with_digests(text: str, digests: dict[str, str]) -> str:
    """`digests`: sha256:... by name and tag."""
    return _NAMED.sub(
        lambda named: (
            f"{named['before']}{named['name']}@{digests[named['name']]}" if named["name"] in digests else named[0]
        ),
        text,
    )


def digest_of(name: str) -> str:
    """Of the image for all its platforms, as its registry says. Exits where it does not say."""
    command = ["docker", "buildx", "imagetools", "inspect", name, "--format", "{{.Manifest.Digest}}"]
    try:
        asked = subprocess.run(command, text=True, capture_output=True)
    except FileNotFoundError:
        sys.exit("error: There is no `docker` on the path; install it with its plugin buildx.")
    if asked.returncode:
        reason = asked.stderr.strip().partition("\n")[0]
        sys.exit(f"error: docker cannot tell the digest of {name} ({reason}); is its registry reached from here?")
    return asked.stdout.strip()


def main() -> None:
    digests = {name: digest_of(name) for name in sorted({name for _, name, _ in images()})}
    for file in FILES:
        path = ROOT / file
        path.write_text(with_digests(path.read_text(), digests))


if __name__ == "__main__":
    main()
