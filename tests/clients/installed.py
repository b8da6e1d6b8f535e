"""Where clients that nobody here wrote are installed, see `test_clients.py`; a test without its client is skipped."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def python_with(package: str) -> str:
    """An interpreter that has `package`; skips the test where none has."""
    for python in filter(None, os.environ.get("RYZANSTEIN_CLIENTS_PYTHON", "").split(":")):
        asked = [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"]
        if subprocess.run(asked, check=False, capture_output=True).returncode == 0:
            return python
    pytest.skip(f"NOT JUDGED BY {package}: no interpreter in RYZANSTEIN_CLIENTS_PYTHON has it")


def node_with(package: str) -> tuple[str, str]:
    """Node, and a directory with the npm `package`; skips the test where nothing has it."""
    modules = os.environ.get("RYZANSTEIN_CLIENTS_NODE", "")
    node = shutil.which("node")
    if node is None or not modules or not (Path(modules) / "node_modules" / package).is_dir():
        pytest.skip(f"NOT JUDGED BY the {package} npm package: RYZANSTEIN_CLIENTS_NODE names no directory that has it")
    return node, modules
