"""`make pictures`: docs/images/console*.png and docs/images/failover.svg, of a real run with SmolLM2.

The screenshots need Chromium; the recording is drawn by termtosvg (PyPI), which has an environment of its own.
"""

import argparse
import asyncio
import subprocess
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT
from tests.docs.pictures.console import photograph
from tests.docs.pictures.failover import record
from tests.e2e.browser import find_chromium
from tests.e2e.stack import Stack

# Milliseconds of a frame, least and most, and at the end.
STYLE = ("-m", "120", "-M", "2000", "-D", "6000", "-t", "window_frame")
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--termtosvg", default="termtosvg", help="the program")
    parser.add_argument("--into", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        parser.error("no chromium here; install it (Debian: chromium) or name one in RYZANSTEIN_TEST_CHROMIUM")
    with tempfile.TemporaryDirectory() as directory:
        with Stack(Path(directory) / "stack", "--replicas", "2", "--no-smoke-test") as stack:
            cast = record(stack, Path(directory))
            asyncio.run(photograph(chromium, stack.url, arguments.into))
        drawn = arguments.into / "failover.svg"
        command = [arguments.termtosvg, "render", str(cast), str(drawn), *STYLE]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
