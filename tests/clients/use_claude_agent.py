"""Claude Code, as claude-agent-sdk brings it, against a server: URL and model are the arguments, then a directory that
is its home, then what else its command line gets. Prints what it has said as JSON.

It sends what agents send: some 80,000 tokens of instructions and tools, and its conversation again with every turn.
"""

import os
import subprocess
import sys
from pathlib import Path

import claude_agent_sdk

url, model, home, *more = sys.argv[1:]
program = Path(claude_agent_sdk.__file__).parent / "_bundled" / "claude"
environment = {
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_BASE_URL": url,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    **({} if more else {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16"}),
    "DISABLE_AUTOUPDATER": "1",
    "HOME": home,
    "PATH": os.environ["PATH"],
}
asked = ["-p", *(more or ("Hi", "--max-turns", "4")), "--output-format", "json", "--model", model]
done = subprocess.run(
    [program, *asked],
    env=environment,
    cwd=home,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
)
sys.stdout.write(done.stdout or done.stderr)
