"""What a report asks Prometheus for, on series that promtool makes of a text."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.sla.periods import Interval
from services.cli.sla.prometheus import queries

PROMTOOL = shutil.which("promtool")
SAMPLES = 31  # of the last 300 seconds, one each 10

ROUTE = 'route="/v1/completions",model="m"'
SERIES = {
    'up{job="gateways",instance="a"}': "1x60",
    'ryzanstein_health_groups{state="ready"}': "2x60",
    "ryzanstein_health_writes_total": "1x60",
    'ryzanstein_executor_kv_blocks{model="m",state="used"}': "1x39 stale _x5 1x15",  # down for 6 samples
    'ryzanstein_executor_kv_blocks{model="late",state="used"}': "_x50 1x10",
    f'ryzanstein_gateway_requests_total{{{ROUTE},status="200"}}': "0+1x60",
    f'ryzanstein_gateway_requests_total{{{ROUTE},status="503"}}': "_x45 1x15",  # the first error is one
    'ryzanstein_gateway_requests_total{route="/v1/files",model="",status="200"}': "0+1x60",
}
UP = 1 - 6 / SAMPLES
FOUND: dict[str, dict[str, float]] = {
    "covered": {"{}": SAMPLES},
    "up": {"{}": UP},
    "up_of": {'{model="m"}': UP, '{model="late"}': 1.0},
    "repaired": {"{}": 1.0},
    "repaired_of": {'{model="m"}': 1.0, '{model="late"}': 0.0},
    "requests": {'{model="m", status="200"}': 30.0, '{model="m", status="503"}': 1.0},
    "present": {},
}


@pytest.mark.skipif(PROMTOOL is None, reason="NOT TESTED: no promtool here (Debian's package prometheus)")
def test_queries_find_what_the_series_say(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    asked = queries(Interval(300.0, 600.0), 10.0, "gateways")
    expected: list[dict[str, Any]] = [
        {
            "expr": asked[name],
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in found.items()],
        }
        for name, found in FOUND.items()
    ]
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    tests = [{"interval": "10s", "input_series": series, "promql_expr_test": expected}]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
