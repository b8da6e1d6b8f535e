"""`ryzanstein launch`: agents that nobody here wrote, started by it, each at one whole task: a tool called, an answer
streamed. The stub model says what a script has.

RYZANSTEIN_CLIENTS_PATH names the directories in which their programs are; one that is nowhere is skipped, and says so.
"""

import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands.launch.clients import CLIENTS
from tests.clients.conftest import Program, Script, calling
from tests.integration.gateway.conftest import RunningGateway

ASKED = "Say the word."
COMMAND = "printf wo; printf rd-17"
SAID = "The word is word-17."
Launched = Callable[..., Awaitable[str]]


@pytest.fixture
def launched(gateway: RunningGateway, program: Program, tmp_path: Path) -> Launched:
    """Runs a client by its name in an empty directory, with an empty home; returns what it has printed."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    async def run(name: str, *arguments: str, **variables: str) -> str:
        path = os.pathsep.join((os.environ.get("RYZANSTEIN_CLIENTS_PATH", ""), os.environ["PATH"]))
        if shutil.which(CLIENTS[name].program, path=path) is None:
            pytest.skip(f"NOT JUDGED BY {name}: no program {CLIENTS[name].program} in RYZANSTEIN_CLIENTS_PATH")
        command = [sys.executable, "-m", "services.cli", "launch", name, "--url", gateway.url]
        command += ["--data-dir", str(tmp_path / "data"), "--", *arguments]
        root = str(Path(__file__).parents[2])
        return await program(*command, cwd=work, HOME=str(home), PATH=path, PYTHONPATH=root, **variables)

    return run


def turns(tool: str, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    return [(ASKED, calling(tool, arguments)), ("word-17", SAID)]


async def test_claude(launched: Launched, script: Script) -> None:
    script.turns = turns("Bash", {"command": COMMAND, "description": "Says it"})
    out = await launched("claude", "-p", ASKED, "--max-turns", "4", "--allowedTools", "Bash")
    assert out.strip().splitlines()[-1] == SAID


async def test_codex(launched: Launched, script: Script) -> None:
    script.turns = turns("exec_command", {"cmd": COMMAND})
    asked = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED)
    assert SAID in await launched("codex", *asked)


async def test_opencode(launched: Launched, script: Script) -> None:
    script.turns = turns("bash", {"command": COMMAND, "description": "Says it"})
    assert SAID in await launched("opencode", "run", ASKED)


async def test_qwen_code(launched: Launched, script: Script) -> None:
    script.turns = turns("run_shell_command", {"command": COMMAND, "is_background": False})
    assert SAID in await launched("qwen-code", "-y", "-p", ASKED)


async def test_continue(launched: Launched, script: Script) -> None:
    script.turns = turns("Bash", {"command": COMMAND})
    assert SAID in await launched("continue", "-p", "--auto", ASKED)


async def test_crush(launched: Launched, script: Script) -> None:
    script.turns = turns("bash", {"command": COMMAND, "description": "Says it"})
    assert SAID in await launched("crush", "run", "--quiet", ASKED)


async def test_goose(launched: Launched, script: Script) -> None:
    script.turns = turns("developer__shell", {"command": COMMAND})
    assert SAID in await launched("goose", "--with-builtin", "developer", "--text", ASKED)


async def test_aider(launched: Launched, script: Script, tmp_path: Path) -> None:
    """It calls no tools: it writes what the model's answer says into files."""
    script.turns = [(ASKED, "word.txt\n```\nword-17\n```\n")]
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-gitignore")
    await launched("aider", *quiet, "--message", ASKED, "word.txt")
    assert (tmp_path / "work" / "word.txt").read_text() == "word-17\n"
