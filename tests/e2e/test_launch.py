"""`ryzanstein launch` where no stack runs: it starts one, and ends it with the client."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLIENT = """#!/bin/sh
exec {python} - <<'END'
import json, os, urllib.request
body = {{"model": os.environ["OPENAI_MODEL"], "messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 4}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {{"content-type": "application/json"}},
)
answer = json.load(urllib.request.urlopen(request))
print("tokens", answer["usage"]["completion_tokens"])
END
"""


def test_a_stack_is_started_for_a_client_and_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "qwen"
    program.parent.mkdir()
    program.write_text(CLIENT.format(python=sys.executable))
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "launch", "qwen-code", "--data-dir", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "No stack runs here; starting one" in done.stdout
    assert "qwen-code needs a context of some 24,000 tokens" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "tokens 4"
    log = (tmp_path / "data" / "launch" / "stack.log").read_text()
    assert log.rstrip().endswith("Stopped.")
    ours = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert not ours
