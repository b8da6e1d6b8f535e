"""`ryzanstein nats-config`: where the passwords of the configuration stand."""

import pytest

from services.cli.supervision.nats_server import nats_config
from shared.errors import ConfigurationError


def test_passwords_may_stand_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    nats_config(passwords="../secrets/passwords")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("the passwords stand in the file ../secrets/passwords.")
    assert lines[1] == 'include "../secrets/passwords"'


def test_without_a_file_they_stand_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    nats_config()
    text = capsys.readouterr().out
    assert "stand in the environment of nats-server" in text
    assert "include" not in text


def test_a_path_that_nats_server_would_not_find_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="below the configuration's directory"):
        nats_config(passwords="/run/secrets/passwords")
