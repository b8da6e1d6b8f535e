"""The console's modules without a page or a network, in Node's test runner."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NODE = shutil.which("node")


def knows_modules() -> bool:
    """Whether it takes `.js` with `import` for a module (Node 20.19, 22.12 and later)."""
    if NODE is None:
        return False
    script = HERE.parents[4] / "services/gateway/api/console/static/app/stream.js"
    command = [NODE, "--input-type=module", "--eval", f"await import({script.as_uri()!r})"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not knows_modules(), reason="THE CONSOLE'S MODULES ARE NOT TESTED: no node of 20.19 or later here")
@pytest.mark.parametrize("name", ["ahead", "conversation", "markdown", "presets", "stream", "tuning"])
def test_modules(name: str) -> None:
    assert NODE is not None
    command = [NODE, "--test", "--test-reporter=tap", str(HERE / f"{name}.test.mjs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
    assert "# tests 0" not in done.stdout
