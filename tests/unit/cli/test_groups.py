"""Groups of commands: each is gone with its line in the list, and nothing else is."""

import json
import re
import subprocess
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

from services.cli.groups import GROUPS, CommandGroup, command_line
from services.cli.other_names import COMMANDS, MODELS
from shared.errors import ConfigurationError

NAMES = [name for group in GROUPS for name in group.commands]
ROOMS = ("services.cli.commands.", "services.cli.sla.")


def test_every_command_stands_in_the_list_once() -> None:
    assert len(NAMES) == len(set(NAMES))


def without(group: CommandGroup) -> dict[str, object]:
    """What becomes of every command without `group`, whose room cannot be imported either."""
    folder = group.module.removesuffix(".command").removesuffix(".local")
    for module in [name for name in sys.modules if name.startswith(ROOMS)]:
        del sys.modules[module]
    if group.module.startswith(ROOMS):
        sys.modules[folder] = None  # type: ignore[assignment]
    invoke = partial(CliRunner().invoke, command_line([one for one in GROUPS if one is not group]))
    try:
        helped = invoke(["--help"]).output.partition("Commands:")[2]
        codes = {name: invoke([name, "--help"]).exit_code for name in NAMES}
        return {"listed": re.findall(r"^  (\S+)", helped, re.MULTILINE), "codes": codes}
    finally:
        sys.modules.pop(folder, None)


@pytest.fixture(scope="module")
def ends() -> dict[str, dict[str, object]]:
    """In a process of its own: modules are imported again for each."""
    code = f"import json; from {__name__} import *; print(json.dumps({{one.module: without(one) for one in GROUPS}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.commands[0])
def test_without_a_group_the_others_work(group: CommandGroup, ends: dict[str, dict[str, object]]) -> None:
    end = ends[group.module]
    assert end["listed"] == [name for name in NAMES if name not in group.commands]
    assert end["codes"] == {name: 2 if name in group.commands else 0 for name in NAMES}


@pytest.mark.parametrize("where", [[], ["models"]], ids=" ".join)
def test_who_types_a_command_of_another_program_is_told_what_it_is_called_here(where: list[str]) -> None:
    invoke = partial(CliRunner().invoke, command_line(GROUPS))
    for name, told in (MODELS if where else COMMANDS).items():
        result = invoke([*where, name, "something"])
        assert result.exit_code == 2
        assert f"There is no command {name!r}: {told}." in result.output
        for command in re.findall(r"`ryzanstein ([^`]+)`", told):
            assert invoke([*command.split(), "--help"]).exit_code == 0, command


def test_a_group_without_its_packages_says_what_to_install() -> None:
    lacking = CommandGroup("services.cli.lacking", ("steam",), extra="all")

    def absent(name: str) -> None:
        raise ModuleNotFoundError(name="steam.engine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.cli.groups.import_module", absent)
        result = CliRunner().invoke(command_line([lacking]), ["steam"])
    assert isinstance(result.exception, ConfigurationError)
    assert "needs the package steam," in str(result.exception)
    assert "pip install 'ryzanstein[all]'" in str(result.exception)
