"""Agents and tool runners that nobody here wrote, each at one whole task with a tool: the stub model says what a script
has, and what the client does with it is its own.

Where they are installed: see `test_clients.py`. Codex is the npm package `@openai/codex`.
"""

import json
from pathlib import Path

from tests.clients.conftest import HERE, MODEL, Program, Script, calling
from tests.clients.installed import node_with, python_with
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing

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


WEATHER = [("weather in Rome", calling("weather", {"city": "Rome"})), ("17 degrees", "It is warm in Rome.")]
RAN = {"asked": ["Rome"], "answers": [["tool_use"], ["text"]], "said": "It is warm in Rome."}


async def test_anthropic_runner(gateway: RunningGateway, script: Script, program: Program) -> None:
    """It asks for a thread at first, and goes on without when it is told that there is none."""
    script.turns = WEATHER
    python = python_with("anthropic.lib.threads")
    out = await program(python, str(HERE / "use_anthropic_runner.py"), gateway.url, MODEL)
    assert json.loads(out) == RAN


async def test_anthropic_runner_npm(gateway: RunningGateway, script: Script, program: Program) -> None:
    script.turns = WEATHER
    node, modules = node_with("@anthropic-ai/sdk")
    out = await program(node, str(HERE / "use_anthropic_runner.mjs"), gateway.url, MODEL, modules)
    assert json.loads(out) == RAN


async def test_claude_code(gateway: RunningGateway, script: Script, program: Program, tmp_path: Path) -> None:
    """It runs the command that the model asks for, and says what the model makes of the output."""
    python = python_with("claude_agent_sdk")
    script.turns = [
        ("Say the word.", calling("Bash", {"command": "printf wo; printf rd-17", "description": "Says it"})),
        ("word-17", "The word is word-17."),
    ]
    asked = ["Say the word.", "--max-turns", "4", "--allowedTools", "Bash"]
    out = await program(python, str(HERE / "use_claude_agent.py"), gateway.url, MODEL, str(tmp_path), *asked)
    seen = json.loads(out)
    assert (seen["result"], seen["num_turns"], seen["is_error"]) == ("The word is word-17.", 2, False)


async def test_instructor(gateway: RunningGateway, script: Script, ring: FakeRing, program: Program) -> None:
    """pydantic's schemas leave their objects open; the grammar is recorded with them closed."""
    script.turns = [("Ann is 31", calling("User", {"name": "Ann", "age": 31}))]
    python = python_with("instructor")
    out = await program(python, str(HERE / "use_instructor_tools.py"), gateway.url, MODEL)
    assert json.loads(out) == {"name": "Ann", "age": 31}
    assert is_closed(ring)


LLM = """
- model_id: here
  model_name: stub
  api_base: {url}/v1
  supports_tools: true
  supports_schema: true
"""


async def test_llm(gateway: RunningGateway, script: Script, ring: FakeRing, program: Program, tmp_path: Path) -> None:
    python = python_with("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(LLM.format(url=gateway.url))

    async def ask(*given: str) -> str:
        asked = (python, "-m", "llm", "prompt", "-m", "here", "--key", "none", "--no-log")
        return await program(*asked, *given, LLM_USER_PATH=str(tmp_path), HOME=str(tmp_path))

    script.turns = [("Ann is 31", '{"name": "Ann", "age": 31}'), *WEATHER]
    assert json.loads(await ask("Ann is 31 years old.", "--schema", "name, age int")) == {"name": "Ann", "age": 31}
    assert is_closed(ring)
    weather = 'def weather(city: str) -> str:\n    return f"{city}: 17 degrees"'
    said = await ask("What is the weather in Rome?", "--functions", weather)
    assert said.strip() == "It is warm in Rome."
    assert "Rome: 17 degrees" in script.prompts[-1]


def is_closed(ring: FakeRing) -> bool:
    """Whether the grammar of the last request has objects of the named properties alone."""
    grammar = ring.requests[-1].grammar
    return grammar is not None and '"additionalProperties":false' in grammar.text
