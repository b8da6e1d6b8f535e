"""Which tests coverage measures, as `coverage run -m pytest` over a project of two lines that count."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.covered import PARTS, Traced

ROOT = Path(__file__).parents[2]
PROJECT = {
    ".coveragerc": "[run]\nparallel = true\npatch = subprocess, _exit\nsource = .\n",
    "conftest.py": "from tests.covered import Traced\n\ndef pytest_configure(config):\n"
    "    config.addinivalue_line('markers', 'slow: of the other lane')\n"
    "    config.pluginmanager.register(Traced(''))\n",
    "product.py": "def fast():\n    return 2\n\ndef slow():\n    return 5\n\ndef fast_after():\n    return 8\n\n"
    "if __name__ == '__main__':\n    import sys\n    globals()[sys.argv[1]]()\n",
    "here.py": "import pytest\nimport product\n\ndef test_fast():\n    product.fast()\n\n@pytest.mark.slow\n"
    "def test_slow():\n    product.slow()\n\ndef test_after():\n    product.fast_after()\n",
    "processes.py": "import pytest, subprocess, sys\n\ndef start(name):\n"
    "    subprocess.run([sys.executable, 'product.py', name], check=True)\n\ndef test_fast():\n    start('fast')\n\n"
    "@pytest.mark.slow\ndef test_slow():\n    start('slow')\n\ndef test_after():\n    start('fast_after')\n",
    "forks.py": "import os, pytest\nfrom pathlib import Path\nfrom tests.forked import fork\n\ndef start(name):\n"
    "    process = fork('product', [name], {**os.environ}, Path(f'{name}.log'))\n    process._process.join()\n"
    "    assert process.returncode == 0\n\n@pytest.mark.slow\ndef test_slow():\n    start('slow')\n\n"
    "def test_fast():\n    start('fast')\n\ndef test_after():\n    start('fast_after')\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["here", "processes", "forks"])
def test_lines_of_slow_tests_do_not_count(tmp_path: Path, tests: str) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"{tests}.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
    measured = set()
    for file in tmp_path.glob(".coverage.*"):
        data = CoverageData(str(file))
        data.read()
        measured |= set(data.lines(str(tmp_path / "product.py")) or ())
    assert {2, 8} <= measured
    assert 5 not in measured


@pytest.mark.parametrize("name", PARTS["others"].also)
def test_a_part_names_slow_tests_that_alone_run_its_files(name: str) -> None:
    """The others' turn alone traces them."""
    assert (ROOT / name).is_file()

    class Item:
        nodeid = f"{name}::test"

        def get_closest_marker(self, marker: str) -> bool:
            return marker == "slow"

    traced = [part for part in PARTS if Traced(part)._is_traced(Item())]  # type: ignore[arg-type]
    assert traced == ["others"]
