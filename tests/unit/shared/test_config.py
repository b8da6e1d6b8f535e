"""Settings: precedence, one sentence for what is wrong, and durations as people write them."""

from pathlib import Path

import pytest

from shared.config import CommonSettings, load_settings, parse_settings, seconds_of, section_of, with_sections
from shared.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CommonSettings.model_fields:
        monkeypatch.delenv(f"RYZANSTEIN_{name.upper()}", raising=False)
    monkeypatch.delenv("RYZANSTEIN_CONFIG", raising=False)
    monkeypatch.delenv("RYZANSTEIN_SECRETS_DIR", raising=False)


def test_arguments_come_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('nats_url = "nats://file:1"\nlog_level = "debug"\nhost = "file"\n')
    monkeypatch.setenv("RYZANSTEIN_CONFIG", str(file))
    monkeypatch.setenv("RYZANSTEIN_LOG_LEVEL", "warning")
    monkeypatch.setenv("RYZANSTEIN_HOST", "environment")
    settings = parse_settings(CommonSettings, "test", ["--host", "argument"])
    assert (settings.nats_url, settings.log_level, settings.host) == ("nats://file:1", "warning", "argument")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(CommonSettings).host = "x"


def test_an_override_of_none_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_HOST", "environment")
    assert load_settings(CommonSettings, host=None).host == "environment"


@pytest.mark.parametrize(
    ("name", "value"), [("OPS_PORT", "70000"), ("OPS_PORT", "x"), ("LOG_LEVEL", "loud"), ("BEAT_INTERVAL", "0")]
)
def test_a_wrong_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"RYZANSTEIN_{name}", value)
    with pytest.raises(ConfigurationError, match=f"RYZANSTEIN_{name} .* is wrong: .*{value}"):
        load_settings(CommonSettings)


def test_a_missing_or_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    monkeypatch.setenv("RYZANSTEIN_CONFIG", str(file))
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_settings(CommonSettings)
    file.write_text("this is not toml")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_settings(CommonSettings)


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(CommonSettings, "ryzanstein serve test", ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in CommonSettings.model_fields:
        assert (f"--{name.replace('_', '-')}" in text) == (name != "nats_password")


def test_an_unknown_option_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(CommonSettings, "ryzanstein serve test", ["--nonsense"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--nats-password", "hunter2"], ["--nats-password=hunter2"]])
def test_a_secret_is_no_option(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="RYZANSTEIN_NATS_PASSWORD") as caught:
        parse_settings(CommonSettings, "test", arguments)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "text", ['nats_password = ["hunter2"]', 'nats_url = ["nats://me:hunter2@host"]', "nats_password = 1977"]
)
def test_a_secret_of_the_wrong_type_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    monkeypatch.setenv("RYZANSTEIN_CONFIG", str(file))
    with pytest.raises(ConfigurationError, match=r"RYZANSTEIN_NATS_(URL|PASSWORD)") as caught:
        load_settings(CommonSettings)
    assert "hunter2" not in str(caught.value)
    assert "1977" not in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b'host = "\xff\xfe"')
    monkeypatch.setenv("RYZANSTEIN_CONFIG", str(file))
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        load_settings(CommonSettings)


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_CONFIG", "/proc/self/mem")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(CommonSettings)


def test_secrets_come_after_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, secrets = tmp_path / "settings.toml", tmp_path / "secrets"
    file.write_text('nats_password = "file"\nnats_user = "file"\nhost = "file"\n')
    secrets.mkdir()
    (secrets / "ryzanstein_nats_password").write_text("secret\n")
    (secrets / "RYZANSTEIN_NATS_USER").write_text("secret")
    (secrets / "another_programs").write_bytes(b"\xff")
    monkeypatch.setenv("RYZANSTEIN_CONFIG", str(file))
    monkeypatch.setenv("RYZANSTEIN_SECRETS_DIR", str(secrets))
    monkeypatch.setenv("RYZANSTEIN_NATS_USER", "environment")
    settings = load_settings(CommonSettings)
    given = (settings.nats_password.get_secret_value(), settings.nats_user, settings.host)
    assert given == ("secret", "environment", "file")


def test_secrets_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_SECRETS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"cannot be read .*nowhere"):
        load_settings(CommonSettings)
    monkeypatch.setenv("RYZANSTEIN_SECRETS_DIR", str(tmp_path))
    secret = tmp_path / "ryzanstein_nats_password"
    secret.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be read .*nats_password"):
        load_settings(CommonSettings)
    secret.rmdir()
    secret.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="nats_password is not UTF-8"):
        load_settings(CommonSettings)


class OfService(CommonSettings):
    port: int = 1


class Section(CommonSettings):
    """What a feature brings."""

    exports: int = 3
    """How many."""


def test_a_feature_brings_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = with_sections(OfService, [Section])
    settings = parse_settings(kind, "test", ["--exports", "7", "--host", "here"])
    assert (settings.host, section_of(settings, Section).exports) == ("here", 7)
    assert kind.model_fields["exports"].description == "How many."
    monkeypatch.setenv("RYZANSTEIN_EXPORTS", "5")
    assert section_of(OfService(), Section).exports == 5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("2w", 1_209_600), ("1h30m", 5400), ("1.5h", 5400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "0s", "-1m", "1 h", "h", "1x", "1h30", "1234567s", "1.5", "٣s"])
def test_what_is_no_duration(text: str) -> None:
    assert seconds_of(text) is None
