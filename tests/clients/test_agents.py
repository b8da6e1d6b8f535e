"""Agents and tool runners that nobody here wrote, each at one whole task with a tool: the stub model says what a script
has, and what the client does with it is its own.

Where they are installed: see `test_clients.py`. Codex is the npm package `@openai/codex`.
"""

import json
from pathlib import Path

from tests.clients.conftest import Program, Script, calling
from tests.clients.installed import node_with
from tests.integration.gateway.conftest import RunningGateway

CODEX = """
model = "stub"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
request_max_retries = 0
stream_max_retries = 0
"""


async def test_codex(gateway: RunningGateway, script: Script, program: Program, tmp_path: Path) -> None:
    """It runs the command that the model asks for, and says what the model makes of the output; a tool of a namespace
    is one of its own too."""
    node, modules = node_with("@openai/codex")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CODEX.format(url=gateway.url))
    script.turns = [
        ("Say the word.", calling("exec_command", {"cmd": "printf wo; printf rd-17"})),
        ("word-17", calling("multi_agent_v1__close_agent", {"target": "nobody-there"})),
        ("nobody-there", "The word is word-17."),
    ]
    codex = f"{modules}/node_modules/@openai/codex/bin/codex.js"
    asked = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    out = await program(
        node, codex, *asked, "Say the word.", cwd=work, CODEX_HOME=str(home), HOME=str(home), KEY="none"
    )
    events = [json.loads(line) for line in out.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["The word is word-17."]
    [ran] = [item for item in items if item["type"] == "command_execution"]
    assert (ran["aggregated_output"], ran["exit_code"]) == ("word-17", 0)
    assert "invalid agent id nobody-there" in script.prompts[-1], "the tool of the namespace has answered"
