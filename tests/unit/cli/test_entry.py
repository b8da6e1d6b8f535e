"""The entry point of the command."""

import builtins
import sys
from typing import Any

import pytest

from services.cli.entry import main


def test_ctrl_c_while_packages_are_imported_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def interrupted(name: str, *more: Any) -> Any:
        if name == "services.cli.up_command":
            raise KeyboardInterrupt
        return real(name, *more)

    monkeypatch.setattr(sys, "argv", ["ryzanstein", "up"])
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
